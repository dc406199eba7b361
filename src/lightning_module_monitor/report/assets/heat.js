// The section of heat maps: layers by steps, grouped by module, of several runs side by side and their difference.
"use strict";

const SIGNED = new Set(["mean", "log_gain", "cosine", "min", "max"]);

function scaleOf(choice, loadedTables, statistic) {
  if (choice !== "auto") return choice;
  const anyNegative = loadedTables.some((loaded) => loaded && loaded.values.some((value) => value < 0));
  if (anyNegative) return SIGNED.has(statistic) ? "signed" : "linear";
  return needLog(loadedTables) ? "log" : "linear";
}

/** Smallest and largest finite number (positive number for a logarithm), without a share `trim` at each end. */
function extent(values, trim, isPositive) {
  const name = `${trim}${isPositive}`;
  if (!extents.has(values)) extents.set(values, {});
  return (extents.get(values)[name] ??= newExtent(values, trim, isPositive));
}

/** Whether the numbers of loaded tables need a logarithmic axis. */
const needLog = (loadedTables) => wantsLog(loadedTables.filter(Boolean).flatMap((loaded) => extent(loaded.values, 0, true)));

const NOTHING = [1e-30, 1e-30]; // the extent without a number
const extents = new WeakMap(); // by array, for the next position of a slider

function newExtent(values, trim, isPositive) {
  const numbers = values.filter((value) => Number.isFinite(value) && (!isPositive || value > 0));
  if (!numbers.length) return NOTHING;
  if (!trim) {
    let [low, high] = [Infinity, -Infinity];
    for (const number of numbers) [low, high] = [number < low ? number : low, number > high ? number : high];
    return [low, high];
  }
  numbers.sort(); // values are a typed array, and so is this
  return [numbers[Math.floor(trim * (numbers.length - 1))], numbers[Math.ceil((1 - trim) * (numbers.length - 1))]];
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

/** The depths at which sites can be grouped, with the numbers of groups. */
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

/** The logged series of a name; with the training loss also the validation loss. */
function contextOf(run, name) {
  const isShown = ({ statistic }) => statistic === name || (name === "loss" && /val.*loss/.test(statistic));
  return run.context.filter(isShown).map((table) => ({ name: table.statistic, loaded: load(table) }));
}

const heat = {
  draw() {
    const { kind, statistic } = JSON.parse(byId("heat-table").value);
    const { base } = tableNames((table) => table.kind === kind && table.statistic === statistic)[0];
    const loadedTables = loadAll(kind, statistic);
    const all = unionOfSites(loadedTables);
    const sites = filtered(all);
    const depth = this.depth(sites);
    const groups = depth ? groupsOf(sites, depth) : sites.map((site) => [site, [site]]);
    const scale = scaleOf(byId("heat-scale").value, loadedTables, statistic);
    const trim = byId("heat-trim").checked ? 0.01 : 0;
    const ranges = loadedTables.filter(Boolean).map((loaded) => extent(loaded.values, trim, scale === "log"));
    const filled = ranges.filter((extent) => extent !== NOTHING);
    const range = filled.length ? [Math.min(...filled.map(([low]) => low)), Math.max(...filled.map(([, high]) => high))] : [0.1, 1];
    const boxes = charts(byId("heat-charts"), several ? 2 * page.runs.length - 1 : 1);
    const common = { rows: groups.map(([name]) => name), scale, range, label: labelOf(base, statistic), statistic };
    const above = page.runs.map((run) => contextOf(run, byId("heat-above").value));
    const aboveScale = axisOf(above.flat().flatMap(({ loaded }) => [...loaded.values]));
    byId("heat-charts").classList.toggle("many", several);
    loadedTables.forEach((loaded, index) => {
      const title = several ? page.runs[index].name : undefined;
      if (loaded) this.drawRun(boxes[index], loaded, groups, { ...common, title, above: above[index], aboveScale }, kind, page.runs[index]);
      else empty(boxes[index], `${title}: not recorded`);
    });
    for (let index = 1; index < page.runs.length; index++) {
      this.drawDifference(boxes[page.runs.length - 1 + index], loadedTables[0], loadedTables[index], groups, scale, index);
    }
    this.explain(all, sites, groups, depth, loadedTables);
    this.curve(kind, labelOf(base, statistic), loadedTables, sites);
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

  /** A group's number: a value that is not finite takes precedence. */
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

  drawRun(div, loaded, groups, options, kind, run) {
    heatmap(div, {
      ...options,
      columns: columnsOf(loaded.steps),
      value: (row, column) => this.aggregate(loaded, groups[row][1], column),
      hover: (row, column, text) => this.words(loaded, groups[row], column, `${options.statistic} ${text}`) + moduleLine(run, groups[row][0]),
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
      empty(div, `${title}: not in both`);
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
    const columns = columnsOf(loaded.steps);
    const hover = (row, column, text) => this.words(loaded, groups[row], column, `${label} ${text}`);
    const range = [-largest, largest];
    heatmap(div, { rows: groups.map(([name]) => name), columns, value: difference, hover, scale: "signed", range, title, xaxis: stepAxis(loaded.steps), label });
    div.pick = (row) => this.pick(groups[row]);
  },

  /** Select a row: show the sites of a group, or the curve of a site. */
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

  explain(all, sites, groups, depth, loadedTables) {
    const { common } = shortNames(groups.map(([name]) => name));
    const notes = [];
    if (sites.length < all.length) notes.push(`${sites.length} of ${all.length} sites match the search.`);
    if (common) notes.push(`All names begin with “${common}.”`);
    if (depth) notes.push("A row is a group of sites: click it, or press Enter, to see them.");
    const condensed = loadedTables.find((loaded) => loaded && loaded.steps.some((step, column) => step !== loaded.lastSteps[column]));
    if (condensed) notes.push("A column stands for several records: each site has its value of the largest magnitude, or a value that is not finite.");
    byId("heat-note").textContent = notes.join(" ");
  },

  curve(kind, label, loadedTables, sites) {
    const select = byId("heat-site");
    fill(select, sites.map((site) => [site, site]), select.value || first.site);
    const site = select.value;
    const traces = loadedTables.flatMap((loaded, index) => lineOfSite(several ? page.runs[index].name : site, loaded, site, { color: lineColor(index) }));
    const isLog = wantsLog(traces.flatMap((trace) => trace.y));
    lines(byId("heat-curve"), { traces, title: `${kind} of ${site}`, label, xaxis: STEPS, isLog, legend: several, height: 240 });
  },
};

/** The column whose step is nearest, at most half a mean interval away; else -1. */
function nearestColumn(loaded, step) {
  let best = 0;
  for (let column = 1; column < loaded.columns; column++) {
    if (Math.abs(loaded.steps[column] - step) < Math.abs(loaded.steps[best] - step)) best = column;
  }
  const gap = loaded.columns > 1 ? (loaded.steps[loaded.columns - 1] - loaded.steps[0]) / (loaded.columns - 1) : 0;
  return Math.abs(loaded.steps[best] - step) <= gap / 2 ? best : -1;
}
