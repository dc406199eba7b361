// The sections of the page: what each of them draws, of which tables, by which controls.
"use strict";

const byId = (id) => document.getElementById(id);
const several = page.runs.length > 1;
const search = { text: "", accepts: () => true };

/** Fill a select with options; keeps what was chosen, where it is still there. */
function fill(select, options, chosen) {
  const before = chosen ?? select.value;
  select.replaceChildren(...options.map(([value, text]) => new Option(text ?? value, value)));
  if (options.some(([value]) => String(value) === String(before))) select.value = before;
}

/** As many chart containers in a box as there are titles. */
function charts(box, count) {
  while (box.children.length > count) {
    Plotly.purge(box.lastChild);
    box.lastChild.remove();
  }
  while (box.children.length < count) {
    const div = document.createElement("div");
    div.className = "chart";
    box.append(div);
  }
  return [...box.children];
}

/** A slider over steps: its label says the step. */
function slider(input, output, steps) {
  const atEnd = input.value === input.max;
  input.max = Math.max(0, steps.length - 1);
  if (atEnd || Number(input.value) > steps.length - 1) input.value = input.max;
  const step = steps[Number(input.value)];
  output.textContent = `step ${step}`;
  input.setAttribute("aria-valuetext", `step ${step}`);
  return step;
}

const filtered = (sites) => sites.filter(search.accepts);

// ------------------------------------------------------------------ heat maps

const SIGNED = new Set(["mean", "log_gain", "cosine", "min", "max"]);

function scaleOf(wish, loadedTables, statistic) {
  if (wish !== "auto") return wish;
  const anyNegative = loadedTables.some((loaded) => loaded && loaded.values.some((value) => value < 0));
  if (anyNegative) return SIGNED.has(statistic) ? "signed" : "linear";
  return wantsLog(loadedTables.flatMap((loaded) => (loaded ? [extent(loaded.values, 0, true)].flat() : []))) ? "log" : "linear";
}

/** Smallest and largest finite number (of the positive ones, if a logarithm is wanted), without the outer shares. */
function extent(values, trim, isPositive) {
  const name = `${trim}${isPositive}`;
  if (!extents.has(values)) extents.set(values, {});
  return (extents.get(values)[name] ??= newExtent(values, trim, isPositive));
}

const extents = new WeakMap(); // by array: a slider asks again and again

function newExtent(values, trim, isPositive) {
  const numbers = values.filter((value) => Number.isFinite(value) && (!isPositive || value > 0));
  if (!numbers.length) return [1e-30, 1e-30];
  if (!trim) {
    let [low, high] = [Infinity, -Infinity];
    for (const number of numbers) [low, high] = [number < low ? number : low, number > high ? number : high];
    return [low, high];
  }
  const sorted = Float32Array.from(numbers).sort();
  return [sorted[Math.floor(trim * (sorted.length - 1))], sorted[Math.ceil((1 - trim) * (sorted.length - 1))]];
}

/** The first parts of a name. */
const prefixOf = (site, depth) => site.split(".").slice(0, depth).join(".");

/** Sites by the first parts of their names. */
function groupsOf(sites, depth) {
  const groups = new Map();
  for (const site of sites) {
    const prefix = prefixOf(site, depth);
    if (!groups.has(prefix)) groups.set(prefix, []);
    groups.get(prefix).push(site);
  }
  return [...groups];
}

/** The depths at which sites can be grouped, and how many groups there are then. */
function depthsOf(sites) {
  const deepest = Math.max(0, ...sites.map((site) => site.split(".").length));
  const depths = [];
  for (let depth = 1; depth < deepest; depth++) {
    const count = new Set(sites.map((site) => prefixOf(site, depth))).size;
    if (count > 1 && count < sites.length) depths.push([depth, count]);
  }
  return depths;
}

const MANY_ROWS = 120;

