// The section of attention: heads by layers at a step, and layers over steps.
"use strict";

const attention = {
  draw() {
    const tables = tableNames((table) => table.base.startsWith("attention_"));
    fill(byId("attention-table"), tables.map((name) => [JSON.stringify(name), `${name.kind}, ${name.statistic}`]));
    const { kind, statistic, base } = JSON.parse(byId("attention-table").value);
    const loadedTables = loadAll(kind, statistic);
    const step = slider(byId("attention-step"), byId("attention-step-name"), unionOfSteps(loadedTables));
    const heads = filtered(unionOfSites(loadedTables)).map((site) => ({ site, parts: /^(.*)\.head_(\d+)$/.exec(site) || [site, site, "0"] }));
    const layers = [...new Set(heads.map(({ parts }) => parts[1]))];
    const names = layerNames(layers);
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
        rows: names,
        columns,
        value: (layer, head) => {
          const index = row(layer, head);
          return index === undefined || column < 0 || !isRecorded(loaded, index, column) ? undefined : loaded.values[index * loaded.columns + column];
        },
        hover: (layer, head, text) => `${layers[layer]}, head ${head}\nstep ${step}\n${statistic} ${text}`,
        scale: "linear",
        range,
        title: `${several ? `${page.runs[index].name}, ` : ""}step ${step}`,
        xaxis: { type: "category" },
        label: labelOf(base, statistic),
        height: Math.min(700, 110 + 26 * Math.max(3, layers.length)),
      });
    });
    this.overSteps(boxes[page.runs.length], loadedTables, layers, { label: labelOf(base, statistic), kind });
  },

  /** The median over the heads of each layer. */
  overSteps(div, loadedTables, layers, { label, kind }) {
    const colors = layers.map((_, index) => shade(layers.length > 1 ? index / (layers.length - 1) : 0));
    const names = layerNames(layers);
    const traces = loadedTables.flatMap((loaded, run) => {
      if (!loaded) return [];
      return layers.flatMap((layer, index) => {
        const rows = [...loaded.rowOf].filter(([site]) => site.startsWith(`${layer}.head_`)).map(([, row]) => row);
        if (!rows.length) return [];
        const y = loaded.steps.map((_, column) => finiteOrNull(quantile(columnOf(loaded, column, rows), 0.5)));
        const name = `${several ? `${page.runs[run].name}: ` : ""}${names[index]}`;
        return [{ x: loaded.steps, y, name: escapeText(name), line: { color: colors[index], dash: ["solid", "dash", "dot"][run % 3] }, hovertemplate: "%{y:.3g}" }];
      });
    });
    lines(div, { traces, title: `${kind}: median over each layer's heads`, label, xaxis: STEPS, legend: layers.length * page.runs.length <= 12, height: 320, hovermode: "x unified" });
  },
};

/** Names of layers for charts: "layer 0" where their names differ by a number alone. */
function layerNames(layers) {
  const { short } = shortNames(layers);
  const backwards = short.map((name) => name.split(".").reverse().join("."));
  const numbers = shortNames(backwards).short;
  return layers.length > 1 && numbers.every((number) => /^\d+$/.test(number)) ? numbers.map((number) => `layer ${number}`) : short;
}

/** A colour between the ends of cividis. */
function shade(share) {
  const [from, to] = document.documentElement.dataset.dark === "yes" ? [[120, 160, 235], [255, 233, 69]] : [[0, 45, 110], [190, 160, 30]];
  return `rgb(${from.map((channel, index) => Math.round(channel + share * (to[index] - channel))).join(",")})`;
}
