// The sections of lines: profiles over depth, update ratios, and the refined coordinate check.
"use strict";

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

/** The tables of the profiles: the first recorded statistic of each kind. */
function profileTables() {
  const names = tableNames((table) => table.stage === "train");
  return PROFILES.map(([base, statistics]) => {
    const tables = statistics.map((statistic) => names.find((name) => name.base === base && name.statistic === statistic));
    return tables.find(Boolean);
  }).filter(Boolean);
}

const CROWD = 150; // sites whose line would be a band

/** Lines over sites at a step, a line for each run; of a single run also its first record. */
function profileTraces(loadedTables, allSites, step, looks = {}) {
  const xs = allSites.map((_, index) => index).filter((index) => !looks.accepts || looks.accepts(allSites[index]));
  const sites = xs.map((index) => allSites[index]);
  const traces = [];
  loadedTables.forEach((loaded, index) => {
    if (!loaded) return;
    const column = columnAt(loaded, step);
    if (column < 0) return;
    const rows = sites.map((site) => loaded.rowOf.get(site));
    const at = (column) => rows.map((row) => (row === undefined ? null : finiteOrNull(loaded.values[row * loaded.columns + column])));
    const line = looks.color || lineColor(index);
    if (!several && !looks.isTerm) {
      const past = looks.color ? faded(looks.color, 0.55) : color("faint");
      traces.push({ x: xs, y: at(0), name: `step ${loaded.steps[0]}`, mode: sites.length > CROWD ? "markers" : "lines", marker: { size: 2, color: past }, line: { color: past, width: 1.5, dash: "dot" }, hoverinfo: "skip", showlegend: !looks.color });
    }
    const values = at(column);
    const name = [several ? page.runs[index].name : "", looks.name ?? (several ? "" : `step ${loaded.steps[column]}`)].filter(Boolean).join(": ");
    const number = (row) => (row === undefined ? "not recorded" : format(loaded.values[row * loaded.columns + column]));
    const text = rows.map((row, rank) => `${escapeText(sites[rank])}<br>step ${loaded.steps[column]}: ${number(row)}${escapeText(moduleLine(page.runs[index], sites[rank])).replace("\n", "<br>")}`);
    traces.push(...crosses(xs, values, text, (rank) => rows[rank] !== undefined && isRecorded(loaded, rows[rank], column)));
    const isCrowded = sites.length > CROWD;
    const marker = { size: sites.length > 80 ? 4 : 6, color: line, opacity: isCrowded ? 0.6 : 1 };
    const mode = isCrowded ? "markers" : "lines+markers";
    traces.push({ x: xs, y: values, name: escapeText(name), text, hoverinfo: "text", mode, marker, line: { color: line, dash: looks.dash } });
  });
  return traces;
}

const MOST_TICKS = 16;

/** Names of transitions between blocks without their common modules: 0 → 1. The dash in the middle is between both names. */
function transitions(names) {
  const pairs = names.map((name) => {
    const parts = name.split("-");
    return [parts.slice(0, parts.length / 2), parts.slice(parts.length / 2)].map((half) => half.join("-"));
  });
  const all = [...new Set(pairs.flat())];
  const { short } = shortNames(all);
  return pairs.map((pair) => pair.map((name) => short[all.indexOf(name)]).join(" → "));
}

/** The axis of sites: with the names of sites where there is room, else of the modules that contain them. */
function siteAxis(sites, base) {
  const range = [-0.5, sites.length - 0.5];
  if (base === "gradient_flow") {
    const stride = Math.ceil(sites.length / MOST_TICKS);
    const ticks = sites.map((_, index) => index).filter((index) => index % stride === 0);
    const names = transitions(sites);
    return { tickvals: ticks, ticktext: ticks.map((index) => escapeText(names[index])), tickangle: ticks.length > 4 ? -35 : 0, automargin: true, range };
  }
  const { short } = shortNames(sites);
  const starts = (depth) => short.map((_, index) => index).filter((index) => !index || prefixOf(short[index], depth) !== prefixOf(short[index - 1], depth));
  const deepest = Math.max(1, ...short.map((site) => site.split(".").length));
  let [ticks, depth] = [starts(deepest), deepest];
  while (ticks.length > MOST_TICKS && depth > 1) ticks = starts(--depth);
  const withRoom = (indices, free = -1) => indices.filter((index) => index >= free && (free = index + sites.length / 20));
  if (withRoom(ticks).length < 5 && depth < deepest) ticks = starts(++depth); // as many blocks as there is room for
  ticks = withRoom(ticks);
  const names = ticks.map((index) => prefixOf(short[index], depth)).map((name) => (name.length > 18 ? `…${name.slice(-17)}` : name));
  return { tickvals: ticks, ticktext: names.map(escapeText), tickangle: ticks.length > 4 ? -35 : 0, automargin: true, range };
}