const heat = {
  async draw() {
    const { kind, statistic } = JSON.parse(byId("heat-table").value);
    const loadedTables = await Promise.all(
      page.runs.map((run) => findTable(run, kind, statistic)).map((table) => (table ? load(table) : undefined)),
    );
    const all = unionOfSites(loadedTables);
    const sites = filtered(all);
    const depth = this.depth(sites);
    const groups = depth ? groupsOf(sites, depth) : sites.map((site) => [site, [site]]);
    const scale = scaleOf(byId("heat-scale").value, loadedTables, statistic);
    const trim = byId("heat-trim").checked ? 0.01 : 0;
    const ranges = loadedTables.filter(Boolean).map((loaded) => extent(loaded.values, trim, scale === "log"));
    const range = [Math.min(...ranges.map(([low]) => low)), Math.max(...ranges.map(([, high]) => high))];
    const boxes = charts(byId("heat-charts"), several ? 2 * page.runs.length - 1 : 1);
    const common = { rows: groups.map(([name]) => name), scale, range, label: statistic };
    byId("heat-charts").classList.toggle("many", several);
    loadedTables.forEach((loaded, index) => {
      const title = several ? page.runs[index].name : undefined;
      if (loaded) this.drawRun(boxes[index], loaded, groups, { ...common, title }, kind);
      else Plotly.react(boxes[index], [], layoutOf({ title: `${title}: not recorded`, height: 120 }), CONFIG);
    });
    for (let index = 1; index < page.runs.length; index++) {
      this.drawDifference(boxes[page.runs.length - 1 + index], loadedTables[0], loadedTables[index], groups, scale, index);
    }
    this.tell(all, sites, groups, depth, loadedTables);
    this.curve(kind, statistic, loadedTables, sites);
  },

  depth(sites) {
    const depths = depthsOf(sites);
    const automatic = sites.length <= MANY_ROWS ? undefined : depths.filter(([, count]) => count <= MANY_ROWS).pop();
    const select = byId("heat-group");
    const text = automatic ? `automatic: depth ${automatic[0]}, ${automatic[1]} groups` : `automatic: every site`;
    fill(select, [["auto", text], ["0", `every site (${sites.length})`], ...depths.map(([depth, count]) => [depth, `depth ${depth}: ${count} groups`])]);
    byId("heat-aggregate").disabled = !(select.value === "auto" ? automatic : Number(select.value));
    return select.value === "auto" ? (automatic ? automatic[0] : 0) : Number(select.value);
  },

  /** A group's number: what is not finite shows in any case. */
  aggregate(loaded, sites, column) {
    const rows = sites.map((site) => loaded.rowOf.get(site)).filter((row) => row !== undefined && isRecorded(loaded, row, column));
    if (!rows.length) return undefined;
    const numbers = columnOf(loaded, column, rows);
    if (numbers.length === 1) return numbers[0];
    const broken = numbers.find((number) => !Number.isFinite(number));
    if (broken !== undefined) return broken;
    const how = byId("heat-aggregate").value;
    return how === "median" ? quantile(numbers, 0.5) : how === "largest" ? Math.max(...numbers) : Math.min(...numbers);
  },

  drawRun(div, loaded, groups, options, kind) {
    const columns = isUneven(loaded.steps) ? loaded.steps.map(String) : loaded.steps;
    heatmap(div, {
      ...options,
      columns,
      value: (row, column) => this.aggregate(loaded, groups[row][1], column),
      hover: (row, column, text) => this.words(loaded, groups[row], column, `${options.label} ${text}`),
      xaxis: stepAxis(loaded.steps),
      uirevision: `${kind}${search.text}${groups.length}`,
    });
    div.pick = (row) => this.pick(groups[row]);
  },

  words(loaded, [name, sites], column, text) {
    const [first, last] = [loaded.steps[column], loaded.lastSteps[column]];
    const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    const of = sites.length > 1 ? ` (${byId("heat-aggregate").value} of ${sites.length} sites)` : "";
    return `${name}${of}\n${steps}\n${text}`;
  },

  drawDifference(div, loaded, other, groups, scale, index) {
    const title = `${page.runs[index].name} against ${page.runs[0].name}`;
    if (!loaded || !other) {
      Plotly.react(div, [], layoutOf({ title: `${title}: not in both`, height: 120 }), CONFIG);
      return;
    }
    const partner = loaded.steps.map((step) => nearestColumn(other, step));
    const matched = groups.map(([name, sites]) => [name, sites.filter((site) => loaded.rowOf.has(site) && other.rowOf.has(site))]);
    const difference = (row, column) => {
      const [name, sites] = matched[row];
      if (!sites.length || partner[column] < 0) return undefined;
      const [before, after] = [this.aggregate(loaded, sites, column), this.aggregate(other, sites, partner[column])];
      if (before === undefined || after === undefined) return undefined;
      if (scale !== "log") return after - before;
      return before === after ? 0 : Math.log2(after / before); // 0 against 0 is no difference
    };
    let largest = 0;
    for (let row = 0; row < groups.length; row++) {
      for (let column = 0; column < loaded.columns; column++) {
        const value = difference(row, column);
        if (Number.isFinite(value)) largest = Math.max(largest, Math.abs(value));
      }
    }
    const label = scale === "log" ? "log2 of the ratio" : "difference";
    const columns = isUneven(loaded.steps) ? loaded.steps.map(String) : loaded.steps;
    const hover = (row, column, text) => this.words(loaded, groups[row], column, `${label} ${text}`);
    const range = [-largest, largest];
    heatmap(div, { rows: groups.map(([name]) => name), columns, value: difference, hover, scale: "signed", range, title, xaxis: stepAxis(loaded.steps), label });
    div.pick = (row) => this.pick(groups[row]);
  },

  /** A row was picked: of a group its sites are shown, of a site its curve. */
  pick([name, sites]) {
    if (sites.length > 1) {
      byId("search").value = name;
      byId("heat-group").value = "auto";
      changeSearch();
    } else {
      byId("heat-site").value = name;
      this.draw();
    }
  },

  tell(all, sites, groups, depth, loadedTables) {
    const { common } = shortNames(groups.map(([name]) => name));
    const told = [];
    if (sites.length < all.length) told.push(`${sites.length} of ${all.length} sites match the search.`);
    if (common) told.push(`All names begin with “${common}.”`);
    if (depth) told.push("A row is a group of sites: click it, or press Enter, to see them.");
    const condensed = loadedTables.find((loaded) => loaded && loaded.steps.some((step, column) => step !== loaded.lastSteps[column]));
    if (condensed) told.push("A column stands for several records: of each site it shows the value of the largest magnitude, and before all one that is not finite.");
    byId("heat-note").textContent = told.join(" ");
  },

  curve(kind, statistic, loadedTables, sites) {
    const select = byId("heat-site");
    fill(select, sites.map((site) => [site, site]));
    const site = select.value;
    const traces = loadedTables.flatMap((loaded, index) => {
      const row = loaded && loaded.rowOf.get(site);
      if (row === undefined) return [];
      return lineOverSteps(several ? page.runs[index].name : site, loaded, row, { color: lineColor(index) });
    });
    const isLog = wantsLog(traces.flatMap((trace) => trace.y));
    const xaxis = { title: { text: "optimizer step", standoff: 6 } };
    lines(byId("heat-curve"), { traces, title: `${kind} of ${site}`, label: statistic, xaxis, isLog, legend: several, height: 240 });
  },
};

