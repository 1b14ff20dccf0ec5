"use strict";
// What a page of runs shows, and in which order: shared by the report and the live page.

const AXES = { steps: "environment steps", frames: "frames", updates: "updates", episodes: "episodes", time: "wall time" };

const RETURNS = { "eval/mean_reward": ["Return of greedy evaluations", "reward"], "rollout/ep_rew_mean": ["Return while training", "reward"] };

const PANELS = [
  ["Speed", { "time/fps": ["Throughput of acting", "steps per second", true], "time/updates_per_s": ["Throughput of learning", "updates per second", true] }],
  ["Replay", { "replay/samples_per_insert": ["Samples per insert", "items per step", true], "train/priority": ["Priorities", "mean of what goes back to the replay", true],
    "replay/beta": ["Importance exponent", "β"], "replay/size": ["Filled", "windows", true], "replay/bytes": ["Memory", "bytes", true],
    "replay/clamped_priorities": ["Clamped priorities", "count", true] }],
  ["Fleet", { "fleet/actors": ["Actors alive", "actors", true], "fleet/policy_lag": ["Policy lag", "updates behind the learner", true],
    "actor/policy_lag": ["Distance between fetched weights", "updates", true], "fleet/held_share": ["Held back by pace", "share of the time", true],
    "fleet/inbox": ["Inbox", "messages", true], "fleet/restarts": ["Restarts", "count", true], "server/cells": ["Cells alive", "cells", true],
    "server/staleness": ["Staleness", "versions", true] }],
  ["Exploration", { "rollout/exploration_rate": ["Exploration", "ε, mean over the lanes", true], "rollout/action_noise": ["Action noise", "σ", true],
    "rollout/arm": ["Arms", "index of the policy followed, mean over the lanes"], "rollout/ep_len_mean": ["Episode length", "steps", true] }],
  ["Learning", { "train/loss": ["Loss", ""], "train/q_mean": ["Mean q(s, a)", "value"], "train/grad_norm": ["Gradient norm", "before clipping", true],
    "train/td_abs": ["TD error", "mean size", true], "train/learning_rate": ["Learning rate", "", true] }],
];

const LIMITS = { env: 2, inference: 5, wire: 4, decode: 3, learner: 0, server: 7, pace: 6, evaluation: 1, checkpoints: 3 };
const LIMIT_WORDS = { env: "environment", inference: "choosing actions", wire: "wire", decode: "drawing samples", learner: "updates",
  server: "parameter server", pace: "pace", evaluation: "evaluations", checkpoints: "checkpoints" };

const view = { x: "steps", smooth: 5, hidden: new Set(), charts: [] };
const redraw = () => view.charts.forEach(chart => chart.draw());
const tagsOf = runs => new Set(runs.flatMap(run => Object.keys(run.series.y)));

function curvesOf(data, tag, runs) {
  return data.groups.map((group, index) => ({ label: group.label, index, seeds: view.hidden.has(index) ? [] : runs.filter(run => run.group === index)
    .map(run => ({ name: run.name, ...points(run.series.x[view.x], run.series.y[tag] || []) })) }));
}

function chartOf(data, tag, [title, unit, zero], runs, height) {
  const ratios = tag === "replay/samples_per_insert" ? [...new Set(runs().map(run => run.ratio).filter(ratio => ratio > 0))] : [];
  const chart = new Chart(() => ({ title, unit, zero, xLabel: AXES[view.x], xText: view.x === "time" ? clock : figure,
    smooth: tag.startsWith("eval/") ? 1 : view.smooth, lines: ratios.map(y => ({ label: `configured ${figure(y)}`, y })),
    curves: curvesOf(data, tag, runs()) }), height);
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
  return el("label", { class: "small soft" }, "smooth ", el("select", { onchange: event => { view.smooth = +event.target.value; redraw(); } },
    [1, 5, 15, 51].map(width => el("option", { value: width, selected: width === view.smooth }, width === 1 ? "not" : `${width} points`))));
}

function themeButton() {
  const root = document.documentElement, order = ["auto", "light", "dark"];
  const keep = mode => { try { localStorage.setItem("qfleet-theme", mode); } catch { /* a page without storage forgets */ } };
  let mode = "auto";
  try { mode = localStorage.getItem("qfleet-theme") || "auto"; } catch { /* the same */ }
  const button = el("button", { type: "button", id: "theme", onclick: () => { mode = order[(order.indexOf(mode) + 1) % 3]; keep(mode); apply(); } });
  const apply = () => { root.dataset.theme = mode; button.textContent = `Theme: ${mode}`; };
  apply();
  return button;
}

const strips = [];
function limitStrip(run) {  // what limited the run, over the chosen axis
  const place = el("div", { class: "strip" }), { x, limits } = run.series;
  const draw = () => {
    const xs = x[view.x], end = xs.reduce((most, value) => Math.max(most, value || 0), 0) || 1, parts = [];
    let from = 0;
    limits.forEach((limit, i) => {
      if (i + 1 < limits.length && limits[i + 1] === limit) return;
      const to = xs[i] || 0;
      if (limit) parts.push(svg("rect", { x: from / end * 1000, width: Math.max(0, (to - from) / end * 1000), y: 0, height: 18, fill: colour(LIMITS[limit] ?? 6) },
        svg("title", {}, `${LIMIT_WORDS[limit] || limit}: ${figure(from)} to ${figure(to)} ${AXES[view.x]}`)));
      from = to;
    });
    const counts = {};
    limits.filter(Boolean).forEach(limit => { counts[limit] = (counts[limit] || 0) + 1; });
    const shares = Object.entries(counts).sort((a, b) => b[1] - a[1]);
    const total = shares.reduce((sum, [, count]) => sum + count, 0);
    const words = shares.map(([limit, count]) => `${LIMIT_WORDS[limit] || limit} ${Math.round(100 * count / total)} %`).join(", ");
    place.replaceChildren(svg("svg", { viewBox: "0 0 1000 18", preserveAspectRatio: "none", height: 18, width: "100%", role: "img",
      "aria-label": `${run.name} was limited by ${words || "nothing known"}` }, parts),
      el("p", { class: "small soft" }, shares.map(([limit, count]) => el("span", { style: { marginRight: "12px" } },
        el("span", { class: "key", style: { background: colour(LIMITS[limit] ?? 6) } }), ` ${LIMIT_WORDS[limit] || limit} ${Math.round(100 * count / total)} %`))));
  };
  strips.push(draw); draw();
  return place;
}

function section(title, ...content) {
  const id = title.toLowerCase().replace(/\W+/g, "-");
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), content);
}

function panelSections(data, runs, skip) {  // every panel that some run has figures for
  const known = tagsOf(runs());
  return PANELS.map(([title, tags]) => [title, Object.entries(tags).filter(([tag]) => known.has(tag) && !(skip || new Set()).has(tag))])
    .filter(([, tags]) => tags.length).map(([title, tags]) => [title, tags.map(([tag, look]) => chartOf(data, tag, look, runs))]);
}
