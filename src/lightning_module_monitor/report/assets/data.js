// The numbers of the page: decoded at first use, and kept.
"use strict";

const ABSENT_BITS = 0x7fc00100;

const page = JSON.parse(document.getElementById("payload").textContent);

/** The numbers of a packed array: base64 of the three upper bytes of each float32. */
function unpack(text) {
  const packed = atob(text);
  const bytes = new Uint8Array((4 * packed.length) / 3);
  for (let index = 0; index < packed.length; index++) bytes[Math.floor(index / 3) + index + 1] = packed.charCodeAt(index);
  return new Float32Array(bytes.buffer);
}

/** A table's numbers with its sites and steps. Rows are sites, columns are steps; of histograms each with a number for each bin. */
function load(table) {
  if (!table.loaded) {
    const [values, sites, steps] = [unpack(table.data), page.lists[table.sites], page.lists[table.first]];
    const rowOf = new Map(sites.map((site, row) => [site, row]));
    const nonfinite = table.nonfinite && unpack(table.nonfinite); // of histograms
    table.loaded = { values, bits: new Uint32Array(values.buffer), sites, steps, lastSteps: page.lists[table.last], rowOf, columns: steps.length, bins: table.bins, nonfinite, rows: [] };
    table.data = table.nonfinite = null; // the text is not needed any more
  }
  return table.loaded;
}

/** Whether a value was recorded, also NaN. */
function isRecorded(loaded, row, column) {
  return loaded.bits[row * loaded.columns + column] !== ABSENT_BITS;
}

/** The numbers of a site, the same array each time: NaN also where nothing was recorded. */
function rowOf(loaded, row) {
  return (loaded.rows[row] ??= loaded.values.subarray(row * loaded.columns, (row + 1) * loaded.columns));
}

/** The numbers of some rows at a step. */
function columnOf(loaded, column, rows) {
  return rows.map((row) => loaded.values[row * loaded.columns + column]);
}

/** The parameter that a parametrization, such as weight norm, computes from a site: a.weight of a.parametrizations.weight.original0. */
function madeOf(site) {
  return site.replace(/\.parametrizations\.([^.]+)\.original\d*$/, ".$1");
}

/** Type and output of a site's module, as a line of its own; empty where they are not known. */
function moduleLine(run, site) {
  for (let name = madeOf(site); name; name = name.slice(0, Math.max(0, name.lastIndexOf(".")))) {
    if (Object.hasOwn(run.modules, name)) return `\n${run.modules[name]}`;
  }
  return "";
}

/** The loaded tables of a kind and statistic, by run; undefined for a run without. `list`: the run's tables, spectra or histograms. */
function loadAll(kind, statistic, list = "tables") {
  return page.runs.map((run) => run[list].find((table) => table.kind === kind && table.statistic === statistic)).map((table) => table && load(table));
}

/** Every pair of kind and statistic of any run, in the order of the runs. `list`: the run's tables or spectra. */
function tableNames(accept, list = "tables") {
  const names = new Map();
  for (const run of page.runs) {
    for (const table of run[list]) {
      if (accept(table)) names.set(`${table.kind}/${table.statistic}`, { kind: table.kind, statistic: table.statistic, base: table.base });
    }
  }
  return [...names.values()];
}

/** Sites of several loaded tables, without repetition; and their steps, ascending. */
const unionOfSites = (loadedTables) => [...new Set(loadedTables.flatMap((loaded) => loaded?.sites ?? []))];
const unionOfSteps = (loadedTables) => [...new Set(loadedTables.flatMap((loaded) => loaded?.steps ?? []))].sort((a, b) => a - b);

/** The column of the last record up to a step; -1 without such a record. */
function columnAt(loaded, step) {
  let column = -1;
  while (column + 1 < loaded.columns && loaded.steps[column + 1] <= step) column++;
  return column;
}

/** A quantile of the finite numbers; NaN without a finite number. */
function quantile(numbers, share) {
  const sorted = numbers.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return NaN;
  const position = (sorted.length - 1) * share;
  const low = Math.floor(position);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (position - low);
}

/** A number as text. */
function format(value) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const magnitude = Math.abs(value);
  return magnitude >= 1e5 || magnitude < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
}