/** The range of all steps: the axis stays while the slider moves. */
function steadyRange(loadedTables, sites, isLog) {
  const rows = loadedTables.filter(Boolean).flatMap((loaded) => sites.filter((site) => loaded.rowOf.has(site)).map((site) => rowOf(loaded, loaded.rowOf.get(site))));
  const numbers = rows.map((row) => extent(row, 0, isLog)).filter((extent) => !isLog || extent !== NOTHING);
  const low = Math.min(...numbers.map(([from]) => from));
  const high = Math.max(...numbers.map(([, to]) => to));
  if (!Number.isFinite(low) || !Number.isFinite(high)) return undefined;
  if (isLog) return [Math.log10(low) - 0.1, Math.log10(high) + 0.1];
  const room = 0.05 * (high - low || 1);
  return [low - room, high + room];
}

/** The role of a site: sites of different roles in the same line would be a zigzag. */
function roleOf(base, site, containers) {
  const run = page.runs.find((run) => moduleLine(run, site)) ?? page.runs[0];
  const type = moduleLine(run, site).trim().split(",")[0];
  if (base.startsWith("activation")) return /\.head_\d+(\.|$)/.test(site) ? "heads" : containers.has(site) ? "containers" : "leaf modules";
  if (base === "gradient_flow") return "";
  if (/bias[^.]*$/.test(madeOf(site))) return "biases";
  if (/norm/i.test(type) || (!type && /(norm|ln|bn)\d*\.[^.]*$/.test(site))) return "normalisation gains";
  return /embedding/i.test(type) || (!type && /(emb|wte|wpe)[^.]*\.[^.]*$/.test(site)) ? "embeddings" : "weights";
}

/** Names of modules that hold others; those that compute a layer's parameters are no layers inside of it. */
function containersOf(sites) {
  const names = [...sites, ...page.runs.flatMap((run) => Object.keys(run.modules))];
  return new Set(names.flatMap((name) => name.split(".parametrizations")[0].split(".").map((_, end, parts) => parts.slice(0, end).join("."))));
}

const profiles = {
  draw() {
    const names = profileTables();
    const loaded = names.map((name) => loadAll(name.kind, name.statistic));
    const steps = unionOfSteps(loaded.flat());
    const step = slider(byId("profiles-step"), byId("profiles-step-name"), steps);
    const boxes = charts(byId("profiles-charts"), names.length);
    names.forEach((name, index) => {
      const sites = filtered(unionOfSites(loaded[index]));
      const isLog = needLog(loaded[index]);
      const containers = containersOf(sites.filter((site) => !site.includes(".head_")));
      const role = new Map(sites.map((site) => [site, roleOf(name.base, site, containers)]));
      const roles = [...new Set(role.values())];
      const looks = (name, rank) => ({ accepts: (site) => role.get(site) === name, name, ...(several ? { dash: DASHES[rank % DASHES.length] } : { color: lineColor(rank) }) });
      lines(boxes[index], {
        traces: roles.length > 1 ? roles.flatMap((name, rank) => profileTraces(loaded[index], sites, step, looks(name, rank))) : profileTraces(loaded[index], sites, step),
        title: `${name.kind}, ${name.statistic}`,
        label: labelOf(name.base, name.statistic),
        xaxis: siteAxis(sites, name.base),
        yaxis: { range: steadyRange(loaded[index], sites, isLog) },
        isLog,
        legend: true,
        height: 300,
        uirevision: search.text,
      });
    });
  },
};

const USUAL = 1e-3;
const FEW_SITES = 8;

