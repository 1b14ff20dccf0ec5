"use strict";
// The live page: polls the status of the run once a second and draws new data.

const live = { groups: [{ label: "" }], runs: [{ name: "", group: 0, series: { x: {}, y: {}, limits: [] }, ratio: null, alpha: null }] };
const runs = () => live.runs;
const place = name => document.getElementById(name);
let version = -1, tags = "", current = null, shown = 0;  // name of the video, and time until which it keeps playing

document.getElementById("page").replaceChildren(
  el("header", {}, el("div", {}, el("h1", { id: "name" }, "…"), el("p", { class: "soft", id: "env" })), themeButton()),
  el("p", { id: "alarm", class: "bad", role: "alert", hidden: true }),
  el("section", { class: "card", "aria-label": "Progress" }, el("div", { id: "state", class: "state", role: "status" }), el("div", { class: "bar" }, el("div", { id: "bar" })),
    el("div", { id: "headline" }), el("p", { id: "limit", class: "small soft" }), el("p", { id: "gap", class: "small", hidden: true })),
  el("section", { class: "card below", "aria-label": "Roles" }, el("h3", {}, "Roles"), el("div", { id: "roles" })),
  el("div", { class: "grid wide below" },
    el("section", { class: "card", "aria-label": "Now" }, el("h3", {}, "Now"), el("dl", { id: "figures", class: "now" })),
    el("section", { class: "card", "aria-label": "Newest video" }, el("h3", {}, "Newest evaluation video"), el("div", { id: "film", class: "empty" }, "none yet"))),
  el("div", { class: "controls" }, axisChoice(), smoothing()), el("div", { id: "charts" }));

const HEALTH = { healthy: ["good", "healthy"], silent: ["bad", "silent"], down: ["bad", "down"], lost: ["bad", "lost"], ended: ["soft", "ended"], unknown: ["soft", "unknown"] };

function roleRows(news) {
  const head = ["role", "health", "rate", "done", "policy lag", "start", "where"], acts = member => member.role === "actor";
  const rows = [["learner", "learner", news.health, HEALTH[news.health][1], news.updates_s === null ? "–" : `${figure(news.updates_s)} updates/s`, `${figure(news.updates)} updates`, "–", "–", "–"],
    ...news.members.map(member => [member.name, member.name.startsWith(member.role) ? member.name : `${member.role} ${member.name}`, member.health, member.words || HEALTH[member.health][1],
      member.rate === null || !acts(member) ? "–" : `${figure(member.rate)} steps/s`, acts(member) ? `${figure(member.steps)} steps` : "–",
      member.version >= 0 ? figure(Math.max(0, news.updates - member.version)) : "–", member.incarnation, `${member.host} ${member.pid}`])];
  return [el("div", { class: "scroll roles", tabindex: "0" }, el("table", { id: "members" }, el("thead", {}, el("tr", {}, head.map(text => el("th", { scope: "col" }, text)))),
    el("tbody", {}, rows.map(([name, label, health, words, ...rest]) => el("tr", { "data-member": name, "data-health": health }, el("th", { scope: "row" }, label),
      el("td", { class: HEALTH[health][0] }, words), rest.map(text => el("td", {}, text))))))),
  el("div", { id: "events", class: "small soft", role: "log" }, news.events.slice(-6).reverse().map(([at, text]) => el("p", {}, `${new Date(1000 * at).toLocaleTimeString()} ${text}`)))];
}

function soloRows(news) {
  const shares = Object.entries(news.loop);
  return shares.length ? [el("p", { class: "small soft" }, "All roles share one process. Its time is spent on"), el("dl", {}, shares.map(([name, share]) => [el("dt", {}, name), el("dd", {}, percent(share))]))]
    : [el("p", { class: "small soft" }, "no data yet")];
}

function showVideo(name, period) {
  if (!current && !name) place("film").textContent = period ? `none yet: one after every ${period === 1 ? "evaluation" : `${period} evaluations`}` : "none: set eval.video_period to record some";
  if (name === current || !name || performance.now() < shown) return;  // videos may arrive faster than they can be watched
  current = name;
  shown = performance.now() + 3000;
  const video = el("video", { controls: true, loop: true, playsinline: true, "aria-label": name, src: `film/${encodeURIComponent(name)}` });
  video.muted = true;
  video.autoplay = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  video.addEventListener("loadedmetadata", () => { shown = performance.now() + Math.min(1000 * video.duration, 60000); });
  video.addEventListener("error", () => { shown = 0; });
  const step = /^step-0*(\d+)/.exec(name);
  place("film").className = "";
  place("film").replaceChildren(video, el("p", { class: "small soft" }, step ? `step ${(+step[1]).toLocaleString("en")}` : name));
}

function charts() {  // rebuilt when the run logs a new tag
  view.charts.length = 0;
  const known = tagsOf(runs()), returns = Object.entries(RETURNS).filter(([tag]) => known.has(tag)).map(([tag, look]) => chartOf(live, tag, look, runs, 260));
  place("charts").replaceChildren(returns.length ? section("Learning curves", el("div", { class: "grid wide" }, returns)) : "",
    ...panelSections(live, runs).map(([title, nodes]) => section(title, el("div", { class: "grid" }, nodes))));
}

function show(news) {
  document.title = `${Math.round(100 * news.fraction)} % ${news.name}`;
  place("name").textContent = news.name; place("env").textContent = news.env;
  place("state").className = `state ${HEALTH[news.health][0]}`;
  if (place("state").textContent !== news.words) place("state").replaceChildren(el("span", { class: "dot" }), news.words);
  place("state").dataset.state = news.state;
  place("bar").style.width = `${100 * news.fraction}%`;
  place("headline").textContent = news.headline;
  place("limit").textContent = news.limit ? `Limited by ${news.limit.limit}: ${news.limit.evidence}. Remedy: ${news.limit.advice}.` : "";
  place("gap").hidden = !news.gap;
  place("gap").textContent = news.gap ? `Evaluations far below the training: ${news.gap.evidence}. Why: ${news.gap.reason}. What to do: ${news.gap.remedy}.` : "";
  const table = document.querySelector(".roles"), [along, down] = table ? [table.scrollLeft, table.scrollTop] : [0, 0];
  place("roles").replaceChildren(...(news.members.length || news.roles.length ? roleRows(news) : soloRows(news)));
  document.querySelector(".roles")?.scrollTo(along, down);  // keep the scroll position
  place("figures").replaceChildren(...news.figures.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
  showVideo(news.film, news.video_period);
  if (news.series) {
    version = news.version;
    live.groups[0].label = news.name;
    Object.assign(live.runs[0], { name: news.name, series: news.series, ratio: news.ratio, alpha: news.alpha });
    const now = Object.keys(news.series.y).join();
    if (now !== tags) { tags = now; charts(); }
    redraw();
  }
}

async function follow() {
  try {
    const reply = await fetch(`news?seen=${version}`);
    if (!reply.ok) throw new Error(`${reply.status} ${reply.statusText}`);
    show(await reply.json());
    place("alarm").hidden = true;
  } catch (error) {
    place("alarm").hidden = false;
    place("alarm").textContent = `qfleet watch does not answer (${error.message}): the data shown are out of date.`;
  }
  setTimeout(follow, document.hidden ? 5000 : 1000);
}
follow();
