"use strict";
// Maps over the x axis: what limited a run, and which policies (arms) its lanes followed.

const LIMITS = ["env", "inference", "wire", "decode", "learner", "server", "pace", "evaluation", "checkpoints", "storing"];
const LIMIT_WORDS = { env: "the environment", inference: "choosing actions", wire: "storing and sending",
  storing: "storing", decode: "drawing samples", learner: "updates", server: "communication with the parameter server",
  pace: "both sides wait for each other", evaluation: "evaluations", checkpoints: "checkpoints" };
const limitColour = limit => LIMITS.includes(limit) ? `var(--l${LIMITS.indexOf(limit)})` : "var(--line)";

const MAP = { viewBox: "0 0 1000 18", preserveAspectRatio: "none", height: 18, width: "100%", role: "img" };
const placeText = x => `${(view.x === "time" ? clock : figure)(x)} ${AXES[view.x]}`;

function limitStrip(run) {  // bottleneck over the chosen axis
  const place = el("div", { class: "strip" });
  const draw = () => {
    const xs = run.series.x[view.x], end = Math.max(0, ...xs.map(x => x || 0)), parts = limitParts(run, xs), spans = {};
    parts.forEach(({ limit, from, to }) => { spans[limit] = (spans[limit] || 0) + to - from; });
    place.replaceChildren(...(parts.length ? [stripOf(run, parts, end), scaleOf(end), sharesOf(spans)]
      : [el("p", { class: "small soft" }, `no data over ${AXES[view.x]}`)]));
  };
  view.charts.push({ draw });
  return place;
}

function limitParts(run, xs) {  // neighbours with the same bottleneck are one part
  const parts = [];
  let from = 0;
  run.series.limits.forEach((limit, i) => {
    if (i + 1 < xs.length && run.series.limits[i + 1] === limit) return;
    const to = Math.max(from, xs[i] || 0);
    if (limit && to > from) parts.push({ limit, from, to });
    from = to;
  });
  return parts;
}

function stripOf(run, parts, end) {
  return svg("svg", { ...MAP, "aria-label": `bottleneck of ${run.name}` }, parts.map(({ limit, from, to }) =>
    svg("rect", { "data-limit": limit, x: from / end * 1000, width: (to - from) / end * 1000, y: 0, height: 18, fill: limitColour(limit) },
      svg("title", {}, `${limit}, ${LIMIT_WORDS[limit] || ""}: ${placeText(from)} to ${placeText(to)}`))));
}

function scaleOf(end) {
  const style = x => ({ left: `${100 * x / end}%`, transform: `translateX(-${100 * x / end}%)` });
  return el("div", { class: "scale" }, ticks(0, end, 4, view.x === "time").map(([x, text]) =>
    el("span", { style: style(x) }, text)), el("p", {}, AXES[view.x]));
}

function sharesOf(spans) {
  const total = Object.values(spans).reduce((sum, span) => sum + span, 0);
  return el("p", { class: "small soft shares" }, Object.entries(spans).sort((a, b) => b[1] - a[1]).map(([limit, span]) =>
    el("span", { title: LIMIT_WORDS[limit] }, el("span", { class: "key", style: { background: limitColour(limit) } }),
      ` ${limit} ${percent(span / total)}`)));
}

// ---- Arms ----

const ARM = /^arms\/\d+$/, MOST_COLUMNS = 100, ARMS_HEIGHT = 200;

function armMap(run) {  // share of lanes that follow each policy (arm) over the chosen axis: darker is more
  const place = el("div", { class: "strip" }), numbers = el("p", { class: "small soft" });
  const draw = () => {
    const tags = Object.keys(run.series.y).filter(tag => ARM.test(tag)).sort((a, b) => a.slice(5) - b.slice(5));
    const cells = armCells(run, tags), end = Math.max(0, ...run.series.x[view.x].map(x => x || 0));
    place.replaceChildren(...(end && cells.length ? [armPicture(run, cells, end, tags.length), scaleOf(end)]
      : [el("p", { class: "small soft" }, `no data over ${AXES[view.x]}`)]));
    numbers.textContent = `Arm 0 is at the top, arm ${tags.length - 1} at the bottom.${armsAtEnd(cells)}`;
  };
  view.charts.push({ draw });
  return el("figure", { class: "card arms", "data-run": run.name, "data-group": run.group },
    el("h3", {}, `Share of the lanes that follow each arm: ${run.name}`), place, numbers);
}

function armPicture(run, cells, end, arms) {
  const most = Math.max(...cells.map(cell => cell.share), 1e-9), high = ARMS_HEIGHT / arms;
  const size = { ...MAP, viewBox: `0 0 1000 ${ARMS_HEIGHT}`, height: ARMS_HEIGHT };
  return svg("svg", { ...size, "aria-label": `arms that ${run.name} followed` }, cells.map(({ arm, from, to, share }) =>
    svg("rect", { "data-arm": arm, "data-share": share, x: from / end * 1000, width: (to - from) / end * 1000, y: arm * high, height: high,
      fill: "var(--c0)", "fill-opacity": Math.sqrt(share / most) },
    svg("title", {}, `arm ${arm}: ${percent(share)} of the lanes, up to ${placeText(to)}`))));
}

function armsAtEnd(cells) {
  const until = Math.max(...cells.map(cell => cell.to));
  const last = cells.filter(cell => cell.to === until).sort((a, b) => b.share - a.share).slice(0, 3);
  const words = last.map(({ arm, share }) => `arm ${arm} (${percent(share)})`);
  return words.length ? ` Followed most at the end: ${words.join(", ")}.` : "";
}

function armCells(run, tags) {  // merges neighbouring points into a column if there are many, or if values are missing
  const xs = run.series.x[view.x], width = Math.max(1, Math.ceil(xs.length / MOST_COLUMNS)), cells = [];
  for (let start = 0, from = 0; start < xs.length; start += width) {
    const some = xs.map((_, i) => i).slice(start, start + width).filter(i => run.series.y[tags[0]][i] !== null);
    const to = Math.max(from, ...some.map(i => xs[i] || 0));
    if (!some.length) continue;
    tags.forEach((tag, arm) => {
      const known = some.map(i => run.series.y[tag][i]).filter(share => share !== null);
      const share = known.reduce((sum, each) => sum + each, 0) / (known.length || 1);
      if (share > 0 && to > from) cells.push({ arm, from, to, share });
    });
    from = to;
  }
  return cells;
}
