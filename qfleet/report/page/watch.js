"use strict";
// The live page: polls the status of the run once a second and draws new data.

const page = JSON.parse(document.getElementById("data").textContent);
const live = { groups: [{ label: "" }], runs: [{ name: "", group: 0, series: { x: {}, y: {}, limits: [] }, ratio: null, alpha: null }] };
const runs = () => live.runs;
const place = name => document.getElementById(name);
const state = { version: -1, charts: "", film: null, playsUntil: 0, log: "" };

const HEALTH = { healthy: ["good", "healthy"], silent: ["bad", "silent"], down: ["bad", "down"], lost: ["bad", "lost"],
  ended: ["soft", "ended"], unknown: ["soft", "unknown"] };

// ---- Layout ----

const card = (label, id, ...content) => el("section", { class: "card", "aria-label": label, id }, el("h3", {}, label), content);

function layout() {
  return [
    el("header", {}, el("div", {}, el("h1", { id: "name" }, "…"), el("p", { class: "soft", id: "env" })), themeButton()),
    el("p", { id: "alarm", class: "bad", role: "alert", hidden: true }),
    el("section", { class: "card", "aria-label": "Progress" },
      el("div", { class: "status" }, el("div", { id: "state", class: "state", role: "status" }), el("span", { id: "headline" }),
        el("b", { id: "speed" })),
      el("div", { class: "bar" }, el("div", { id: "bar" })),
      el("p", { id: "limit", class: "small soft" }), el("p", { id: "gap", class: "small", hidden: true })),
    el("div", { class: "controls" }, axisChoice(), smoothing(), unzoomButton()),
    el("div", { class: "lead live" }, el("div", { id: "returns" }, el("p", { class: "card empty" }, "no returns yet")),
      el("div", { class: "side" }, card("Newest evaluation video", null, el("div", { id: "film", class: "empty" }, "none yet")),
        card("Now", null, el("dl", { id: "figures", class: "now" })))),
    card("Roles", null, el("div", { id: "roles" })),
    el("div", { class: "grid wide below" },
      card("Log", null, logControls(), el("pre", { id: "log", class: "small", tabindex: "0" })), settingsCard()),
    el("div", { id: "charts" })];
}

function logControls() {
  const pick = event => { state.log = event.target.value; poll(); };
  return el("label", { class: "small soft", id: "log-choice", hidden: true }, "file ", el("select", { id: "log-name", onchange: pick }));
}

function settingsCard() {  // changed settings; all others are folded
  const row = ({ key, value, source }) => el("tr", {}, el("th", { scope: "row", class: "mono" }, key),
    el("td", { class: "mono" }, value), el("td", { class: "soft" }, source));
  const table = (rows, id) => el("div", { class: "scroll config" }, el("table", { id }, el("tbody", {}, rows.map(row))));
  const changed = page.settings.filter(({ rank }) => rank === 0), others = page.settings.filter(({ rank }) => rank > 0);
  return el("section", { class: "card", "aria-label": "Configuration", id: "settings" }, el("h3", {}, "Configuration"),
    changed.length ? table(changed, "changed-settings") : el("p", { class: "small soft" }, "no setting was changed by the user"),
    others.length ? el("details", {}, el("summary", {}, `${others.length} settings of recipes and defaults`), table(others, "other-settings")) : null);
}

// ---- Roles ----

function roleRow(member, news) {
  const acts = member.role === "actor";
  return [member.name, member.name.startsWith(member.role) ? member.name : `${member.role} ${member.name}`, member.health,
    member.words || HEALTH[member.health][1], member.rate === null || !acts ? "–" : `${figure(member.rate)} steps/s`,
    acts ? `${figure(member.steps)} steps` : "–", member.version >= 0 ? figure(Math.max(0, news.updates - member.version)) : "–",
    member.incarnation > 1 ? member.incarnation - 1 : "–", `${member.host} ${member.pid}`];
}

function roleRows(news) {
  const head = ["role", "health", "rate", "done", "policy lag", "restarts", "host and process"];
  const rate = news.updates_s === null ? "–" : `${figure(news.updates_s)} updates/s`;
  const rows = [["learner", "learner", news.health, HEALTH[news.health][1], rate, `${figure(news.updates)} updates`, "–", "–", "–"],
    ...news.members.map(member => roleRow(member, news))];
  return [el("div", { class: "scroll roles", tabindex: "0" }, el("table", { id: "members" },
    el("thead", {}, el("tr", {}, head.map(text => el("th", { scope: "col" }, text)))),
    el("tbody", {}, rows.map(([name, label, health, words, ...rest]) => el("tr", { "data-member": name, "data-health": health },
      el("th", { scope: "row" }, label), el("td", { class: HEALTH[health][0] }, words), rest.map(text => el("td", {}, text))))))),
  el("div", { id: "events", class: "small soft", role: "log" }, news.events.slice(-6).reverse().map(([at, text]) =>
    el("p", {}, `${new Date(1000 * at).toLocaleTimeString()} ${text}`)))];
}

