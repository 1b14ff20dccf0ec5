"use strict";
// Panels, controls and their order, shared by the report and the live page.

const AXES = { steps: "environment steps", frames: "frames", updates: "updates", episodes: "episodes", time: "wall time" };

const RETURNS = { "eval/mean_reward": ["Return of greedy evaluations", "reward"], "rollout/ep_rew_mean": ["Return while training", "reward"] };

const PANELS = [
  ["Speed", { "time/fps": ["Throughput of acting", "steps per second", true], "time/updates_per_s": ["Throughput of learning", "updates per second", true] }],
  ["Replay", { "replay/samples_per_insert": ["Samples per insert", "items per step", true], "train/priority": ["Priorities", "mean of the updated priorities", true],
    "replay/beta": ["Importance exponent", "β"], "replay/size": ["Filled", "windows", true], "replay/bytes": ["Memory", "bytes", true],
    "replay/clamped_priorities": ["Clamped priorities", "count", true] }],
  ["Fleet", { "fleet/actors": ["Actors alive", "actors", true], "fleet/policy_lag": ["Policy lag", "updates behind the learner", true],
    "actor/policy_lag": ["Updates between weight refreshes", "updates", true], "fleet/backpressure_share": ["Held back by the rate limiter", "fraction of the time", true],
    "fleet/inbox": ["Inbox", "messages", true], "fleet/restarts": ["Restarts", "count", true], "server/learners": ["Learners alive", "learners", true],
    "server/staleness": ["Staleness", "versions", true] }],
  ["Exploration", { "rollout/exploration_rate": ["Exploration", "ε, mean over the lanes", true], "rollout/action_noise": ["Action noise", "σ", true],
    "rollout/arm": ["Arms", "index of the policy followed, mean over the lanes"], "rollout/ep_len_mean": ["Episode length", "steps", true] }],
  ["Learning", { "train/loss": ["Loss", ""], "train/q_mean": ["Mean q(s, a)", "value"], "train/grad_norm": ["Gradient norm", "before clipping", true],
    "train/td_abs": ["TD error", "mean size", true], "train/learning_rate": ["Learning rate", "", true] }],
];

const LIMITS = ["env", "inference", "wire", "decode", "learner", "server", "pace", "evaluation", "checkpoints", "storing"];
const LIMIT_WORDS = { env: "the environment", inference: "choosing actions", wire: "storing and sending", storing: "storing", decode: "drawing samples", learner: "updates",
  server: "communication with the parameter server", pace: "both sides wait for each other", evaluation: "evaluations", checkpoints: "checkpoints" };
const limitColour = limit => LIMITS.includes(limit) ? `var(--l${LIMITS.indexOf(limit)})` : "var(--line)";

// Noisy metrics can be smoothed. Counts and schedules are exact, and an evaluation is already a mean.
const NOISY = /^(rollout\/(ep_|arm)|time\/|train\/(?!learning_rate)|actor\/|fleet\/(policy_lag|backpressure_share)|server\/(staleness|push_pull_ms)$)/;
// Counters that are logged only after the first event: 0 before.
const SINCE_ZERO = /^(fleet\/restarts|wire\/duplicates|fault\/)/;

const view = { x: "steps", smooth: 1, hidden: new Set(), charts: [] };
const redraw = () => view.charts.forEach(chart => chart.draw());
const tagsOf = runs => new Set(runs.flatMap(run => Object.keys(run.series.y)));

// With uniform sampling (replay.alpha = 0) priorities are stored but never used.
const shows = (run, tag) => tag in run.series.y && !(tag === "train/priority" && run.alpha === 0);

function seedOf(run, tag) {
  let ys = run.series.y[tag] || [], last = 0;
  if (SINCE_ZERO.test(tag)) ys = ys.map(y => { last = y ?? last; return last; });
  return { name: run.name, ...points(run.series.x[view.x], ys) };
}

function curvesOf(data, tag, runs) {
  return data.groups.map((group, index) => ({ label: group.label, index,
    seeds: view.hidden.has(index) ? [] : runs.filter(run => run.group === index).map(run => seedOf(run, tag)) }));
}

