"use strict";
// How configurations look, and the arithmetic of curves: smoothing, bands, the part of a curve that is zoomed to.

const COLOURS = 8;
const DASHES = ["", "8 4", "2 3", "10 3 2 3", "14 4", "4 2 2 2"];
const MARKERS = ["circle", "square", "triangle", "diamond", "cross", "wedge", "plus", "bar"];

// Colour, dash pattern and marker of a configuration. All three differ within the first eight but for the dash pattern;
// after eight the dash pattern changes and the markers are shifted, so that 48 configurations look different.
const colour = index => `var(--c${index % COLOURS})`;
const dashes = index => DASHES[Math.floor(index / COLOURS) % DASHES.length];
const markerOf = index => MARKERS[(index + Math.floor(index / COLOURS)) % MARKERS.length];

function marker(index, x, y, size = 3.6) {
  const [r, q] = [size, size * .8], shapes = {
    circle: `M${-r} 0A${r} ${r} 0 1 1 ${r} 0A${r} ${r} 0 1 1 ${-r} 0Z`,
    square: `M${-q} ${-q}H${q}V${q}H${-q}Z`,
    triangle: `M0 ${-r}L${r} ${q}H${-r}Z`,
    wedge: `M0 ${r}L${r} ${-q}H${-r}Z`,
    diamond: `M0 ${-r * 1.2}L${r * 1.2} 0L0 ${r * 1.2}L${-r * 1.2} 0Z`,
    cross: `M${-q} ${-q}L${q} ${q}M${-q} ${q}L${q} ${-q}`,
    plus: `M${-r} 0H${r}M0 ${-r}V${r}`,
    bar: `M0 ${-r * 1.3}V${r * 1.3}`,
  };
  const open = ["cross", "plus", "bar"].includes(markerOf(index)), ink = colour(index);
  return svg("path", { class: "marker", d: shapes[markerOf(index)], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
    fill: open ? "none" : ink, stroke: ink, "stroke-width": open ? 2 : 1 });
}

function lineSample(index, several = true) {  // for legends: a piece of the curve with its marker
  return svg("svg", { class: "sample", width: 34, height: 12, "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 33, y1: 6, y2: 6, stroke: colour(index), "stroke-width": 2.4, "stroke-dasharray": dashes(index) }),
    several ? marker(index, 17, 6) : null);
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
  const all = [...new Set([start, end, ...seeds.flatMap(seed => seed.xs)])];
  const known = all.filter(x => x >= start && x <= end).sort((a, b) => a - b);
  const parts = Math.max(1, Math.ceil(300 / known.length));
  const between = (x, i) => Array.from({ length: parts }, (_, k) => x + (known[i + 1] - x) * k / parts);
  const xs = known.flatMap((x, i) => i + 1 < known.length ? between(x, i) : [x]);
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

function within(line, range) {  // the part of a curve in a range of x, with its values at both ends
  if (!range || !line.xs.length) return line;
  const [start, end] = [Math.max(range[0], line.xs[0]), Math.min(range[1], line.xs.at(-1))];
  if (start > end) return { xs: [], ys: [], ...(line.low ? { low: [], high: [] } : {}) };
  const xs = [...new Set([start, ...line.xs.filter(x => x > start && x < end), end])];
  const part = values => xs.map(x => at({ xs: line.xs, ys: values }, x));
  return { xs, ys: part(line.ys), ...(line.low ? { low: part(line.low), high: part(line.high) } : {}) };
}
