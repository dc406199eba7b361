// The section of singular values: the largest ones of a matrix over steps.
"use strict";

const spectra = {
  draw() {
    const tables = tableNames(({ statistic }) => statistic.startsWith("singular_value_"), "spectra");
    fill(byId("spectra-table"), [...new Set(tables.map(({ kind }) => kind))].map((kind) => [kind]));
    const kind = byId("spectra-table").value;
    const values = tables.filter((table) => table.kind === kind).map(({ statistic, base }) => ({
      name: statistic,
      base,
      loaded: loadAll(kind, statistic, "spectra"),
      residuals: loadAll(kind, statistic.replace("singular_value", "residual"), "spectra"),
    }));
    const sites = filtered(unionOfSites(values.flatMap(({ loaded }) => loaded)));
    const site = chooseSite("spectra-site", sites, () => sites.find((site) => this.hasNumber(values.at(-1).loaded, site)) ?? sites[0]);
    const boxes = charts(byId("spectra-charts"), page.runs.length);
    page.runs.forEach((run, index) => {
      const traces = values.flatMap((value, rank) => this.line(value, index, site, shade(rank / Math.max(1, values.length - 1))));
      const title = [several ? run.name : site, traces.length ? "" : "not recorded"].filter(Boolean).join(": ");
      const isLog = wantsLog(traces.flatMap((trace) => trace.y));
      lines(boxes[index], { traces, title, xaxis: STEPS, label: labelOf(values[0].base, "singular values"), isLog, legend: true, height: 380 });
    });
  },

  /** Whether a site has a number in any run: a vector, such as a bias, has no second singular value. */
  hasNumber(loadedTables, site) {
    return loadedTables.some((loaded) => loaded?.rowOf.has(site) && rowOf(loaded, loaded.rowOf.get(site)).some(Number.isFinite));
  },

  /** The line of a value of a run, with residuals in its text; none where the site does not have so many values. */
  line({ name, loaded, residuals }, run, site, color) {
    const [line, ...marks] = lineOfSite(name, loaded[run], site, { color });
    const row = residuals[run]?.rowOf.get(site);
    if (!line || row === undefined) return [];
    const numbers = rowOf(residuals[run], row); // of the same steps
    const text = line.text.map((words, column) => `${words}, residual ${format(numbers[column])}`);
    const mode = line.y.includes(null) ? "lines+markers" : line.mode; // a value between two gaps has no line
    return [{ ...line, text, mode }, ...marks].filter(({ y }) => y.some((number) => number !== null));
  },
};