const axis = tag => ({ xLabel: AXES[view.x], timed: view.x === "time", smooth: NOISY.test(tag) ? view.smooth : 1 });

function chartOf(data, tag, [title, unit, zero], runs, height) {
  const ratios = tag === "replay/samples_per_insert" ? [...new Set(runs().map(run => run.ratio).filter(ratio => ratio > 0))] : [];
  const whole = ["count", "actors", "learners", "messages"].includes(unit);
  const chart = new Chart(() => ({ title, unit, zero, whole, ...axis(tag), lines: ratios.map(y => ({ label: `configured ${figure(y)}`, y })),
    curves: curvesOf(data, tag, runs().filter(run => shows(run, tag))) }), height);
  chart.node.dataset.tag = tag;
  view.charts.push(chart);
  return chart.node;
}

function choice(name, options, chosen, change) {
  return el("fieldset", { class: "choice" }, el("legend", {}, name), Object.entries(options).map(([value, text]) =>
    el("label", {}, el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => change(value) }), text)));
}

function axisChoice() {
  return choice("x axis", { steps: "steps", frames: "frames", updates: "updates", time: "wall time" }, view.x, value => { view.x = value; redraw(); strips.forEach(draw => draw()); });
}

function smoothing() {
  return el("label", { class: "small soft" }, "Smoothing: ", el("select", { id: "smoothing", onchange: event => { view.smooth = +event.target.value; redraw(); } },
    [1, 5, 15, 51].map(width => el("option", { value: width, selected: width === view.smooth }, width === 1 ? "off" : `${width} points`))));
}

function themeButton() {
  const root = document.documentElement, order = ["auto", "light", "dark"];
  const keep = mode => { try { localStorage.setItem("qfleet-theme", mode); } catch { /* without storage the choice is not kept */ } };
  let mode = "auto";
  try { mode = localStorage.getItem("qfleet-theme") || "auto"; } catch { /* no storage */ }
  const button = el("button", { type: "button", id: "theme", onclick: () => { mode = order[(order.indexOf(mode) + 1) % 3]; keep(mode); apply(); } });
  const apply = () => { root.dataset.theme = mode; button.textContent = `Theme: ${mode}`; };
  apply();
  return button;
}

const strips = [];
function limitStrip(run) {  // bottleneck over the chosen axis
  const place = el("div", { class: "strip" });
  const draw = () => {
    const xs = run.series.x[view.x], end = Math.max(0, ...xs.map(x => x || 0)), parts = [], spans = {};
    let from = 0;
    run.series.limits.forEach((limit, i) => {
      if (i + 1 < xs.length && run.series.limits[i + 1] === limit) return;
      const to = Math.max(from, xs[i] || 0);
      if (limit && to > from) {
        parts.push({ limit, from, to });
        spans[limit] = (spans[limit] || 0) + to - from;
      }
      from = to;
    });
    place.replaceChildren(...(parts.length ? [stripOf(run, parts, end), scaleOf(end), sharesOf(spans)] : [el("p", { class: "small soft" }, `no data over ${AXES[view.x]}`)]));
  };
  strips.push(draw); draw();
  return place;
}

function stripOf(run, parts, end) {
  const text = view.x === "time" ? clock : figure;
  return svg("svg", { viewBox: "0 0 1000 18", preserveAspectRatio: "none", height: 18, width: "100%", role: "img", "aria-label": `bottleneck of ${run.name}` },
    parts.map(({ limit, from, to }) => svg("rect", { "data-limit": limit, x: from / end * 1000, width: (to - from) / end * 1000, y: 0, height: 18, fill: limitColour(limit) },
      svg("title", {}, `${limit}, ${LIMIT_WORDS[limit] || ""}: ${text(from)} to ${text(to)} ${AXES[view.x]}`))));
}

function scaleOf(end) {
  return el("div", { class: "scale" }, ticks(0, end, 4, view.x === "time").map(([x, text]) =>
    el("span", { style: { left: `${100 * x / end}%`, transform: `translateX(-${100 * x / end}%)` } }, text)), el("p", {}, AXES[view.x]));
}