function soloRows(news) {
  const shares = Object.entries(news.loop);
  return shares.length ? [el("p", { class: "small soft" }, "All roles share one process. Its time is spent on"),
    el("dl", {}, shares.map(([name, share]) => [el("dt", {}, name), el("dd", {}, percent(share))]))]
    : [el("p", { class: "small soft" }, "no data yet")];
}

function showRoles(news) {
  const table = document.querySelector(".roles"), [along, down] = table ? [table.scrollLeft, table.scrollTop] : [0, 0];
  place("roles").replaceChildren(...(news.members.length || news.roles.length ? roleRows(news) : soloRows(news)));
  document.querySelector(".roles")?.scrollTo(along, down);  // keep the scroll position
}

// ---- Video, log, charts ----

function showVideo(name, period) {
  if (!state.film && !name) place("film").textContent = !period ? "none: set eval.video_period to record some"
    : `none yet: one after every ${period === 1 ? "evaluation" : `${period} evaluations`}`;
  if (name === state.film || !name || performance.now() < state.playsUntil) return;  // videos may arrive faster than they can be watched
  state.film = name;
  state.playsUntil = performance.now() + 3000;
  const video = el("video", { controls: true, loop: true, playsinline: true, "aria-label": name, src: `film/${encodeURIComponent(name)}` });
  video.muted = true;
  video.autoplay = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  video.addEventListener("loadedmetadata", () => { state.playsUntil = performance.now() + Math.min(1000 * video.duration, 60000); });
  video.addEventListener("error", () => { state.playsUntil = 0; });
  const step = /^step-0*(\d+)/.exec(name);
  place("film").className = "";
  place("film").replaceChildren(video, el("p", { class: "small soft" }, step ? `step ${(+step[1]).toLocaleString("en")}` : name));
}

function showLog({ names, name, lines }) {
  const select = place("log-name"), node = place("log"), text = lines.join("\n") || (names.length ? "empty" : "this run has written no log");
  place("log-choice").hidden = names.length < 2;
  if ([...select.options].map(option => option.value).join() !== names.join())
    select.replaceChildren(...names.map(each => el("option", { value: each, selected: each === name }, each)));
  if (node.textContent === text) return;
  node.textContent = text;
  node.scrollTop = node.scrollHeight;
}

function charts(constant) {  // rebuilt when the run logs a new tag, or when a metric changes for the first time
  view.charts.length = 0;
  const known = tagsOf(runs()), returns = Object.entries(RETURNS).filter(([tag]) => known.has(tag));
  if (returns.length) place("returns").replaceChildren(...returns.map(([tag, look]) => chartOf(live, tag, look, runs, 225)));
  place("charts").replaceChildren(...panelSections(live, runs, constant).map(([title, nodes]) =>
    section(title, el("div", { class: "grid" }, nodes))), constantSection(live, runs(), constant) || "");
}

// ---- Polling ----

function showProgress(news) {
  place("state").className = `state ${HEALTH[news.health][0]}`;
  if (place("state").textContent !== news.words) place("state").replaceChildren(el("span", { class: "dot" }), news.words);
  place("state").dataset.state = news.state;
  place("bar").style.width = `${100 * news.fraction}%`;
  place("headline").textContent = news.headline;
  place("speed").textContent = news.steps_s === null ? "" : `${figure(news.steps_s)} steps/s`;
  place("limit").textContent = news.limit ? `Limited by ${news.limit.limit}: ${news.limit.evidence}. Remedy: ${news.limit.advice}.` : "";
  place("gap").hidden = !news.gap;
  place("gap").textContent = news.gap ? `Evaluations far below the training: ${news.gap.evidence}. Why: ${news.gap.reason}. What to do: ${news.gap.remedy}.` : "";
}

function show(news) {
  document.title = `${percent(news.fraction)} ${news.name}`;
  place("name").textContent = news.name; place("env").textContent = news.env;
  showProgress(news);
  showRoles(news);
  place("figures").replaceChildren(...news.figures.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
  showVideo(news.film, news.video_period);
  showLog(news.log);
  if (!news.series) return;
  state.version = news.version;
  live.groups[0].label = news.name;
  Object.assign(live.runs[0], { name: news.name, series: news.series, ratio: news.ratio, alpha: news.alpha });
  const constant = constantTags(runs()), now = [...Object.keys(news.series.y), "", ...constant].join();
  if (now !== state.charts) { state.charts = now; charts(constant); }
  redraw();
}

async function poll() {
  try {
    const reply = await fetch(`news?seen=${state.version}&log=${encodeURIComponent(state.log)}`);
    if (!reply.ok) throw new Error(`${reply.status} ${reply.statusText}`);
    show(await reply.json());
    place("alarm").hidden = true;
  } catch (error) {
    place("alarm").hidden = false;
    place("alarm").textContent = `qfleet watch does not answer (${error.message}): the data shown are out of date.`;
  }
}

async function follow() {
  await poll();
  setTimeout(follow, document.hidden ? 5000 : 1000);
}

document.getElementById("page").replaceChildren(...layout());
follow();
