// The page: draws the sections in view, and all of them for printing; handles the search, the controls and the theme.
"use strict";

const sections = { glance, heat, profiles, updates, noise, rcc, attention, histograms, quantiles, spectra };
const visible = new Set();

function draw(name) {
  try {
    sections[name].draw();
  } catch (error) {
    console.error(error);
    byId(`${name}-error`).textContent = `This section could not be drawn: ${error}`;
  }
}

const waiting = new Set();

/** Draw once for all moves of a slider before the next frame. */
function drawSoon(name) {
  if (waiting.has(name)) return;
  waiting.add(name);
  requestAnimationFrame(() => {
    waiting.delete(name);
    draw(name);
  });
}

/** Draw the sections in view again; others are drawn when they come into view. */
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
  const all = [...new Set(page.runs.flatMap((run) => [...run.tables, ...run.spectra].flatMap((table) => page.lists[table.sites])))];
  const count = all.filter(accepts).length;
  byId("search-count").textContent = text ? `${count} of ${all.length} sites` : `${all.length} sites`;
  for (const row of document.querySelectorAll("[data-site]")) row.hidden = !accepts(row.dataset.site);
  drawVisible();
}

/** Show a series: its kind and statistic in the heat map, its curve below; a singular value among those of its site. */
function showSeries({ kind, statistic, site }) {
  byId("search").value = "";
  changeSearch();
  const section = loadAll(kind, statistic, "spectra").some(Boolean) ? "spectra" : "heat";
  byId(`${section}-table`).value = section === "spectra" ? kind : JSON.stringify({ kind, statistic });
  fill(byId(`${section}-site`), [[site]], site);
  draw(section);
  byId(section).scrollIntoView();
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Draw every section in light colours and as wide as a page: what is drawn when this returns is printed. */
function beginPrint() {
  Object.assign(document.documentElement.dataset, { dark: "no", print: "yes" });
  for (const name of drawable()) draw(name);
}

function endPrint() {
  delete document.documentElement.dataset.print;
  applyTheme();
}

/** The names of the sections that this page has. */
const drawable = () => Object.keys(sections).filter((name) => byId(`${name}-error`));

function applyTheme() {
  document.documentElement.dataset.dark = isDark() ? "yes" : "no";
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  drawVisible();
}

function start() {
  // A run without numbers, or with histograms alone, has no heat map.
  if (byId("heat-table")) fill(byId("heat-table"), tableNames(() => true).map(({ kind, statistic }) => [JSON.stringify({ kind, statistic }), `${kind}, ${statistic}`]), JSON.stringify({ kind: first.kind, statistic: first.statistic }));
  for (const control of document.querySelectorAll("section select, section input")) {
    const name = control.closest("section").id;
    control.addEventListener(control.type === "range" ? "input" : "change", () => drawSoon(name));
  }
  let timer;
  byId("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(changeSearch, 150);
  });
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
  for (const name of drawable()) watcher.observe(byId(name));
  const main = document.querySelector("main");
  let width = main.clientWidth;
  new ResizeObserver(() => {
    if (main.clientWidth === width || document.documentElement.dataset.print) return;
    width = main.clientWidth;
    requestAnimationFrame(drawVisible);
  }).observe(main);
  addEventListener("beforeprint", beginPrint);
  addEventListener("afterprint", endPrint);
}

start();
