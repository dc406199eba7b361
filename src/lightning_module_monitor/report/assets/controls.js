// Shared parts of the sections: controls and the search.
"use strict";

const byId = (id) => document.getElementById(id);
const several = page.runs.length > 1;
const first = JSON.parse(document.querySelector("main").dataset.first || "{}"); // the first series of the verdict
const search = { text: "", accepts: () => true };

/** Fill a select with options; keeps its value if it is still an option. */
function fill(select, options, chosen) {
  const before = chosen ?? select.value;
  select.replaceChildren(...options.map(([value, text]) => new Option(text ?? value, value)));
  if (options.some(([value]) => String(value) === String(before))) select.value = before;
}

/** Fill a select with sites; returns the chosen one: the one before, else that of the first finding, else `initial()`. */
function chooseSite(id, sites, initial) {
  fill(byId(id), sites.map((site) => [site]), byId(id).value || (sites.includes(first.site) ? first.site : initial()));
  return byId(id).value;
}

/** Make `count` chart containers in a box. */
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

/** Fit a slider to steps and label it; returns its step. */
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