/** The column whose step is nearest, if it is not farther than half a step of the schedule; else -1. */
function nearestColumn(loaded, step) {
  let best = 0;
  for (let column = 1; column < loaded.columns; column++) {
    if (Math.abs(loaded.steps[column] - step) < Math.abs(loaded.steps[best] - step)) best = column;
  }
  const gap = loaded.columns > 1 ? (loaded.steps[loaded.columns - 1] - loaded.steps[0]) / (loaded.columns - 1) : 0;
  return Math.abs(loaded.steps[best] - step) <= gap / 2 ? best : -1;
}

// ------------------------------------------------------------------ profiles over depth

const SIZES = ["rms", "norm", "abs_max", "abs_mean"];
const PROFILES = [
  ["activation", SIZES],
  ["activation_gradient", SIZES],
  ["gradient_before_clip", SIZES],
  ["gradient", SIZES],
  ["gradient_flow", ["gain"]],
  ["update", ["ratio"]],
  ["parameter", SIZES],
];

/** The tables that make profiles: of each kind the first statistic that there is. */
function profileTables() {
  const names = tableNames((table) => table.stage === "train");
  return PROFILES.map(([base, statistics]) => {
    const there = statistics.map((statistic) => names.find((name) => name.base === base && name.statistic === statistic));
    return there.find(Boolean);
  }).filter(Boolean);
}

