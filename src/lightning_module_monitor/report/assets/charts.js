// Charts by plotly, in the page's colours: heat maps, and lines.
"use strict";

// Okabe and Ito's colours, which colour-blind people can distinguish, without the yellow, which is invisible on white.
const LINES = { no: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"], yes: ["#56b4e9", "#e69f00", "#2fc79a", "#e6a3cb", "#4c9be8", "#ff8a4d"] };
const LEGEND_ROW = 22; // pixels
const NARROW = 560; // pixels of a chart that is on a phone
const NOT_FINITE = "#e4003a";
const CONFIG = {
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "sendChartToCloud"], // a run's data stay private
  plotlyServerURL: "",
  showSendToCloud: false,
};

/** The colour of a chart's n-th line. */
function lineColor(index) {
  const colors = LINES[document.documentElement.dataset.dark];
  return colors[index % colors.length];
}

const DASHES = ["solid", "dash", "dot", "dashdot"];

/** The look of a run's line of a rank: a colour for each line, with another dash once the colours repeat; of several runs a colour for each run. */
function lineLook(run, rank) {
  const turn = Math.floor(rank / LINES.no.length);
  return several ? { color: lineColor(run), dash: DASHES[rank % DASHES.length] } : { color: lineColor(rank), dash: DASHES[turn % DASHES.length] };
}

/** Lines over steps of one run, with the run's name where there are several. */
function linesOf(run, series, look) {
  const prefix = several ? `${page.runs[run].name}: ` : "";
  return series.flatMap(({ name, loaded }, rank) => lineOverSteps(prefix + name, loaded, 0, look ?? lineLook(run, rank)));
}

/** A colour of the style sheet. */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A colour with an opacity. */
function faded(hex, opacity) {
  const [red, green, blue] = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  return `rgba(${red},${green},${blue},${opacity})`;
}

const UNITS = {
  zero_fraction: "share of the elements", dead_fraction: "share of the units", saturated_fraction: "share of the elements",
  nonfinite_count: "elements", cosine: "cosine of the angle", gain: "after / before", log_gain: "log of after / before",
  "update/ratio": "update / parameter", "activation_difference/ratio": "difference / reference", "parameter_difference/ratio": "difference / reference",
  "attention_entropy/mean": "nats", "attention_relative_entropy/mean": "share of the most possible", "attention_sink/mean": "weight on the first key", "attention_max_logit/max": "logit",
  "rcc_alignment/effective": "at most 1", "rcc_alignment/propagating": "at most 1",
};

/** The label of a statistic's axis: its name, with the unit if it is not that of the tensor. */
function labelOf(base, statistic) {
  const unit = UNITS[`${base}/${statistic}`] ?? UNITS[statistic];
  return unit ? `${statistic} (${unit})` : `${statistic} of ${base.replaceAll("_", " ")}`;
}

const BAR = 200, SHORT_BAR = 70; // pixels of the toolbar with all buttons, and with two
const ruler = document.createElement("canvas").getContext("2d");

/** The toolbar, beside the title: with as many buttons as fit there. */
function toolbarOf(width, title) {
  ruler.font = `${title.font.size}px ${getComputedStyle(document.body).fontFamily}`;
  const room = width - ruler.measureText(title.text).width;
  if (room >= BAR) return CONFIG;
  return { ...CONFIG, ...(room >= SHORT_BAR ? { modeBarButtons: [["toImage", "resetScale2d"]] } : { displayModeBar: false }) };
}

/** Draw a chart at once, as wide as its place: plotly's own fitting is too late for printing. */
function plot(div, traces, layout) {
  const width = div.clientWidth || undefined;
  Plotly.react(div, traces, { ...layout, width }, width && layout.title ? toolbarOf(width, layout.title) : CONFIG);
}

/** A chart without data. */
const empty = (div, title) => plot(div, [], layoutOf({ title, height: 120 }));

