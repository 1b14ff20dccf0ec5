"use strict";
// Panels of charts and their order, shared by the report and the live page. Metrics that never change are folded.

const RETURNS = { "eval/mean_reward": ["Return of greedy evaluations", "reward"], "rollout/ep_rew_mean": ["Return while training", "reward"] };

const PANELS = [  // tag: [title, unit, true if the axis begins at 0]
  ["Speed", {
    "time/fps": ["Throughput of acting", "steps per second", true],
    "time/updates_per_s": ["Throughput of learning", "updates per second", true] }],
  ["Replay", {
    "replay/samples_per_insert": ["Samples per insert", "items per step", true],
    "train/priority": ["Priorities", "mean of the updated priorities", true],
    "replay/beta": ["Importance exponent", "β"], "replay/size": ["Filled", "windows", true],
    "replay/bytes": ["Memory", "bytes", true], "replay/clamped_priorities": ["Clamped priorities", "count", true] }],
  ["Fleet", {
    "fleet/actors": ["Actors alive", "actors", true], "fleet/policy_lag": ["Policy lag", "updates behind the learner", true],
    "actor/policy_lag": ["Updates between weight refreshes", "updates", true],
    "fleet/backpressure_share": ["Held back by the rate limiter", "fraction of the time", true],
    "fleet/inbox": ["Inbox", "messages", true], "fleet/restarts": ["Restarts", "count", true],
    "server/learners": ["Learners alive", "learners", true], "server/staleness": ["Staleness", "versions", true] }],
  ["Exploration", {
    "rollout/exploration_rate": ["Exploration", "ε, mean over the lanes", true],
    "rollout/action_noise": ["Action noise", "σ", true],
    "rollout/arm": ["Arms", "index of the policy followed, mean over the lanes"],
    "rollout/ep_len_mean": ["Episode length", "steps", true] }],
  ["Learning", {
    "train/loss": ["Loss", ""], "train/q_mean": ["Mean q(s, a)", "value"],
    "train/grad_norm": ["Gradient norm", "before clipping", true], "train/td_abs": ["TD error", "mean size", true],
    "train/learning_rate": ["Learning rate", "", true] }],
];

// Noisy metrics can be smoothed. Counts and schedules are exact, and an evaluation is already a mean.
const NOISY = /^(rollout\/(ep_|arm)|time\/|train\/(?!learning_rate)|actor\/|fleet\/(policy_lag|backpressure_share)|server\/(staleness|push_pull_ms)$)/;
// Counters that are logged only after the first event: 0 before.
const SINCE_ZERO = /^(fleet\/restarts|wire\/duplicates|fault\/)/;
const FEWEST_POINTS = 5;  // to call a metric constant

const tagsOf = runs => new Set(runs.flatMap(run => Object.keys(run.series.y)));

// With uniform sampling (replay.alpha = 0) priorities are stored but never used.
const shows = (run, tag) => tag in run.series.y && !(tag === "train/priority" && run.alpha === 0);

function valuesOf(run, tag) {
  let last = 0;
  const ys = run.series.y[tag] || [];
  return SINCE_ZERO.test(tag) ? ys.map(y => { last = y ?? last; return last; }) : ys;
}

const seedOf = (run, tag) => ({ name: run.name, ...points(run.series.x[view.x], valuesOf(run, tag)) });

function curvesOf(data, tag, runs) {
  return data.groups.map((group, index) => ({ label: group.label, index,
    seeds: view.hidden.has(index) ? [] : runs.filter(run => run.group === index).map(run => seedOf(run, tag)) }));
}

function common(data, tag) {  // what the charts of all tags share
  return { xLabel: AXES[view.x], timed: view.x === "time", smooth: NOISY.test(tag) ? view.smooth : 1, range: view.range,
    several: data.groups.length > 1 };
}

function chartOf(data, tag, [title, unit, zero], runs, height) {
  const configured = () => tag === "replay/samples_per_insert" ? runs().filter(run => !view.hidden.has(run.group)) : [];
  const ratios = () => [...new Set(configured().map(run => run.ratio).filter(ratio => ratio > 0))];
  const whole = ["count", "actors", "learners", "messages"].includes(unit);
  const chart = new Chart(() => ({ title, unit, zero, whole, ...common(data, tag),
    lines: ratios().map(y => ({ label: `configured ${figure(y)}`, y })),
    curves: curvesOf(data, tag, runs().filter(run => shows(run, tag))) }), height);
  chart.node.dataset.tag = tag;
  view.charts.push(chart);
  return chart.node;
}

// ---- Constant metrics ----

function knownValues(run, tag) {
  return valuesOf(run, tag).filter(value => value !== null && value !== undefined);
}

function constantTags(runs) {  // tags that never change in any run
  const constant = tag => {
    const known = runs.filter(run => shows(run, tag)).map(run => knownValues(run, tag)).filter(values => values.length);
    return known.some(values => values.length >= FEWEST_POINTS) && known.every(values => values.every(value => value === values[0]));
  };
  return [...tagsOf(runs)].filter(tag => !(tag in RETURNS) && !ARM.test(tag) && constant(tag)).sort();
}

function constantValue(runs, tag) {  // one number, or the range over runs
  const values = runs.filter(run => shows(run, tag)).flatMap(run => knownValues(run, tag).slice(0, 1));
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return !values.length ? null : low === high ? figure(low) : `${figure(low)} to ${figure(high)}`;
}

function constantCell(data, runs, tag) {
  const values = data.groups.map((group, index) => constantValue(runs.filter(run => run.group === index), tag));
  const known = values.filter(value => value !== null);
  if (new Set(known).size === 1 && known.length === values.length) return known[0];
  return values.map((value, index) => value === null ? null :
    el("div", { "data-group": index }, el("span", { class: "soft" }, `${data.groups[index].label}: `), value));
}

function constantSection(data, runs, tags) {
  if (!tags.length) return null;
  const titles = Object.assign({}, ...PANELS.map(([, panel]) => panel)), heads = ["metric", "tag", "value"];
  const row = tag => el("tr", { "data-constant": tag }, el("th", { scope: "row" }, titles[tag]?.[0] || ""),
    el("td", { class: "mono" }, tag), el("td", {}, constantCell(data, runs, tag)));
  return section("Constant metrics", el("details", { id: "constants" },
    el("summary", {}, `${tags.length} metric${tags.length > 1 ? "s" : ""} that never changed`),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map(text =>
      el("th", { scope: "col" }, text)))), el("tbody", {}, tags.map(row))))));
}

function panelSections(data, runs, constant = constantTags(runs())) {  // panels with data; the fleet only if there is one
  const fleet = [...tagsOf(runs())].some(tag => /^(fleet|server)\//.test(tag));
  const drawn = tag => !constant.includes(tag) && runs().some(run => shows(run, tag));
  return PANELS.filter(([title]) => title !== "Fleet" || fleet).map(([title, tags]) => {
    const charts = Object.entries(tags).filter(([tag]) => drawn(tag)).map(([tag, look]) => chartOf(data, tag, look, runs));
    const armed = runs().filter(run => title === "Exploration" && Object.keys(run.series.y).some(tag => ARM.test(tag)));
    return [title, [...charts, ...armed.map(armMap)]];
  }).filter(([, nodes]) => nodes.length);
}
