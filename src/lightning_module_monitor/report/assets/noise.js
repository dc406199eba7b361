// The section of the gradient noise: the noise scale over steps, and the number of samples in a step.
"use strict";

const noise = {
  draw() {
    const scales = page.runs.map((run) => run.noise.map(load));
    const sites = filtered([...new Set(scales.flat().flatMap((loaded) => loaded.sites))]);
    const { short } = shortNames(sites);
    const shortOf = new Map(sites.map((site, index) => [site, site === "_root_" ? "whole model" : short[index]]));
    const traces = page.runs.flatMap((run, index) => {
      const shown = scales[index].filter((loaded) => shortOf.has(loaded.sites[0])).map((loaded) => ({ name: shortOf.get(loaded.sites[0]), loaded }));
      const samples = contextOf(run, "batch_size").map(({ loaded }) => ({ name: "batch size of the run", loaded }));
      return [...linesOf(index, shown), ...linesOf(index, samples, { color: several ? faded(lineColor(index), 0.6) : color("ink"), dash: "dash" })];
    });
    const isLog = wantsLog(traces.flatMap((trace) => trace.y));
    lines(byId("noise-chart"), { traces, label: "samples", xaxis: STEPS, isLog, legend: true, height: 340 });
  },
};