const CROWD = 150; // sites whose line would be a band

/** Lines over sites at a step, one for each run, and behind them what the run has had so far. */
function profileTraces(loadedTables, sites, step, looks = {}) {
  const places = sites.map((_, index) => index);
  const traces = [];
  loadedTables.forEach((loaded, index) => {
    if (!loaded) return;
    const column = columnAt(loaded, step);
    if (column < 0) return;
    const rows = sites.map((site) => loaded.rowOf.get(site));
    const at = (place) => rows.map((row) => (row === undefined ? null : finiteOrNull(loaded.values[row * loaded.columns + place])));
    const line = looks.color || lineColor(index);
    if (!several && !looks.color) {
      traces.push({ x: places, y: at(0), name: `step ${loaded.steps[0]}`, mode: sites.length > CROWD ? "markers" : "lines", marker: { size: 2, color: color("faint") }, line: { color: color("faint"), width: 1.5, dash: "dot" }, hoverinfo: "skip" });
    }
    const values = at(column);
    const name = [several ? page.runs[index].name : "", looks.name ?? (several ? "" : `step ${loaded.steps[column]}`)].filter(Boolean).join(": ");
    const number = (row) => (row === undefined ? "not recorded" : format(loaded.values[row * loaded.columns + column]));
    const text = rows.map((row, place) => `${escapeText(sites[place])}<br>step ${loaded.steps[column]}: ${number(row)}`);
    const bad = places.filter((place) => rows[place] !== undefined && isRecorded(loaded, rows[place], column) && values[place] === null);
    if (bad.length) {
      const top = Math.max(...values.filter((value) => value > 0), 1e-30);
      const cross = { symbol: "x", size: 8, color: NOT_FINITE };
      traces.push({ x: bad, y: bad.map(() => top), text: bad.map((place) => text[place]), hoverinfo: "text", mode: "markers", marker: cross, showlegend: false });
    }
    const isCrowded = sites.length > CROWD;
    const marker = { size: sites.length > 80 ? 4 : 6, color: line, opacity: isCrowded ? 0.6 : 1 };
    const mode = isCrowded ? "markers" : "lines+markers";
    traces.push({ x: places, y: values, name: escapeText(name), text, hoverinfo: "text", mode, marker, line: { color: line, dash: looks.dash } });
  });
  return traces;
}

const finiteOrNull = (value) => (Number.isFinite(value) ? value : null);

const MOST_TICKS = 16;

/** The axis of sites: each with its name, where there is room; else the modules that they are in. */
function siteAxis(sites) {
  const range = [-0.5, sites.length - 0.5];
  const { short } = shortNames(sites);
  const starts = (depth) => short.map((_, index) => index).filter((index) => !index || prefixOf(short[index], depth) !== prefixOf(short[index - 1], depth));
  const deepest = Math.max(1, ...short.map((site) => site.split(".").length));
  let [ticks, depth] = [starts(deepest), deepest];
  while (ticks.length > MOST_TICKS && depth > 1) ticks = starts(--depth);
  let free = -1; // where the next name has room
  ticks = ticks.filter((index) => index >= free && (free = index + sites.length / 20));
  const names = ticks.map((index) => prefixOf(short[index], depth)).map((name) => (name.length > 18 ? `…${name.slice(-17)}` : name));
  return { tickvals: ticks, ticktext: names.map(escapeText), tickangle: ticks.length > 4 ? -35 : 0, automargin: true, range };
}

