"use strict";
// Charts as SVG: runs that differ only in seed are a line with a band. Dragging zooms, a double click shows all again.

const DRAG_PX = 6, MOST_IN_TIP = 12, MARKERS_ON_CURVE = 7;
let clips = 0;

class Chart {
  // spec(): {title, unit, xLabel, timed, smooth, zero, whole, range, several, lines: [{label, y}],
  //          curves: [{label, index, seeds: [{name, xs, ys}]}]}
  constructor(spec, height = 230) {
    this.spec = spec; this.height = height; this.cursor = null; this.start = null; this.clip = `clip-${clips++}`;
    this.title = el("h3"); this.exports = exportButtons(this);
    this.plot = el("div", { class: "plot", ondblclick: () => zoom(null) });
    this.tip = el("div", { class: "tip", hidden: true }); this.figures = el("tbody");
    const heads = ["", "first", "last", "min", "max"];
    this.node = el("figure", { class: "card" }, el("div", { class: "head" }, this.title, this.exports), this.plot, this.tip,
      el("details", {}, el("summary", {}, "Values"), el("div", { class: "values" },
        el("table", {}, el("thead", {}, el("tr", {}, heads.map(name =>
          el("th", { class: name && "number", scope: "col" }, name)))), this.figures))));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  curves(spec) {  // `whole` is the line over all x, `line` its visible part
    return spec.curves.map(curve => {
      const raw = curve.seeds.filter(seed => seed.xs.length), smooth = spec.smooth || 1;
      const whole = raw.length > 1 ? banded(raw, smooth) : raw.map(({ xs, ys }) => ({ xs, ys: smoothed(ys, smooth) }))[0];
      return { ...curve, raw, whole };
    }).filter(curve => curve.raw.length).map(curve => ({ ...curve, line: within(curve.whole, spec.range) }));
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const spec = this.spec(), curves = this.curves(spec), shown = curves.some(curve => curve.line.xs.length);
    const note = [spec.unit, spec.smooth > 1 ? `mean of ${spec.smooth} points` : ""].filter(Boolean).join(", ");
    this.title.replaceChildren(spec.title, " ", el("span", { class: "soft small" }, note));
    this.node.dataset.points = curves.reduce((sum, curve) => sum + curve.raw.reduce((n, seed) => n + seed.xs.length, 0), 0);
    this.exports.hidden = !shown;
    if (!shown) {
      this.state = null; this.hide(); this.figures.replaceChildren();
      this.plot.replaceChildren(el("div", { class: "empty" }, curves.length ? "no data in this range" : "no data"));
      return;
    }
    this.scale(spec, curves, width);
    this.render(spec, curves, width);
    this.figures.replaceChildren(...curves.filter(({ line }) => line.xs.length).map(({ label, line }) =>
      el("tr", {}, el("th", { scope: "row" }, label),
        [line.ys[0], line.ys.at(-1), Math.min(...line.ys), Math.max(...line.ys)].map(value =>
          el("td", { class: "number" }, figure(value))))));
  }

  scale(spec, curves, width) {
    const seen = curves.flatMap(curve => curve.raw.map(seed => within(seed, spec.range)));
    const values = [...seen, ...curves.map(curve => curve.line)].flatMap(({ ys }) => ys)
      .concat((spec.lines || []).map(line => line.y), spec.zero ? [0] : []);
    const places = spec.range || seen.flatMap(({ xs }) => [xs[0], xs.at(-1)]);
    let [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    const pad = (high - low || Math.abs(high) || 1) * .06;
    [low, high] = [spec.zero && low >= 0 ? 0 : low - pad, high + pad];
    let [left, right] = [Math.min(...places), Math.max(...places)];
    if (left === right) [left, right] = [left - 1, right + 1];
    const sides = ticks(low, high, spec.whole && high - low < 6 ? Math.ceil(high - low) : 5);
    const room = 16 + 6.6 * Math.max(3, ...sides.map(([, text]) => text.length));
    const box = { left: room, right: width - 10, top: 10, bottom: this.height - 34 };
    this.sx = x => box.left + (x - left) / (right - left) * (box.right - box.left);
    this.sy = y => box.bottom - (y - low) / (high - low) * (box.bottom - box.top);
    this.state = { spec, curves, left, right, box, sides };
  }

  render(spec, curves, width) {
    const { left, right, box } = this.state, tall = box.bottom - box.top;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${this.height}`, height: this.height, role: "img", tabindex: "0",
      "aria-label": this.summary(spec, curves), onpointermove: event => this.move(event), onpointerleave: () => this.hide(),
      onpointerdown: event => this.press(event), onpointerup: event => this.release(event),
      onpointercancel: () => this.drop(), onkeydown: event => this.key(event) },
      svg("clipPath", { id: this.clip }, svg("rect", { x: box.left - 1, y: box.top - 8, width: box.right - box.left + 10, height: tall + 10 })),
      this.frame(), this.lines(spec), svg("g", { "clip-path": `url(#${this.clip})` }, curves.map(curve => this.curve(curve, spec))));
    this.cross = svg("line", { y1: box.top, y2: box.bottom, stroke: "var(--soft)", "stroke-dasharray": "3 3", visibility: "hidden" });
    this.band = svg("rect", { class: "selected", y: box.top, height: tall, fill: "var(--accent)", opacity: .15, visibility: "hidden" });
    picture.append(this.cross, this.band);
    const held = this.plot.contains(document.activeElement);
    this.plot.replaceChildren(picture);
    if (held) picture.focus({ preventScroll: true });
    if (this.cursor !== null) this.show(Math.min(right, Math.max(left, this.cursor)));
  }

  frame() {
    const { spec, left, right, box, sides } = this.state, wide = box.right - box.left;
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

  curve({ raw, line, whole, index }, spec) {
    if (!line.xs.length) return [];
    const path = (xs, ys) => xs.map((x, i) => `${i ? "L" : "M"}${this.sx(x).toFixed(1)} ${this.sy(ys[i]).toFixed(1)}`).join("");
    const ink = colour(index), parts = [];
    if (raw.length > 1 || spec.smooth > 1)
      parts.push(...raw.map(seed => within(seed, spec.range)).filter(({ xs }) => xs.length).map(({ xs, ys }) =>
        svg("path", { class: "seed", d: path(xs, ys), fill: "none", stroke: ink, opacity: .35 })));
    if (line.low) parts.push(svg("path", { class: "band", fill: ink, opacity: .16,
      d: path([...line.xs, ...line.xs.toReversed()], [...line.high, ...line.low.toReversed()]) + "Z" }));
    parts.push(svg("path", { class: "curve", d: path(line.xs, line.ys), fill: "none", stroke: ink, "stroke-width": 2.2,
      "stroke-dasharray": dashes(index), "stroke-linejoin": "round" }));
    if (spec.several) parts.push(...this.markers(line, index));
    else if (raw.length === 1 && whole.xs.length < 30) parts.push(...line.xs.map((x, i) =>
      svg("circle", { cx: this.sx(x), cy: this.sy(line.ys[i]), r: 2.6, fill: ink })));
    return parts;
  }

  markers(line, index) {  // a few on each curve; those of different configurations at different places
    const { left, right } = this.state, step = (right - left) / MARKERS_ON_CURVE, first = left + step * (.3 + index * .13 % .6);
    const places = Array.from({ length: MARKERS_ON_CURVE }, (_, i) => first + i * step).filter(x => at(line, x) !== null);
    return (places.length ? places : [line.xs.at(-1)]).map(x => marker(index, this.sx(x), this.sy(at(line, x))));
  }

  summary(spec, curves) {
    const ranges = curves.filter(({ line }) => line.ys.length).map(({ label, line }) =>
      `${label}: last ${figure(line.ys.at(-1))}, from ${figure(Math.min(...line.ys))} to ${figure(Math.max(...line.ys))}`);
    return `${spec.title} over ${spec.xLabel}. ${ranges.join("; ")}. Arrow keys read values, plus and minus zoom, 0 shows all.`;
  }

  // ---- Pointer and keyboard ----

  place(event) {  // x in pixels, inside of the frame
    const { box } = this.state, px = event.clientX - this.plot.getBoundingClientRect().left;
    return Math.min(Math.max(px, box.left), box.right);
  }

  value(px) {
    const { left, right, box } = this.state;
    return left + (px - box.left) / (box.right - box.left) * (right - left);
  }

  press(event) {
    if (event.button) return;
    this.start = this.place(event);
    try { event.currentTarget.setPointerCapture(event.pointerId); } catch { /* a pointer that has been released */ }
    this.move(event);
  }

  move(event) {
    if (this.start !== null && !event.buttons) this.drop();  // released outside of the chart, after it was redrawn
    const px = this.place(event), drags = this.start !== null && Math.abs(px - this.start) > DRAG_PX;
    this.band.setAttribute("visibility", drags ? "visible" : "hidden");
    if (drags) {
      this.band.setAttribute("x", Math.min(px, this.start));
      this.band.setAttribute("width", Math.abs(px - this.start));
    }
    this.show(this.value(px));
  }

  release(event) {
    const [from, to] = [this.start, this.place(event)];
    this.drop();
    if (from !== null && Math.abs(to - from) > DRAG_PX) zoom([this.value(Math.min(from, to)), this.value(Math.max(from, to))]);
  }

  drop() {
    this.start = null;
    this.band.setAttribute("visibility", "hidden");
  }

  key(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key], { left, right } = this.state;
    const half = { "+": .25, "=": .25, "-": 1 }[event.key];
    if (event.key === "Escape") this.hide();
    if (event.key === "0") zoom(null);
    if (half) this.magnify(half);
    if (!way) return;
    event.preventDefault();
    this.show(Math.min(right, Math.max(left, (this.cursor ?? (way > 0 ? left : right)) + way * (right - left) / 50)));
  }

  magnify(half) {  // around the cursor, never beyond the data
    const { left, right, curves } = this.state, span = (right - left) * half;
    const ends = curves.flatMap(({ raw }) => raw.flatMap(({ xs }) => [xs[0], xs.at(-1)]));
    const [first, last] = [Math.min(...ends), Math.max(...ends)];
    const centre = Math.min(last, Math.max(first, this.cursor ?? (left + right) / 2));  // a zoom may show more than the data
    const range = [Math.max(first, centre - span), Math.min(last, centre + span)];
    zoom(range[0] <= first && range[1] >= last ? null : range);
  }

  show(x) {
    const { spec, curves, box } = this.state, px = this.sx(x);
    this.cursor = x;
    this.cross.setAttribute("x1", px); this.cross.setAttribute("x2", px); this.cross.setAttribute("visibility", "visible");
    const known = curves.filter(({ line }) => at(line, x) !== null).sort((a, b) => at(b.line, x) - at(a.line, x));
    this.tip.replaceChildren(el("div", { class: "soft" }, `${(spec.timed ? clock : figure)(x)} ${spec.xLabel}`),
      ...known.slice(0, MOST_IN_TIP).map(({ label, line, index }) => el("div", {}, lineSample(index, spec.several),
        el("b", {}, figure(at(line, x))), line.low ? el("span", { class: "soft" },
          `${figure(at({ xs: line.xs, ys: line.low }, x))} to ${figure(at({ xs: line.xs, ys: line.high }, x))}`) : null, label)),
      ...(known.length > MOST_IN_TIP ? [el("div", { class: "soft" }, `and ${known.length - MOST_IN_TIP} below these`)] : []));
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
