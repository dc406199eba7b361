// The section of histograms: bins by steps.
"use strict";

const histograms = {
  draw() {
    const names = [...new Map(page.runs.flatMap((run) => run.histograms.map((table) => [`${table.kind}/${table.statistic}`, table]))).values()];
    fill(byId("histograms-table"), names.map(({ kind, statistic }) => [JSON.stringify([kind, statistic]), statistic === "hist" ? kind : `${kind}, ${statistic}`]));
    const [kind, statistic] = JSON.parse(byId("histograms-table").value);
    const loadedTables = loadAll(kind, statistic, "histograms");
    const sites = filtered(unionOfSites(loadedTables));
    const site = chooseSite("histograms-site", sites, () => this.widest(loadedTables, sites));
    const boxes = charts(byId("histograms-charts"), page.runs.length);
    loadedTables.forEach((loaded, index) => this.drawRun(boxes[index], loaded, site, several ? page.runs[index].name : undefined));
  },

  /** The site with elements in the most bins: a tensor of zeros, such as an initial bias, looks like an empty panel. */
  widest(loadedTables, sites) {
    const bins = (loaded, row) => loaded.values.subarray(row * loaded.columns * loaded.bins.length, (row + 1) * loaded.columns * loaded.bins.length).reduce((count, share) => count + (share > 0), 0);
    const counts = sites.map((site) => Math.max(...loadedTables.map((loaded) => (loaded?.rowOf.has(site) ? bins(loaded, loaded.rowOf.get(site)) : 0))));
    return sites[counts.indexOf(Math.max(...counts))];
  },

  drawRun(div, loaded, site, title) {
    const row = loaded?.rowOf.get(site);
    if (row === undefined) {
      empty(div, `${title ?? site}: not recorded`);
      return;
    }
    const { steps, bins } = loaded;
    const at = (bin, column) => loaded.values[(row * steps.length + column) * bins.length + bin];
    const isFilled = (bin) => steps.some((_, column) => at(bin, column) > 0);
    const shown = withoutGaps(bins.map((_, bin) => bin).filter(isFilled)).reverse(); // the largest on top, as on an axis
    const names = shown.map((bin, row) => (bin < 0 ? `⋮${"\u200b".repeat(row)}` : decimal(bins[bin])));
    const broken = (column) => loaded.nonfinite[row * steps.length + column];
    const note = (column) => (broken(column) ? `\nand ${format(broken(column))} elements that are not finite` : "");
    const shares = shown.filter((bin) => bin >= 0).flatMap((bin) => steps.map((_, column) => at(bin, column))).filter((share) => share > 0);
    heatmap(div, {
      rows: names,
      columns: columnsOf(steps),
      value: (index, column) => (shown[index] < 0 ? undefined : at(shown[index], column) || undefined),
      hover: (index, column) => `${names[index].trim()}\nstep ${steps[column]}\n${format(100 * (at(shown[index], column) || 0))} % of the elements${note(column)}`,
      scale: "log",
      range: shares.length ? extent(Float32Array.from(shares), 0, true) : [1e-3, 1],
      title,
      xaxis: stepAxis(steps),
      label: "share of the elements",
      height: Math.min(640, 120 + 14 * shown.length),
    });
  },
};

/** Bins in their order, with -1 for each wide gap. */
function withoutGaps(bins) {
  return bins.flatMap((bin, rank) => {
    const gap = rank ? bin - bins[rank - 1] - 1 : 0;
    if (gap > 3) return [-1, bin];
    return [...Array.from({ length: gap }, (_, index) => bin - gap + index), bin];
  });
}

/** A bin's name with its powers of two written out. */
const decimal = (name) => name.replace(/2\^(-?\d+)/g, (_, exponent) => format(Number((2 ** exponent).toPrecision(2))));