/** Smallest and largest number of a site. */
function extentOfRow(loaded, row, isPositive) {
  loaded.rows ??= new Map();
  if (!loaded.rows.has(row)) loaded.rows.set(row, rowOf(loaded, row)); // the same array each time
  return extent(loaded.rows.get(row), 0, isPositive);
}

/** Range of an axis that holds all steps, so that it stands still while the slider moves. */
function steadyRange(loadedTables, sites, isLog) {
  const numbers = loadedTables.flatMap((loaded) => (loaded ? sites.map((site) => loaded.rowOf.get(site)).filter((row) => row !== undefined).map((row) => extentOfRow(loaded, row, isLog)) : []));
  const low = Math.min(...numbers.map(([from]) => from).filter((from) => !isLog || from > 1e-30));
  const high = Math.max(...numbers.map(([, to]) => to));
  if (!Number.isFinite(low) || !Number.isFinite(high)) return undefined;
  if (isLog) return [Math.log10(low) - 0.1, Math.log10(high) + 0.1];
  const room = 0.05 * (high - low || 1);
  return [low - room, high + room];
}

const profiles = {
  async draw() {
    const names = profileTables();
    const loaded = await Promise.all(names.map((name) => loadAll(name.kind, name.statistic)));
    const steps = unionOfSteps(loaded.flat());
    const step = slider(byId("profiles-step"), byId("profiles-step-name"), steps);
    const boxes = charts(byId("profiles-charts"), names.length);
    names.forEach((name, index) => {
      const sites = filtered(unionOfSites(loaded[index]));
      const isLog = wantsLog(loaded[index].flatMap((one) => (one ? extent(one.values, 0, true) : [])));
      lines(boxes[index], {
        traces: profileTraces(loaded[index], sites, step),
        title: `${name.kind}, ${name.statistic}`,
        xaxis: siteAxis(sites),
        yaxis: { range: steadyRange(loaded[index], sites, isLog) },
        isLog,
        legend: true,
        height: 300,
        uirevision: search.text,
      });
    });
  },
};

/** The loaded tables of a kind and statistic, one for each run; undefined where a run has none. */
function loadAll(kind, statistic) {
  return Promise.all(page.runs.map((run) => findTable(run, kind, statistic)).map((table) => (table ? load(table) : undefined)));
}

// ------------------------------------------------------------------ update ratios

const CUSTOMARY = 1e-3;
const FEW_SITES = 8;

const updates = {
  async draw() {
    const [name] = tableNames((table) => table.base === "update" && table.statistic === "ratio" && table.stage === "train");
    const loadedTables = await loadAll(name.kind, name.statistic);
    const sites = filtered(unionOfSites(loadedTables));
    const traces = loadedTables.flatMap((loaded, index) => {
      if (!loaded) return [];
      const rows = sites.map((site) => loaded.rowOf.get(site)).filter((row) => row !== undefined);
      if (sites.length <= FEW_SITES && !several) return rows.flatMap((row, place) => lineOverSteps(loaded.sites[row], loaded, row, { color: lineColor(place), dash: place < 6 ? "solid" : "dash" }));
      return this.bands(loaded, rows, index);
    });
    const customary = { type: "line", xref: "paper", x0: 0, x1: 1, y0: CUSTOMARY, y1: CUSTOMARY, line: { color: color("ink"), width: 1.2, dash: "dash" } };
    const word = { xref: "paper", x: 0, xanchor: "left", y: Math.log10(CUSTOMARY), yanchor: "bottom", text: "0.001, customary", showarrow: false, font: { size: 11 } };
    const label = "norm of update / norm of parameter";
    const xaxis = { title: { text: "optimizer step", standoff: 6 } };
    lines(byId("updates-chart"), { traces, label, xaxis, isLog: true, shapes: [customary], annotations: [word], legend: true, height: 380, hovermode: "x unified" });
  },

  bands(loaded, rows, index) {
    const shares = [0, 0.25, 0.5, 0.75, 1];
    const curves = shares.map(() => []);
    for (let column = 0; column < loaded.columns; column++) {
      const numbers = columnOf(loaded, column, rows).filter((number) => number > 0);
      shares.forEach((share, place) => curves[place].push(finiteOrNull(quantile(numbers, share))));
    }
    const [least, low, middle, high, most] = curves;
    const base = lineColor(index);
    const run = several ? `${escapeText(page.runs[index].name)}: ` : "";
    const x = loaded.steps;
    const edge = { x, line: { width: 0 }, showlegend: false, hoverinfo: "skip" };
    const hovertemplate = "%{y:.3g}";
    const bands = [
      { ...edge, y: low },
      { ...edge, y: high, fill: "tonexty", fillcolor: faded(base, 0.3), name: `${run}middle half`, showlegend: true },
      { x, y: middle, name: `${run}median`, line: { color: base, width: 2.4 }, hovertemplate },
    ];
    if (several) return bands;
    const outer = { x, line: { color: base, width: 1, dash: "dot" }, hovertemplate };
    return [...bands, { ...outer, y: most, name: "largest" }, { ...outer, y: least, name: "smallest" }];
  },
};

