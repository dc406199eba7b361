// The section of quantiles: bands of a tensor's elements over steps.
"use strict";

const BANDS = [["p01", "p99"], ["p05", "p95"], ["p25", "p75"]]; // from the widest
const MEDIAN = "median";

const quantiles = {
  draw() {
    const names = [...BANDS.flat(), MEDIAN];
    const kinds = [...new Set(tableNames((table) => names.includes(table.statistic)).map(({ kind }) => kind))];
    fill(byId("quantiles-table"), kinds.map((kind) => [kind]));
    const kind = byId("quantiles-table").value;
    const loaded = new Map(names.map((name) => [name, loadAll(kind, name)]));
    const sites = filtered(unionOfSites([...loaded.values()].flat()));
    const site = chooseSite("quantiles-site", sites, () => sites[0]);
    const boxes = charts(byId("quantiles-charts"), page.runs.length);
    page.runs.forEach((run, index) => {
      const traces = this.bands((name) => loaded.get(name)[index], site, lineColor(index));
      const title = [several ? run.name : site, traces.length ? "" : "not recorded"].filter(Boolean).join(": ");
      lines(boxes[index], { traces, title, xaxis: STEPS, label: "elements", legend: true, height: 380, hovermode: "x unified" });
    });
  },

  /** The bands of a site; `tableOf(name)`: the loaded table of a statistic of a run. */
  bands(tableOf, site, base) {
    const valuesOf = (name) => {
      const loaded = tableOf(name);
      const row = loaded?.rowOf.get(site);
      return row === undefined ? undefined : { x: loaded.steps, y: [...rowOf(loaded, row)].map(finiteOrNull) };
    };
    const traces = BANDS.flatMap(([low, high], rank) => {
      const [least, most] = [valuesOf(low), valuesOf(high)];
      const look = { hovertemplate: "%{y:.3g}", fillcolor: faded(base, 0.15 + 0.1 * rank) };
      return least && most ? band({ ...least, name: low }, { ...most, name: `${low} to ${high}` }, look) : [];
    });
    return [...traces, ...lineOfSite(MEDIAN, tableOf(MEDIAN), site, { color: base, width: 2.4 })];
  },
};
