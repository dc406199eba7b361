// The section of the gradient noise: the noise scale over steps, and the number of samples in a step.
"use strict";

const noise = {
  draw() {
    const scales = page.runs.map((run) => run.noise.map(load));
    const sites = filtered([...new Set(scales.flat().flatMap((loaded) => loaded.sites))]);
    const { short } = shortNames(sites);
    const shortOf = new Map(sites.map((site, index) => [site, site === "_root_" ? "whole model" : short[index]]));
    const traces = page.runs.flatMap((run, index) => {
      const prefix = several ? `${run.name}: ` : "";
      const shown = scales[index].filter((loaded) => shortOf.has(loaded.sites[0]));
      const ofSites = shown.flatMap((loaded, rank) => lineOverSteps(prefix + shortOf.get(loaded.sites[0]), loaded, 0, lineLook(index, rank)));
      const samples = run.context.filter(({ statistic }) => statistic === "batch_size").map(load);
      return [...ofSites, ...samples.flatMap((loaded) => lineOverSteps(`${prefix}batch size of the run`, loaded, 0, { color: several ? faded(lineColor(index), 0.6) : color("ink"), dash: "dash" }))];
    });
    const isLog = wantsLog(traces.flatMap((trace) => trace.y));
    lines(byId("noise-chart"), { traces, label: "samples", xaxis: STEPS, isLog, legend: true, height: 340 });
  },
};