/** The layout that all charts share. */
function layoutOf(options) {
  const axis = { gridcolor: color("grid"), zerolinecolor: color("grid"), linecolor: color("line"), ticks: "outside", tickcolor: color("line") };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: color("plot"),
    font: { family: "inherit", size: 12, color: color("ink") },
    margin: { l: 60, r: options.isNarrow ? 4 : 16, t: 34 + LEGEND_ROW * (options.legendRows || 0), b: 44 }, // the toolbar is beside the title
    height: options.height,
    title: options.title ? { text: escapeText(options.title), font: { size: 13 }, x: 0, y: 1, yanchor: "top", xref: "container", xanchor: "left", pad: { l: 4, t: 8 } } : undefined,
    hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { color: color("ink"), family: "inherit" }, align: "left" },
    legend: { orientation: "h", y: 1.01, yanchor: "bottom", x: 0, xanchor: "left", bgcolor: "rgba(0,0,0,0)" },
    xaxis: { ...axis, ...options.xaxis },
    yaxis: { ...axis, ...options.yaxis },
    showlegend: Boolean(options.legend),
    shapes: options.shapes || [],
    annotations: options.annotations || [],
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("faint"), activecolor: color("accent") },
    dragmode: "zoom",
    hovermode: options.hovermode || "closest",
    uirevision: options.uirevision, // zoom stays while this stays
  };
}

