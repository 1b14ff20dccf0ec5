"use strict";
// What all charts and tables show: axis, smoothing, zoom, and the configurations that are not hidden.

const AXES = { steps: "environment steps", frames: "frames", updates: "updates", episodes: "episodes", time: "wall time" };

const view = { x: "steps", smooth: 1, range: null, hidden: new Set(), charts: [] };

const redraw = () => view.charts.forEach(chart => chart.draw());

function zoom(range) {  // all charts share the x axis; null shows all
  view.range = range;
  document.querySelectorAll(".unzoom").forEach(button => { button.hidden = !range; });
  redraw();
}

// ---- Controls ----

function choice(name, options, chosen, change) {
  return el("fieldset", { class: "choice" }, el("legend", {}, name), Object.entries(options).map(([value, text]) =>
    el("label", {}, el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => change(value) }), text)));
}

function axisChoice() {
  const change = value => { view.x = value; zoom(null); };
  return choice("x axis", { steps: "steps", frames: "frames", updates: "updates", time: "wall time" }, view.x, change);
}

function smoothing() {
  const change = event => { view.smooth = +event.target.value; redraw(); };
  return el("label", { class: "small soft" }, "Smoothing: ", el("select", { id: "smoothing", onchange: change },
    [1, 5, 15, 51].map(width =>
      el("option", { value: width, selected: width === view.smooth }, width === 1 ? "off" : `${width} points`))));
}

const unzoomButton = () => el("button", { type: "button", class: "unzoom", hidden: !view.range, onclick: () => zoom(null) }, "Reset zoom");

function themeButton() {
  const root = document.documentElement, order = ["auto", "light", "dark"];
  const keep = mode => { try { localStorage.setItem("qfleet-theme", mode); } catch { /* without storage the choice is not kept */ } };
  let mode = "auto";
  try { mode = localStorage.getItem("qfleet-theme") || "auto"; } catch { /* no storage */ }
  const next = () => { mode = order[(order.indexOf(mode) + 1) % 3]; keep(mode); apply(); };
  const button = el("button", { type: "button", id: "theme", onclick: next });
  const apply = () => { root.dataset.theme = mode; button.textContent = `Theme: ${mode}`; };
  apply();
  return button;
}

// ---- Configurations ----

const FEW_CONFIGURATIONS = 3;

class Configurations {
  // The legend, and a filter above it. `texts` holds what the filter searches for each group.
  constructor(groups, texts) {
    this.texts = texts.map(text => text.toLowerCase());
    this.off = new Set();
    this.find = el("input", { type: "search", id: "filter", placeholder: "filter configurations",
      title: "Shows the configurations whose name or differing settings contain all of these words",
      "aria-label": "filter configurations", oninput: () => this.apply() });
    this.boxes = groups.map((group, index) => el("input", { type: "checkbox", checked: true, onchange: event => {
      this.off[event.target.checked ? "delete" : "add"](index); this.apply(); } }));
    this.none = el("span", { class: "bad small", role: "status", hidden: true }, "no configuration matches");
    const several = groups.length > 1;
    const labels = groups.map((group, index) => el("label", { "data-entry": index },
      several ? this.boxes[index] : null, lineSample(index, several), group.label));
    const all = on => () => { this.boxes.forEach(box => { box.checked = on; });
      this.off = new Set(on ? [] : groups.keys()); this.apply(); };
    this.node = [groups.length > FEW_CONFIGURATIONS ? el("span", { class: "filter" }, this.find,
      el("button", { type: "button", onclick: all(true) }, "All"),
      el("button", { type: "button", onclick: all(false) }, "None"), this.none) : null,
    this.legend = el("div", { class: "legend", role: "group", "aria-label": "configurations" }, labels)];
  }

  apply() {
    const words = this.find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const unmatched = index => !words.every(word => this.texts[index].includes(word));
    view.hidden = new Set([...this.texts.keys()].filter(index => this.off.has(index) || unmatched(index)));
    this.legend.querySelectorAll("[data-entry]").forEach(entry => { entry.hidden = unmatched(+entry.dataset.entry); });
    this.none.hidden = !this.texts.length || ![...this.texts.keys()].every(unmatched);
    applyHidden();
    redraw();
  }
}

function applyHidden() {  // parts of tables and cards that belong to one configuration
  document.querySelectorAll("[data-group]").forEach(part => { part.hidden = view.hidden.has(+part.dataset.group); });
}