// ------------------------------------------------------------------ the refined coordinate check

const TERMS = [
  { kind: "rcc_effective_update", name: "effective", dash: "solid", color: 0, word: "(W − W0) x" },
  { kind: "rcc_propagating_update", name: "propagating", dash: "dash", color: 1, word: "W0 (x − x0)" },
];

const rcc = {
  async draw() {
    const statistics = [...new Set(tableNames((table) => TERMS.some((term) => term.kind === table.base)).map((name) => name.statistic))];
    fill(byId("rcc-statistic"), statistics.map((statistic) => [statistic]));
    const kindOf = (base) => tableNames((table) => table.base === base && table.stage === "train")[0]?.kind;
    const sources = await Promise.all(
      TERMS.map(async (term) => ({
        term,
        sizes: statistics.length ? await loadAll(kindOf(term.kind), byId("rcc-statistic").value) : [],
        alignment: await loadAll(kindOf("rcc_alignment"), term.name),
      })),
    );
    const ofSizes = sources.flatMap((source) => source.sizes);
    const ofAlignment = sources.flatMap((source) => source.alignment);
    const sites = filtered(unionOfSites([...ofSizes, ...ofAlignment]));
    const inAll = sites.filter((site) => [...ofSizes, ...ofAlignment].every((one) => !one || one.rowOf.has(site)));
    fill(byId("rcc-site"), sites.map((site) => [site]), byId("rcc-site").value || inAll[1] || inAll[0]);
    const step = slider(byId("rcc-step"), byId("rcc-step-name"), unionOfSteps([...ofSizes, ...ofAlignment]));
    const views = [
      ["sizes", byId("rcc-statistic").value, ofSizes],
      ["alignment", "alignment", ofAlignment],
    ].filter(([, , loaded]) => loaded.some(Boolean));
    const boxes = charts(byId("rcc-charts"), 2 * views.length);
    views.forEach(([what, label, loaded], index) => this.drawView(boxes.slice(2 * index), sources, { what, label, loaded, sites, step }));
  },

  drawView([overSites, overSteps], sources, { what, label, loaded, sites, step }) {
    const isLog = what === "sizes" && wantsLog(loaded.flatMap((one) => (one ? extent(one.values, 0, true) : [])));
    const there = sites.filter((site) => loaded.some((one) => one && one.rowOf.has(site)));
    const looks = (term) => (several ? { dash: term.dash, name: term.name } : { dash: term.dash, name: `${term.name} ${what === "sizes" ? term.word : ""}`, color: lineColor(term.color) });
    lines(overSites, {
      traces: sources.flatMap(({ term, ...tables }) => profileTraces(tables[what], there, step, looks(term))),
      title: `${label} over layers, at step ${step}`,
      xaxis: siteAxis(there),
      yaxis: what === "sizes" ? { range: steadyRange(loaded, there, isLog) } : { range: [0, 1.08] },
      isLog,
      legend: true,
      height: 320,
    });
    const site = byId("rcc-site").value;
    const traces = sources.flatMap(({ term, ...tables }) =>
      tables[what].flatMap((one, index) => {
        const row = one && one.rowOf.get(site);
        if (row === undefined) return [];
        const name = several ? `${page.runs[index].name}: ${term.name}` : term.name;
        return lineOverSteps(name, one, row, { color: several ? lineColor(index) : lineColor(term.color), dash: term.dash });
      }),
    );
    const yaxis = what === "alignment" ? { range: [0, 1.08] } : {};
    const xaxis = { title: { text: "optimizer step", standoff: 6 } };
    lines(overSteps, { traces, title: `${label} of ${site} over steps`, xaxis, yaxis, isLog: isLog && wantsLog(traces.flatMap((trace) => trace.y)), legend: true, height: 320 });
  },
};