/** Text that plotly does not take for markup. */
function escapeText(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** Names without their common modules, with only their ends where they are long; all names stay different. */
function shortNames(names, most = 44) {
  const parts = names.map((name) => name.split("."));
  let common = 0;
  while (names.length > 1 && parts.every((part) => part.length > common + 1 && part[common] === parts[0][common])) common++;
  const short = parts.map((part) => part.slice(common).join("."));
  const cut = short.map((name) => (name.length > most ? `…${name.slice(-most + 1)}` : name));
  return { short: new Set(cut).size === names.length ? cut : short, common: parts.length ? parts[0].slice(0, common).join(".") : "" };
}

/** The ends of names, for a phone. Equal ends differ by invisible characters, because plotly needs different names. */
function cutNames(names) {
  const repeats = new Map();
  return names.map((name) => {
    const cut = name.length > 16 ? `…${name.slice(-15)}` : name;
    repeats.set(cut, (repeats.get(cut) ?? -1) + 1);
    return cut + "\u200b".repeat(repeats.get(cut));
  });
}

/** Whether steps are so unevenly spaced (1, 2, 5, 10, ...) that they are drawn side by side instead of to scale. */
function isUneven(steps) {
  if (steps.length < 3) return false;
  const gaps = steps.slice(1).map((step, index) => step - steps[index]);
  return Math.max(...gaps) > 4 * quantile(gaps, 0.5);
}

/** Steps as a heat map's columns. */
const columnsOf = (steps) => (isUneven(steps) ? steps.map(String) : steps);

const STEPS = { title: { text: "optimizer step", standoff: 6 } }; // an axis of lines

/** An axis of steps that a heat map fills. */
function stepAxis(steps) {
  const { title } = STEPS;
  if (isUneven(steps)) return { type: "category", title, nticks: 12, range: [-0.5, steps.length - 0.5] };
  const [first, last] = [steps[0], steps[steps.length - 1]];
  return { title, range: steps.length > 1 ? [first - (steps[1] - first) / 2, last + (last - steps[steps.length - 2]) / 2] : [first - 0.5, last + 0.5] };
}

const ABOVE = 120; // pixels of the lines above a heat map

/** Lines above a heat map over the same steps, their axis, and their share of the chart's height. `scale`: of all maps side by side. */
function linesAbove(above, scale, columns, height) {
  const traces = above.flatMap(({ name, loaded }, index) => lineOverSteps(name, loaded, 0, { color: lineColor(index), width: 1.8 }));
  const isCategory = typeof columns[0] === "string";
  for (const trace of traces) {
    const indices = trace.x.map((_, index) => index).filter((index) => !isCategory || columns.includes(String(trace.x[index])));
    const pick = (list) => indices.map((index) => list[index]);
    Object.assign(trace, { x: pick(trace.x).map(isCategory ? String : Number), y: pick(trace.y), text: pick(trace.text), type: "scatter", yaxis: "y2", showlegend: false });
  }
  const share = ABOVE / height;
  const names = above.map(({ name }, index) => `<span style="color:${lineColor(index)}">${escapeText(name)}</span>`);
  const title = { text: names.join(", "), standoff: 4, font: { size: 11 } };
  const axis = { gridcolor: color("grid"), zeroline: false, automargin: true, nticks: 4, domain: [1 - share + 0.02, 1], title, exponentformat: "e", ...scale };
  return { traces, axis, share };
}

/** Round marks of a logarithmic colour bar. */
function logTicks(low, high) {
  const from = Math.floor(low);
  const to = Math.ceil(high);
  const values = [];
  const stride = Math.max(1, Math.ceil((to - from) / 8));
  for (let power = from; power <= to; power += stride) {
    for (const digit of to - from <= 2 ? [1, 2, 5] : [1]) values.push(power + Math.log10(digit));
  }
  return { tickvals: values, ticktext: values.map((value) => format(Number((10 ** value).toPrecision(1)))) };
}

/**
 * A heat map.
 *
 * rows: names; columns: names or numbers; value(row, column): a number, or undefined where nothing was recorded.
 * scale: "log", "linear" or "signed" (around zero); range: [low, high] of the colours.
 * hover(row, column, text): text of a cell. above: names and loaded tables of the lines above the map; aboveScale: their axis.
 */
function heatmap(div, { rows, columns, value, hover, scale, range, title, xaxis, label, uirevision, height, above, aboveScale }) {
  const isNarrow = div.clientWidth < NARROW;
  const short = isNarrow ? cutNames(shortNames(rows).short) : shortNames(rows).short;
  const numbers = rows.map((_, row) => columns.map((_, column) => value(row, column)));
  const isZero = (number) => scale === "log" && number === 0;
  const isBroken = (number) => number !== undefined && !Number.isFinite(number);
  const level = (number) => (number === undefined || isZero(number) || isBroken(number) ? NaN : scale === "log" ? Math.log10(Math.abs(number)) : number);
  const marks = (accepts) => numbers.map((line) => line.map((number) => (accepts(number) ? 1 : null)));
  const any = (accepts) => numbers.some((line) => line.some(accepts));
  const [low, high] = scale === "log" ? range.map(Math.log10) : range;
  const bound = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const common = { type: "heatmap", x: columns, y: short, hoverinfo: "skip", showscale: false };
  const traces = [
    {
      ...common,
      z: numbers.map((line) => Float32Array.from(line, level)),
      hoverinfo: "none", // followPointer shows its text
      hoverongaps: true,
      colorscale: scale === "signed" ? "RdBu" : "Viridis",
      zmin: scale === "signed" ? -bound : low,
      zmax: scale === "signed" ? bound : high,
      showscale: true,
      colorbar: { title: { text: isNarrow ? "" : escapeText(label), side: "right" }, thickness: isNarrow ? 8 : 12, outlinewidth: 0, ...(scale === "log" ? logTicks(low, high) : {}) },
    },
  ];
  const plain = (fill) => ({ colorscale: [[0, fill], [1, fill]], zmin: 0, zmax: 1 });
  if (any(isZero)) traces.push({ ...common, ...plain(color("zero")), z: marks(isZero) });
  if (any(isBroken)) traces.push({ ...common, ...plain(scale === "signed" ? color("ink") : NOT_FINITE), z: marks(isBroken) }); // red means a positive number there
  const total = (height || Math.min(820, Math.max(190, 86 + 17 * rows.length))) + (above?.length ? ABOVE : 0);
  const { traces: extra, axis, share } = above?.length ? linesAbove(above, aboveScale, columns, total - 90) : { traces: [], share: 0 };
  Object.assign(traces[0].colorbar, { len: 1 - share, y: 0, yanchor: "bottom" });
  traces.push(...extra);
  const layout = layoutOf({
    title,
    height: total,
    isNarrow,
    xaxis: { showgrid: false, ...xaxis },
    yaxis: { domain: [0, 1 - share], type: "category", autorange: "reversed", automargin: true, showgrid: false, ticks: "", tickfont: { size: isNarrow ? 9 : 11 } },
    uirevision,
  });
  if (axis) layout.yaxis2 = axis;
  div.describe = (row, column) => hover(row, column, numbers[row][column] === undefined ? "not recorded" : format(numbers[row][column]));
  div.cells = { rows: rows.length, columns: columns.length, names: rows };
  plot(div, traces, layout);
  followPointer(div);
  makeCursor(div, short, columns);
}

/** Show the text of the cell under the pointer. */
function followPointer(div) {
  if (div.isFollowed) return;
  div.isFollowed = true;
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  div.append(tip);
  div.on("plotly_hover", ({ points, event }) => {
    if (points[0].data.type !== "heatmap") return;
    const [row, column] = points[0].pointIndex;
    tip.textContent = div.describe(row, column);
    tip.hidden = false;
    const box = div.getBoundingClientRect();
    const left = event.clientX - box.left;
    tip.style.right = "auto";
    tip.style.left = `${left > box.width / 2 ? left - tip.offsetWidth - 14 : left + 14}px`;
    tip.style.top = `${Math.min(event.clientY - box.top + 12, box.height - tip.offsetHeight - 4)}px`;
  });
  div.on("plotly_unhover", () => (tip.hidden = true));
  div.on("plotly_click", ({ points }) => div.pick && points[0].data.type === "heatmap" && div.pick(points[0].pointIndex[0]));
}

/** A heat map's cursor: arrow keys move it, Enter selects its row. */
function makeCursor(div, labels, columns) {
  div.tabIndex = 0;
  div.setAttribute("role", "application");
  div.setAttribute("aria-label", `Heat map of ${div.cells.rows} rows and ${div.cells.columns} columns; arrow keys read its cells`);
  div.cursor = null;
  div.onkeydown = (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter" && div.cursor && div.pick) div.pick(div.cursor[0]);
    if (!move || !div.cells.rows) return;
    event.preventDefault();
    const [row, column] = div.cursor || [0, -1];
    const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
    div.cursor = [clamp(row + move[0], div.cells.rows), clamp(column + move[1], div.cells.columns)];
    const mark = { symbol: "square-open", size: 13, color: color("accent"), line: { width: 3 } };
    const cursor = { type: "scatter", mode: "markers", x: [columns[div.cursor[1]]], y: [labels[div.cursor[0]]], marker: mark, hoverinfo: "skip" };
    const others = div.data.filter((trace) => trace.marker?.symbol !== mark.symbol);
    Plotly.react(div, [...others, { ...cursor, showlegend: false }], div.layout, CONFIG);
    const words = div.describe(...div.cursor);
    document.getElementById("status").textContent = words;
    Object.assign(div.querySelector(".tip"), { textContent: words, hidden: false }).style.cssText = "left: auto; right: 4rem; top: 2.2rem";
  };
  div.onblur = () => (div.querySelector(".tip").hidden = true);
}

/** A chart of lines. On a logarithmic axis a zero is a mark at the bottom. */
function lines(div, { traces, title, xaxis, yaxis, label, height, shapes, annotations, uirevision, legend, isLog, hovermode }) {
  const scale = isLog ? logAxis(traces, yaxis?.range) : {};
  const drawn = traces.flatMap((trace) => (isLog ? withZeros(trace, 10 ** scale.range[0]) : [trace]));
  const layout = layoutOf({
    title,
    height: height || 260,
    xaxis,
    yaxis: { title: { text: escapeText(label || ""), standoff: 4, font: { size: 11 } }, automargin: true, exponentformat: "e", ...scale, ...yaxis },
    shapes,
    annotations,
    uirevision,
    legend,
    legendRows: legend ? rowsOfLegend(traces, div.clientWidth) : 0,
    hovermode,
  });
  plot(div, drawn.map((trace) => ({ type: "scatter", mode: "lines", ...trace, line: { width: 1.8, ...trace.line } })), layout);
}

/** Approximate number of rows of a legend: one if all names fit side by side, else of columns as wide as the longest name. */
function rowsOfLegend(traces, width) {
  const widths = traces.filter((trace) => trace.showlegend !== false).map((trace) => 50 + 6.5 * String(trace.name).length);
  const room = Math.max(200, width - 80);
  if (widths.reduce((sum, width) => sum + width, 0) <= room) return 1;
  return Math.ceil(widths.length / Math.max(1, Math.floor(room / Math.max(...widths))));
}

/** A trace, and its zeros as marks at the bottom of a logarithmic axis. */
function withZeros(trace, bottom) {
  const zeros = [...trace.y].map((_, index) => index).filter((index) => trace.y[index] === 0);
  if (!zeros.length) return [trace];
  const pick = (list) => zeros.map((index) => list[index]);
  const marker = { symbol: "triangle-down-open", size: 7, color: trace.line?.color };
  const marks = { x: pick(trace.x), y: zeros.map(() => bottom), mode: "markers", marker, hoverinfo: "text", text: trace.text ? pick(trace.text) : zeros.map(() => "0"), showlegend: false };
  return [{ ...trace, y: [...trace.y].map((number) => (number === 0 ? null : number)) }, { ...marks, cliponaxis: false }];
}

/** A logarithmic axis with few marks; by default its range holds all numbers. */
function logAxis(traces, fixedRange) {
  const numbers = traces.flatMap((trace) => [...trace.y]).filter((number) => number > 0);
  const [low, high] = numbers.length ? [Math.log10(Math.min(...numbers)), Math.log10(Math.max(...numbers))] : [0, 1];
  const room = 0.06 * (high - low) + 0.05;
  const range = fixedRange || [low - room, high + room];
  const decades = range[1] - range[0];
  return { type: "log", range, dtick: decades > 1.5 ? Math.max(1, Math.ceil(decades / 7)) : "D2" };
}

/** Whether numbers, none of them negative, differ so much that they need a logarithmic axis. */
function wantsLog(numbers) {
  let low = Infinity;
  let high = 0;
  for (const number of numbers) {
    if (!Number.isFinite(number)) continue;
    if (number < 0) return false;
    if (number > 0) [low, high] = [Math.min(low, number), Math.max(high, number)];
  }
  return high > 20 * low;
}

/** The range of an axis that holds all numbers, also equal ones, which plotly would draw between numbers 1 lower and 1 higher. */
function axisOf(numbers) {
  const finite = numbers.filter(Number.isFinite);
  if (!finite.length) return {};
  if (wantsLog(finite)) return logAxis([{ y: finite }]);
  const [low, high] = extent(Float32Array.from(finite), 0, false);
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  return { range: [low - room, high + room] };
}

/** A line over steps, with a mark where a number is not finite. */
function lineOverSteps(name, loaded, row, line) {
  const values = rowOf(loaded, row);
  const steps = loaded.steps;
  const text = steps.map((step, column) => `${escapeText(name)}<br>step ${step}: ${format(values[column])}`);
  const finite = [...values].map(finiteOrNull);
  const trace = { x: steps, y: finite, name: escapeText(name), text, hoverinfo: "text", line, mode: steps.length > 60 ? "lines" : "lines+markers", marker: { size: 4 } };
  return [trace, ...crosses(steps, finite, text, (column) => isRecorded(loaded, row, column))];
}

/** The line of a site, if it has one. */
function lineOfSite(name, loaded, site, line) {
  const row = loaded?.rowOf.get(site);
  return row === undefined ? [] : lineOverSteps(name, loaded, row, line);
}

const finiteOrNull = (value) => (Number.isFinite(value) ? value : null);

/** Crosses at the upper edge where a number was recorded and is not finite, which is null in `y`. */
function crosses(x, y, text, isRecordedAt) {
  const bad = [...y.keys()].filter((index) => y[index] === null && isRecordedAt(index));
  const top = Math.max(...y.filter((value) => value !== null), 1e-30);
  const pick = (list) => bad.map((index) => list[index]);
  const marker = { symbol: "x", size: 8, color: NOT_FINITE };
  return bad.length ? [{ x: pick(x), y: bad.map(() => top), text: pick(text), hoverinfo: "text", mode: "markers", marker, showlegend: false }] : [];
}

/** The area between two lines; `look`: its colour, and the texts of both. */
function band(low, high, look) {
  const edge = { ...look, line: { width: 0 } };
  return [{ ...low, ...edge, showlegend: false }, { ...high, ...edge, fill: "tonexty" }];
}
