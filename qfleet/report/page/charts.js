"use strict";
// Charts as SVG: runs that differ only in seed are a line with a band. Uses no library; data never becomes markup.

const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

function made(space, tag, attributes, children) {
  const node = space ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return node;
}
const el = (tag, attributes, ...children) => made(false, tag, attributes, children);
const svg = (tag, attributes, ...children) => made(true, tag, attributes, children);
const colour = index => `var(--c${index % 8})`;

function figure(value) {  // formats a number of any size in few characters
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return `${size !== 0 && size < 1e-3 ? value.toExponential(1) : +value.toPrecision(size >= 100 ? 4 : 3)}`;
}

function clock(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds), pad = part => String(part).padStart(2, "0");
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return h ? `${h}:${pad(m)}:${pad(s)}` : `${m}:${pad(s)}`;
}

const CLOCK_STEPS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

function ticks(low, high, count, timed) {  // [value, text] of round values; all texts of an axis have the same format
  const span = high - low || 1, raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = timed && raw <= 86400 ? CLOCK_STEPS.find(part => part >= raw) : [1, 2, 2.5, 5, 10].map(part => part * power).find(part => part >= raw) || raw;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step || 0);
  return found.map(value => [value, timed ? clock(value) : tickText(value, step, Math.max(Math.abs(low), Math.abs(high)))]);
}

function tickText(value, step, most) {  // as many decimals as the step has, in the unit of the largest value
  if (value === 0) return "0";
  const [unit, letter] = most >= 1e9 ? [1e9, "G"] : most >= 1e6 ? [1e6, "M"] : most >= 1e3 && step >= 10 ? [1e3, "k"] : [1, ""];
  if (most < 1e-4 || most >= 1e12) return value.toExponential(1);
  const size = step / unit, whole = Math.floor(Math.log10(size) + 1e-9), two = Math.abs(size / 10 ** whole - 2.5) < 1e-6;
  return (value / unit).toLocaleString("en", { minimumFractionDigits: Math.max(0, two - whole), maximumFractionDigits: Math.max(0, two - whole) }) + letter;
}

function smoothed(values, width) {  // centred moving mean, narrower at both ends
  const half = Math.floor((width - 1) / 2);
  return half < 1 ? values : values.map((_, place) => {
    const some = values.slice(Math.max(0, place - half), place + half + 1);
    return some.reduce((sum, value) => sum + value, 0) / some.length;
  });
}

function at(curve, x) {  // linear between points, null outside
  const { xs, ys } = curve;
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] <= x) low = mid; else high = mid; }
  const span = xs[high] - xs[low];
  return span > 0 ? ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / span : ys[high];
}

function banded(seeds, width) {  // over the range that all seeds cover: lowest and highest as logged; only the mean is smoothed
  const start = Math.max(...seeds.map(seed => seed.xs[0])), end = Math.min(...seeds.map(seed => seed.xs.at(-1)));
  const even = seeds.map(seed => ({ xs: seed.xs, ys: smoothed(seed.ys, width) })), ys = [], low = [], high = [];
  // Evaluated at every point of every seed, so that no seed leaves the band; with few points also between them, so that
  // the band is not too wide where two seeds cross.
  const known = [...new Set([start, end, ...seeds.flatMap(seed => seed.xs)])].filter(x => x >= start && x <= end).sort((a, b) => a - b);
  const parts = Math.max(1, Math.ceil(300 / known.length));
  const xs = known.flatMap((x, i) => i + 1 < known.length ? Array.from({ length: parts }, (_, k) => x + (known[i + 1] - x) * k / parts) : [x]);
  for (const x of xs) {
    const values = seeds.map(seed => at(seed, x));
    low.push(Math.min(...values)); high.push(Math.max(...values));
    ys.push(even.reduce((sum, seed) => sum + at(seed, x), 0) / seeds.length);
  }
  return { xs, ys, low, high };
}

function points(xs, ys) {  // points with both values, in the order of x
  const known = xs.map((x, i) => [x, ys[i]]).filter(([x, y]) => x !== null && y !== null && y !== undefined);
  return { xs: known.map(([x]) => x), ys: known.map(([, y]) => y) };
}