// ------------------------------------------------------------------ attention

const attention = {
  async draw() {
    const names = tableNames((table) => table.base.startsWith("attention_"));
    fill(byId("attention-table"), names.map((name) => [JSON.stringify(name), `${name.kind}, ${name.statistic}`]));
    const { kind, statistic, base } = JSON.parse(byId("attention-table").value);
    const loadedTables = await loadAll(kind, statistic);
    const step = slider(byId("attention-step"), byId("attention-step-name"), unionOfSteps(loadedTables));
    const heads = filtered(unionOfSites(loadedTables)).map((site) => ({ site, parts: /^(.*)\.head_(\d+)$/.exec(site) || [site, site, "0"] }));
    const layers = [...new Set(heads.map(({ parts }) => parts[1]))];
    const count = 1 + Math.max(0, ...heads.map(({ parts }) => Number(parts[2])));
    const columns = Array.from({ length: count }, (_, head) => `head ${head}`);
    const ranges = loadedTables.filter(Boolean).map((loaded) => extent(loaded.values, 0, false));
    const isShare = base === "attention_relative_entropy" || base === "attention_sink";
    const range = isShare ? [0, 1] : [Math.min(...ranges.map(([low]) => low)), Math.max(...ranges.map(([, high]) => high))];
    const boxes = charts(byId("attention-charts"), page.runs.length + 1);
    loadedTables.forEach((loaded, index) => {
      const column = loaded ? columnAt(loaded, step) : -1;
      const row = (layer, head) => loaded?.rowOf.get(`${layers[layer]}.head_${head}`);
      heatmap(boxes[index], {
        rows: layers,
        columns,
        value: (layer, head) => {
          const place = row(layer, head);
          return place === undefined || column < 0 || !isRecorded(loaded, place, column) ? undefined : loaded.values[place * loaded.columns + column];
        },
        hover: (layer, head, text) => `${layers[layer]}, head ${head}\nstep ${step}\n${statistic} ${text}`,
        scale: "linear",
        range,
        title: `${several ? `${page.runs[index].name}, ` : ""}step ${step}`,
        xaxis: { type: "category" },
        label: statistic,
        height: Math.min(700, 110 + 26 * Math.max(3, layers.length)),
      });
    });
    this.overSteps(boxes[page.runs.length], loadedTables, layers, { statistic, kind });
  },

  /** Of each layer the median over its heads: how the layers go apart. */
  overSteps(div, loadedTables, layers, { statistic, kind }) {
    const colors = layers.map((_, index) => shade(layers.length > 1 ? index / (layers.length - 1) : 0));
    const { short } = shortNames(layers);
    const traces = loadedTables.flatMap((loaded, run) => {
      if (!loaded) return [];
      return layers.flatMap((layer, index) => {
        const rows = [...loaded.rowOf].filter(([site]) => site.startsWith(`${layer}.head_`)).map(([, row]) => row);
        if (!rows.length) return [];
        const y = loaded.steps.map((_, column) => finiteOrNull(quantile(columnOf(loaded, column, rows), 0.5)));
        const name = `${several ? `${page.runs[run].name}: ` : ""}${short[index]}`;
        return [{ x: loaded.steps, y, name: escapeText(name), line: { color: colors[index], dash: ["solid", "dash", "dot"][run % 3] }, hovertemplate: "%{y:.3g}" }];
      });
    });
    const xaxis = { title: { text: "optimizer step", standoff: 6 } };
    lines(div, { traces, title: `${kind}: median over each layer's heads`, label: statistic, xaxis, legend: layers.length * page.runs.length <= 12, height: 320, hovermode: "x unified" });
  },
};

