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
    const find = (run, name) => [name, loadIfAny(findTable(run, kind, name))];
    const tablesByRun = page.runs.map((run) => new Map(names.map((name) => find(run, name))));
    const sites = filtered(unionOfSites(tablesByRun.flatMap((tables) => [...tables.values()])));
    fill(byId("quantiles-site"), sites.map((site) => [site]), byId("quantiles-site").value || (sites.includes(first.site) ? first.site : sites[0]));
    const site = byId("quantiles-site").value;
    const boxes = charts(byId("quantiles-charts"), page.runs.length);
    tablesByRun.forEach((tables, index) => {
      const traces = this.bands(tables, site, lineColor(index));
      const title = [several ? page.runs[index].name : site, traces.length ? "" : "not recorded"].filter(Boolean).join(": ");
      lines(boxes[index], { traces, title, xaxis: STEPS, label: "elements", legend: true, height: 380, hovermode: "x unified" });
    });
  },

  bands(tables, site, base) {
    const valuesOf = (name) => {
      const loaded = tables.get(name);
      const row = loaded?.rowOf.get(site);
      return row === undefined ? undefined : { x: loaded.steps, y: [...rowOf(loaded, row)].map((value) => (Number.isFinite(value) ? value : null)) };
    };
    const traces = BANDS.flatMap(([low, high], rank) => {
      const [least, most] = [valuesOf(low), valuesOf(high)];
      if (!least || !most) return [];
      const edge = { line: { width: 0 }, hovertemplate: "%{y:.3g}" };
      return [
        { ...least, ...edge, name: low, showlegend: false },
        { ...most, ...edge, name: `${low} to ${high}`, fill: "tonexty", fillcolor: faded(base, 0.15 + 0.1 * rank) },
      ];
    });
    const middle = tables.get(MEDIAN);
    const row = middle?.rowOf.get(site);
    return row === undefined ? traces : [...traces, ...lineOverSteps(MEDIAN, middle, row, { color: base, width: 2.4 })];
  },
};

const loadIfAny = (table) => (table ? load(table) : undefined);