const updates = {
  draw() {
    const [name] = tableNames((table) => table.base === "update" && table.statistic === "ratio" && table.stage === "train");
    const loadedTables = loadAll(name.kind, name.statistic);
    const sites = filtered(unionOfSites(loadedTables));
    const traces = loadedTables.flatMap((loaded, index) => {
      if (!loaded) return [];
      const rows = sites.map((site) => loaded.rowOf.get(site)).filter((row) => row !== undefined);
      if (sites.length <= FEW_SITES && !several) return rows.flatMap((row, rank) => lineOverSteps(loaded.sites[row], loaded, row, lineLook(index, rank)));
      return this.bands(loaded, rows, index);
    });
    const usual = { type: "line", xref: "paper", x0: 0, x1: 1, y0: USUAL, y1: USUAL, line: { color: color("ink"), width: 1.2, dash: "dash" } };
    const word = { xref: "paper", x: 0, xanchor: "left", y: Math.log10(USUAL), yanchor: "bottom", text: "0.001, usual", showarrow: false, font: { size: 11 } };
    const label = "norm of update / norm of parameter";
    lines(byId("updates-chart"), { traces, label, xaxis: STEPS, isLog: true, shapes: [usual], annotations: [word], legend: true, height: 380, hovermode: "x unified" });
  },

  bands(loaded, rows, index) {
    const positive = loaded.steps.map((_, column) => columnOf(loaded, column, rows).filter((number) => number > 0));
    const curve = (share) => positive.map((numbers) => finiteOrNull(quantile(numbers, share)));
    const [least, low, middle, high, most] = [0, 0.25, 0.5, 0.75, 1].map(curve);
    const base = lineColor(index);
    const run = several ? `${escapeText(page.runs[index].name)}: ` : "";
    const x = loaded.steps;
    const hovertemplate = "%{y:.3g}";
    const bands = [
      ...band({ x, y: low }, { x, y: high, name: `${run}middle half` }, { hoverinfo: "skip", fillcolor: faded(base, 0.3) }),
      { x, y: middle, name: `${run}median`, line: { color: base, width: 2.4 }, hovertemplate },
    ];
    if (several) return bands;
    const outer = { x, line: { color: base, width: 1, dash: "dot" }, hovertemplate };
    return [...bands, { ...outer, y: most, name: "largest" }, { ...outer, y: least, name: "smallest" }];
  },
};

const TERMS = [
  { kind: "rcc_effective_update", name: "effective", dash: "solid", color: 0, word: "(W − W0) x" },
  { kind: "rcc_propagating_update", name: "propagating", dash: "dash", color: 1, word: "W0 (x − x0)" },
];

const rcc = {
  draw() {
    const statistics = [...new Set(tableNames((table) => TERMS.some((term) => term.kind === table.base)).map((name) => name.statistic))];
    fill(byId("rcc-statistic"), statistics.map((statistic) => [statistic]));
    const kindOf = (base) => tableNames((table) => table.base === base && table.stage === "train")[0]?.kind;
    const sources = TERMS.map((term) => ({
      term,
      sizes: statistics.length ? loadAll(kindOf(term.kind), byId("rcc-statistic").value) : [],
      alignment: loadAll(kindOf("rcc_alignment"), term.name),
    }));
    const sizes = sources.flatMap((source) => source.sizes);
    const alignments = sources.flatMap((source) => source.alignment);
    const sites = filtered(unionOfSites([...sizes, ...alignments]));
    const inAll = sites.filter((site) => [...sizes, ...alignments].every((table) => !table || table.rowOf.has(site)));
    fill(byId("rcc-site"), sites.map((site) => [site]), byId("rcc-site").value || inAll[1] || inAll[0]);
    const step = slider(byId("rcc-step"), byId("rcc-step-name"), unionOfSteps([...sizes, ...alignments]));
    const views = [
      ["sizes", byId("rcc-statistic").value, sizes],
      ["alignment", "alignment", alignments],
    ].filter(([, , loaded]) => loaded.some(Boolean));
    const boxes = charts(byId("rcc-charts"), 2 * views.length);
    views.forEach(([what, label, loaded], index) => this.drawView(boxes.slice(2 * index), sources, { what, label, loaded, sites, step }));
  },

  drawView([overSites, overSteps], sources, { what, label, loaded, sites, step }) {
    const isLog = what === "sizes" && needLog(loaded);
    const recorded = sites.filter((site) => loaded.some((table) => table && table.rowOf.has(site)));
    const looks = (term) => (several ? { dash: term.dash, name: term.name } : { dash: term.dash, name: `${term.name} ${what === "sizes" ? term.word : ""}`, color: lineColor(term.color), isTerm: true });
    const axis = what === "sizes" ? `${label} of the term` : "alignment (at most 1)";
    lines(overSites, {
      traces: sources.flatMap(({ term, ...tables }) => profileTraces(tables[what], recorded, step, looks(term))),
      title: `${label} over layers, at step ${step}`,
      label: axis,
      xaxis: siteAxis(recorded),
      yaxis: what === "sizes" ? { range: steadyRange(loaded, recorded, isLog) } : { range: [0, 1.08] },
      isLog,
      legend: true,
      height: 320,
    });
    const site = byId("rcc-site").value;
    const traces = sources.flatMap(({ term, ...tables }) =>
      tables[what].flatMap((table, index) =>
        lineOfSite(several ? `${page.runs[index].name}: ${term.name}` : term.name, table, site, { color: lineColor(several ? index : term.color), dash: term.dash }),
      ),
    );
    const yaxis = what === "alignment" ? { range: [0, 1.08] } : {};
    lines(overSteps, { traces, title: `${label} of ${site} over steps`, label: axis, xaxis: STEPS, yaxis, isLog: isLog && wantsLog(traces.flatMap((trace) => trace.y)), legend: true, height: 320 });
  },
};