function sharesOf(spans) {
  const total = Object.values(spans).reduce((sum, span) => sum + span, 0);
  return el("p", { class: "small soft shares" }, Object.entries(spans).sort((a, b) => b[1] - a[1]).map(([limit, span]) => el("span", { title: LIMIT_WORDS[limit] },
    el("span", { class: "key", style: { background: limitColour(limit) } }), ` ${limit} ${Math.round(100 * span / total)} %`)));
}

const ARM = /^arms\/\d+$/, MOST_COLUMNS = 100;
function armMap(run) {  // share of lanes that follow each policy (arm) over the chosen axis: darker is more
  const place = el("div", { class: "strip" }), numbers = el("p", { class: "small soft" });
  const draw = () => {
    const tags = Object.keys(run.series.y).filter(tag => ARM.test(tag)).sort((a, b) => a.slice(5) - b.slice(5)), cells = armCells(run, tags);
    const end = Math.max(0, ...run.series.x[view.x].map(x => x || 0)), most = Math.max(...cells.map(cell => cell.share), 1e-9), high = 200 / tags.length;
    place.replaceChildren(...(end && cells.length ? [svg("svg", { viewBox: "0 0 1000 200", preserveAspectRatio: "none", height: 200, width: "100%", role: "img", "aria-label": `arms that ${run.name} followed` },
      cells.map(({ arm, from, to, share }) => svg("rect", { "data-arm": arm, "data-share": share, x: from / end * 1000, width: (to - from) / end * 1000, y: arm * high, height: high, fill: "var(--c0)", "fill-opacity": Math.sqrt(share / most) },
        svg("title", {}, `arm ${arm}: ${Math.round(100 * share)} % of the lanes, up to ${view.x === "time" ? clock(to) : figure(to)} ${AXES[view.x]}`)))), scaleOf(end)]
      : [el("p", { class: "small soft" }, `no data over ${AXES[view.x]}`)]));
    node.hidden = view.hidden.has(run.group);
    const until = Math.max(...cells.map(cell => cell.to)), last = cells.filter(cell => cell.to === until).sort((a, b) => b.share - a.share).slice(0, 3);
    numbers.textContent = `Arm 0 is at the top, arm ${tags.length - 1} at the bottom.` +
      (last.length ? ` Followed most at the end: ${last.map(({ arm, share }) => `arm ${arm} (${Math.round(100 * share)} %)`).join(", ")}.` : "");
  };
  view.charts.push({ draw });
  const node = el("figure", { class: "card arms", "data-run": run.name }, el("h3", {}, `Share of the lanes that follow each arm: ${run.name}`), place, numbers);
  return node;
}

function armCells(run, tags) {  // merges neighbouring points into a column if there are many, or if values are missing
  const xs = run.series.x[view.x], width = Math.max(1, Math.ceil(xs.length / MOST_COLUMNS)), cells = [];
  for (let start = 0, from = 0; start < xs.length; start += width) {
    const some = xs.map((_, i) => i).slice(start, start + width).filter(i => run.series.y[tags[0]][i] !== null), to = Math.max(from, ...some.map(i => xs[i] || 0));
    if (!some.length) continue;
    tags.forEach((tag, arm) => {
      const known = some.map(i => run.series.y[tag][i]).filter(share => share !== null), share = known.reduce((sum, each) => sum + each, 0) / (known.length || 1);
      if (share > 0 && to > from) cells.push({ arm, from, to, share });
    });
    from = to;
  }
  return cells;
}

function section(title, ...content) {
  const id = title.toLowerCase().replace(/\W+/g, "-");
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), content);
}

function panelSections(data, runs) {  // panels with data; the fleet panel only if there is a fleet
  const known = tagsOf(runs()), fleet = [...known].some(tag => /^(fleet|server)\//.test(tag));
  return PANELS.filter(([title]) => title !== "Fleet" || fleet)
    .map(([title, tags]) => [title, Object.entries(tags).filter(([tag]) => runs().some(run => shows(run, tag)))])
    .filter(([, tags]) => tags.length).map(([title, tags]) => [title, [...tags.map(([tag, look]) => chartOf(data, tag, look, runs)),
      ...(title === "Exploration" ? runs().filter(run => Object.keys(run.series.y).some(tag => ARM.test(tag))).map(armMap) : [])]]);
}