/** A colour between the ends of cividis, for layers in their order. */
function shade(share) {
  const [from, to] = document.documentElement.dataset.dark === "yes" ? [[120, 160, 235], [255, 233, 69]] : [[0, 45, 110], [190, 160, 30]];
  return `rgb(${from.map((channel, index) => Math.round(channel + share * (to[index] - channel))).join(",")})`;
}

// ------------------------------------------------------------------ histograms

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
      columns: isUneven(steps) ? steps.map(String) : steps,
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

// ------------------------------------------------------------------ the page

const sections = { heat, profiles, updates, rcc, attention, histograms };
const visible = new Set();

function draw(name) {
  sections[name].draw().catch((error) => {
    console.error(error);
    byId(`${name}-error`).textContent = `This could not be drawn: ${error}`;
  });
}

const waiting = new Set();

/** Draw once, however often a slider has moved until the browser gets to it. */
function drawSoon(name) {
  if (waiting.has(name)) return;
  waiting.add(name);
  requestAnimationFrame(() => {
    waiting.delete(name);
    draw(name);
  });
}

/** Draw what is in view; the rest is drawn when it comes into view. */
function drawVisible() {
  for (const section of document.querySelectorAll("section[data-drawn]")) delete section.dataset.drawn;
  for (const name of visible) show(name);
}

function show(name) {
  const section = byId(name);
  if (section.dataset.drawn) return;
  section.dataset.drawn = "yes";
  draw(name);
}

function changeSearch() {
  const text = byId("search").value.trim();
  let accepts = (site) => site.toLowerCase().includes(text.toLowerCase());
  const pattern = /^\/(.*)\/$/.exec(text);
  if (pattern) {
    try {
      const expression = new RegExp(pattern[1], "i");
      accepts = (site) => expression.test(site);
    } catch {
      accepts = () => false; // half typed
    }
  }
  Object.assign(search, { text, accepts });
  const all = [...new Set(page.runs.flatMap((run) => run.tables.flatMap((table) => page.lists[table.sites])))];
  const found = all.filter(accepts).length;
  byId("search-count").textContent = text ? `${found} of ${all.length} sites` : `${all.length} sites`;
  for (const row of document.querySelectorAll("tr[data-site]")) row.hidden = !accepts(row.dataset.site);
  drawVisible();
}

/** Show a finding's series: its kind and statistic in the heat map, its curve below. */
function showSeries({ kind, statistic, site }) {
  byId("search").value = "";
  changeSearch();
  byId("heat-table").value = JSON.stringify({ kind, statistic });
  fill(byId("heat-site"), [[site]], site);
  draw("heat");
  byId("heat").scrollIntoView();
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function applyTheme() {
  document.documentElement.dataset.dark = isDark() ? "yes" : "no";
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  drawVisible();
}

function later(action, pause) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, pause);
  };
}

function start() {
  fill(byId("heat-table"), tableNames(() => true).map(({ kind, statistic }) => [JSON.stringify({ kind, statistic }), `${kind}, ${statistic}`]));
  for (const control of document.querySelectorAll("section select, section input")) {
    const name = control.closest("section").id;
    control.addEventListener(control.type === "range" ? "input" : "change", () => drawSoon(name));
  }
  byId("search").addEventListener("input", later(changeSearch, 150));
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    applyTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
  for (const button of document.querySelectorAll("button[data-series]")) {
    button.addEventListener("click", () => showSeries(JSON.parse(button.dataset.series)));
  }
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting) visible.add(target.id);
        else visible.delete(target.id);
        if (isIntersecting) show(target.id);
      }
    },
    { rootMargin: "200px" },
  );
  applyTheme();
  changeSearch();
  for (const name of Object.keys(sections)) if (byId(name)) watcher.observe(byId(name));
}

start();
