// The section of histograms: bins by steps.
"use strict";

const histograms = {
  async draw() {
    const names = [...new Map(page.runs.flatMap((run) => run.histograms.map((one) => [`${one.kind}/${one.statistic}`, one]))).values()];
    fill(byId("histograms-table"), names.map((one) => [JSON.stringify([one.kind, one.statistic]), one.statistic === "hist" ? one.kind : `${one.kind}, ${one.statistic}`]));
    const [kind, statistic] = JSON.parse(byId("histograms-table").value);
    const found = await Promise.all(page.runs.map((run) => this.load(run.histograms.find((one) => one.kind === kind && one.statistic === statistic))));
    const sites = filtered(unionOfSites(found));
    fill(byId("histograms-site"), sites.map((site) => [site]));
    const site = byId("histograms-site").value;
    const boxes = charts(byId("histograms-charts"), page.runs.length);
    found.forEach((loaded, index) => this.drawRun(boxes[index], loaded, site, several ? page.runs[index].name : undefined));
  },

  async load(one) {
    if (!one) return undefined;
    if (!one.loaded) {
      const [shares, nonfinite] = await Promise.all([unpack(one.data), unpack(one.nonfinite)]);
      const sites = page.lists[one.sites];
      one.loaded = { shares, nonfinite, sites, steps: page.lists[one.steps], bins: one.bins, rowOf: new Map(sites.map((site, row) => [site, row])) };
    }
    return one.loaded;
  },

  drawRun(div, loaded, site, title) {
    const row = loaded?.rowOf.get(site);
    if (row === undefined) {
      Plotly.react(div, [], layoutOf({ title: `${title ?? site}: not recorded`, height: 120 }), CONFIG);
      return;
    }
    const { steps, bins } = loaded;
    const at = (bin, column) => loaded.shares[(row * steps.length + column) * bins.length + bin];
    const isFilled = (bin) => steps.some((_, column) => at(bin, column) > 0);
    const shown = withoutGaps(bins.map((_, bin) => bin).filter(isFilled)).reverse(); // the largest on top, as on an axis
    const names = shown.map((bin, place) => (bin < 0 ? `⋮${"\u200b".repeat(place)}` : decimal(bins[bin])));
    const broken = (column) => loaded.nonfinite[row * steps.length + column];
    const note = (column) => (broken(column) ? `\nand ${format(broken(column))} elements that are not finite` : "");
    const shares = shown.filter((bin) => bin >= 0).flatMap((bin) => steps.map((_, column) => at(bin, column))).filter((share) => share > 0);
    heatmap(div, {
      rows: names,
      columns: columnsOf(steps),
      value: (place, column) => (shown[place] < 0 ? undefined : at(shown[place], column) || undefined),
      hover: (place, column) => `${names[place].trim()}\nstep ${steps[column]}\n${format(100 * (at(shown[place], column) || 0))} % of the elements${note(column)}`,
      scale: "log",
      range: shares.length ? extent(Float32Array.from(shares), 0, true) : [1e-3, 1],
      title,
      xaxis: stepAxis(steps),
      label: "share of the elements",
      height: Math.min(640, 120 + 14 * shown.length),
    });
  },
};

/** Bins in their order, and -1 for each gap between them that is wide. */
function withoutGaps(bins) {
  return bins.flatMap((bin, place) => {
    const gap = place ? bin - bins[place - 1] - 1 : 0;
    if (gap > 3) return [-1, bin];
    return [...Array.from({ length: gap }, (_, index) => bin - gap + index), bin];
  });
}

/** A bin's name with its powers of two written out. */
const decimal = (name) => name.replace(/2\^(-?\d+)/g, (_, exponent) => format(Number((2 ** exponent).toPrecision(2))));
