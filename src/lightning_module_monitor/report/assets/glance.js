// The section of the run at a glance: losses, learning rates and norms of the whole model over steps, of all runs on one scale.
"use strict";

const RATE = /^lr(_\d+)?$/;
const ROOT = "_root_";
const GRADIENTS = { gradient: "gradient", gradient_before_clip: "before clipping" };

const SMALL_STEPS = { title: { ...STEPS.title, font: { size: 11 } } };

const glance = {
  draw() {
    const modules = [...new Set(page.runs.flatMap((run) => run.norms.map((table) => page.lists[table.sites][0])))].filter((site) => site !== ROOT);
    const { short } = shortNames(modules);
    const shortModules = new Map(modules.map((site, index) => [site, short[index]]));
    const views = [
      ["loss", (run) => contextOf(run, "loss")],
      ["learning rate", (run) => run.context.filter(({ statistic }) => RATE.test(statistic)).map((table) => ({ name: this.nameOfRate(run, table.statistic), loaded: load(table) }))],
      ["norm of the whole gradient", (run) => this.norms(run, (base, site) => site === ROOT && GRADIENTS[base])],
      ["norm of all parameters", (run) => this.norms(run, (base, site) => site === ROOT && base === "parameter" && "parameters")],
      ["norm of the gradient by module", (run) => this.norms(run, (base, site) => site !== ROOT && base === "gradient" && shortModules.get(site))],
    ];
    const drawn = views.map(([title, of]) => ({ title, traces: page.runs.flatMap((run, index) => linesOf(index, of(run))) })).filter(({ traces }) => traces.length);
    const boxes = charts(byId("glance-charts"), drawn.length);
    drawn.forEach(({ title, traces }, index) => {
      const yaxis = axisOf(traces.flatMap((trace) => trace.y));
      const legend = traces.filter((trace) => trace.showlegend !== false).length > 1;
      const height = 200 + (legend ? LEGEND_ROW * rowsOfLegend(traces, boxes[index].clientWidth) : 0);
      lines(boxes[index], { traces, title, xaxis: SMALL_STEPS, yaxis, isLog: yaxis.type === "log", legend, height });
    });
  },

  /** The norms that have a name. */
  norms: (run, nameOf) => run.norms.map((table) => ({ name: nameOf(table.base, page.lists[table.sites][0]), table })).filter(({ name }) => name).map(({ name, table }) => ({ name, loaded: load(table) })),

  /** With the name of the parameter group, if it has one. */
  nameOfRate(run, name) {
    const group = run.groups[Number(name.slice(3))];
    return group ? `${name} (${group})` : name;
  },
};