class Chart {
  // spec(): {title, unit, xLabel, timed, smooth, zero, whole, lines: [{label, y}], curves: [{label, index, seeds: [{name, xs, ys}]}]}
  constructor(spec, height = 230) {
    this.spec = spec; this.height = height; this.cursor = null;
    this.head = el("h3"); this.plot = el("div"); this.tip = el("div", { class: "tip", hidden: true });
    this.figures = el("tbody");
    this.node = el("figure", { class: "card" }, this.head, this.plot, this.tip,
      el("details", {}, el("summary", {}, "Values"),
        el("table", {}, el("thead", {}, el("tr", {}, ["", "first", "last", "min", "max"].map(name =>
          el("th", { class: name && "number", scope: "col" }, name)))), this.figures)));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  curves(spec) {
    return spec.curves.map(curve => {
      const raw = curve.seeds.filter(seed => seed.xs.length);
      const line = raw.length > 1 ? banded(raw, spec.smooth || 1) : raw.map(({ xs, ys }) => ({ xs, ys: smoothed(ys, spec.smooth || 1) }))[0];
      return { ...curve, raw, line };
    }).filter(curve => curve.raw.length);
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const spec = this.spec(), curves = this.curves(spec);
    const note = [spec.unit, spec.smooth > 1 ? `mean of ${spec.smooth} points` : ""].filter(Boolean).join(", ");
    this.head.replaceChildren(spec.title, " ", el("span", { class: "soft small" }, note));
    this.node.dataset.points = curves.reduce((sum, curve) => sum + curve.raw.reduce((n, seed) => n + seed.xs.length, 0), 0);
    if (!curves.length) { this.plot.replaceChildren(el("div", { class: "empty" }, "no data")); return; }
    const values = curves.flatMap(curve => [...curve.raw.flatMap(seed => seed.ys), ...curve.line.ys])
      .concat((spec.lines || []).map(line => line.y), spec.zero ? [0] : []);
    const places = curves.flatMap(curve => curve.raw.flatMap(seed => [seed.xs[0], seed.xs.at(-1)]));
    let [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    const pad = (high - low || Math.abs(high) || 1) * .06;
    [low, high] = [spec.zero && low >= 0 ? 0 : low - pad, high + pad];
    let [left, right] = [Math.min(...places), Math.max(...places)];
    if (left === right) [left, right] = [left - 1, right + 1];
    const sides = ticks(low, high, spec.whole && high - low < 6 ? Math.ceil(high - low) : 5);
    const box = { left: 16 + 6.6 * Math.max(3, ...sides.map(([, text]) => text.length)), right: width - 10, top: 10, bottom: this.height - 34 };
    this.sx = x => box.left + (x - left) / (right - left) * (box.right - box.left);
    this.sy = y => box.bottom - (y - low) / (high - low) * (box.bottom - box.top);
    this.state = { spec, curves, left, right, box };
    const picture = svg("svg", { viewBox: `0 0 ${width} ${this.height}`, height: this.height, role: "img", tabindex: "0",
      "aria-label": this.summary(spec, curves), onpointermove: event => this.point(event), onpointerleave: () => this.hide(),
      onpointerdown: event => this.point(event), onkeydown: event => this.key(event) },
      this.frame(sides), this.lines(spec), curves.map(curve => this.curve(curve, spec)));
    this.cross = svg("line", { y1: box.top, y2: box.bottom, stroke: "var(--soft)", "stroke-dasharray": "3 3", visibility: "hidden" });
    picture.append(this.cross);
    const held = this.plot.contains(document.activeElement);
    this.plot.replaceChildren(picture);
    if (held) picture.focus({ preventScroll: true });
    if (this.cursor !== null) this.show(Math.min(right, Math.max(left, this.cursor)));
    this.figures.replaceChildren(...curves.map(({ label, line }) => el("tr", {}, el("th", { scope: "row" }, label),
      [line.ys[0], line.ys.at(-1), Math.min(...line.ys), Math.max(...line.ys)].map(value =>
        el("td", { class: "number" }, figure(value))))));
  }

  frame(sides) {
    const { spec, left, right, box } = this.state, wide = box.right - box.left;
    return [sides.map(([y, text]) => [
      svg("line", { x1: box.left, x2: box.right, y1: this.sy(y), y2: this.sy(y), stroke: "var(--grid)" }),
      svg("text", { class: "ytick", x: box.left - 6, y: this.sy(y) + 4, "text-anchor": "end" }, text)]),
    ticks(left, right, Math.max(2, Math.floor(wide / 90)), spec.timed).map(([x, text]) =>
      svg("text", { class: "xtick", x: this.sx(x), y: box.bottom + 16, "text-anchor": "middle" }, text)),
    svg("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: "var(--line)" }),
    svg("text", { x: box.right, y: box.bottom + 31, "text-anchor": "end" }, spec.xLabel || "")].flat(2);
  }

  lines(spec) {
    const { box } = this.state;
    return (spec.lines || []).flatMap(({ label, y }) => [
      svg("line", { x1: box.left, x2: box.right, y1: this.sy(y), y2: this.sy(y), stroke: "var(--soft)", "stroke-dasharray": "6 4" }),
      svg("text", { x: box.right, y: this.sy(y) - 5, "text-anchor": "end" }, label)]);
  }

  curve({ raw, line, index }, spec) {
    const path = (xs, ys) => xs.map((x, i) => `${i ? "L" : "M"}${this.sx(x).toFixed(1)} ${this.sy(ys[i]).toFixed(1)}`).join("");
    const ink = colour(index), parts = [];
    if (raw.length > 1 || spec.smooth > 1)
      parts.push(...raw.map(({ xs, ys }) => svg("path", { class: "seed", d: path(xs, ys), fill: "none", stroke: ink, opacity: .35 })));
    if (line.low) parts.push(svg("path", { class: "band", fill: ink, opacity: .16,
      d: path([...line.xs, ...line.xs.toReversed()], [...line.high, ...line.low.toReversed()]) + "Z" }));
    parts.push(svg("path", { class: "curve", d: path(line.xs, line.ys), fill: "none", stroke: ink, "stroke-width": 2.2,
      "stroke-dasharray": DASHES[Math.floor(index / 8) % 4], "stroke-linejoin": "round" }));
    if (raw.length === 1 && line.xs.length < 30) parts.push(...line.xs.map((x, i) =>
      svg("circle", { cx: this.sx(x), cy: this.sy(line.ys[i]), r: 2.6, fill: ink })));
    return parts;
  }

  summary(spec, curves) {
    const ranges = curves.map(({ label, line }) => `${label}: last ${figure(line.ys.at(-1))}, from ${figure(Math.min(...line.ys))} to ${figure(Math.max(...line.ys))}`);
    return `${spec.title} over ${spec.xLabel}. ${ranges.join("; ")}. Use the arrow keys to read values.`;
  }

  point(event) {
    const { left, right, box } = this.state, place = event.clientX - this.plot.getBoundingClientRect().left;
    this.show(left + (Math.min(Math.max(place, box.left), box.right) - box.left) / (box.right - box.left) * (right - left));
  }

  key(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key], { left, right } = this.state;
    if (event.key === "Escape") this.hide();
    if (!way) return;
    event.preventDefault();
    this.show(Math.min(right, Math.max(left, (this.cursor ?? (way > 0 ? left : right)) + way * (right - left) / 50)));
  }

  show(x) {
    const { spec, curves, box } = this.state, px = this.sx(x);
    this.cursor = x;
    this.cross.setAttribute("x1", px); this.cross.setAttribute("x2", px); this.cross.setAttribute("visibility", "visible");
    this.tip.replaceChildren(el("div", { class: "soft" }, `${(spec.timed ? clock : figure)(x)} ${spec.xLabel}`),
      ...curves.map(({ label, line, index }) => el("div", {}, el("span", { class: "key", style: { background: colour(index) } }),
        el("b", {}, figure(at(line, x))), line.low ? el("span", { class: "soft" },
          `${figure(at({ xs: line.xs, ys: line.low }, x))} to ${figure(at({ xs: line.xs, ys: line.high }, x))}`) : null, label)));
    this.tip.hidden = false;
    const over = this.plot.offsetLeft + px, fits = px < (box.left + box.right) / 2;
    Object.assign(this.tip.style, { top: `${this.plot.offsetTop + 8}px`, left: fits ? `${over + 12}px` : "auto",
      right: fits ? "auto" : `${this.node.clientWidth - over + 12}px` });
  }

  hide() {
    this.cursor = null; this.tip.hidden = true;
    if (this.cross) this.cross.setAttribute("visibility", "hidden");
  }
}
