"use strict";
// The report on one or more runs.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = () => data.runs;
const several = data.groups.length > 1, environments = [...new Set(data.runs.map(run => run.env))];

function header() {
  const seeds = data.runs.length === 1 ? "1 run" : `${data.runs.length} runs`;
  const groups = data.groups.length === 1 ? "1 configuration" : `${data.groups.length} configurations`;
  return el("header", {}, el("div", {}, el("h1", {}, data.title), el("p", { class: "soft" },
    `${seeds}, ${groups} · created ${data.made.replace("T", " ")} · qfleet ${data.version}`)), themeButton());
}

function controls() {
  const differing = index => data.config.filter(row => row.differs).map(row => `${row.key}=${row.values[index]}`);
  const texts = data.groups.map(({ label }, index) => [label, ...differing(index)].join(" "));
  return el("div", { class: "controls" }, axisChoice(), smoothing(), unzoomButton(), new Configurations(data.groups, texts).node);
}

const withError = (value, error) => error === null || error === undefined ? figure(value) : `${figure(value)} ± ${figure(error)}`;
const highest = (some, value) => some.reduce((most, run) => !most || value(run) > value(most) ? run : most, null);

function gaps() {
  const wide = data.runs.filter(run => run.gap);
  return wide.length ? [el("div", { class: "card below", role: "note", id: "gaps" }, el("b", {}, "Evaluations far below the training"),
    wide.map(run => el("p", { class: "small", "data-group": run.group }, `${run.name}: ${run.gap.evidence}.`)),
    el("p", { class: "small soft" }, `Why: ${wide[0].gap.reason}. What to do: ${wide[0].gap.remedy}.`))] : [];
}

// ---- Tiles ----

const tile = (name, value, note) => el("div", { class: "card tile" }, el("span", { class: "soft small" }, name),
  el("b", {}, value), el("span", { class: "soft small" }, note));

function maximum(run) {
  const each = run.episodes_each ? ` of ${run.episodes_each} episodes each` : "";
  return `best evaluation ${figure(run.best)}, the highest of ${run.evaluations} evaluations${each}`;
}

function scoreTile(best) {
  const scored = data.runs.filter(run => run.score);
  if (scored.length > 1 && !several) {
    const mean = scored.reduce((sum, run) => sum + run.score.mean, 0) / scored.length;
    return tile("Score of the best policies", figure(mean), `mean of ${scored.length} runs, ${scored[0].score.episodes} fresh episodes each`);
  }
  if (scored.length) {
    const run = highest(scored, each => each.score.mean), { mean, standard_error: error, episodes } = run.score;
    return tile("Score of the best policy", withError(mean, error), `${run.name}: ${episodes} fresh episodes, ± standard error; ${maximum(run)}`);
  }
  return best ? tile("Best evaluation", figure(best.best), `${best.name}: ${maximum(best)}`) : null;
}

function tiles() {
  const best = highest(data.runs.filter(run => run.best !== null), run => run.best);
  const total = name => data.runs.reduce((sum, run) => sum + (run[name] || 0), 0);
  const human = environments.length === 1 && best && best.human !== null;
  return el("div", { class: "grid tiles" },
    environments.length > 1 ? tile("Environments", environments.length, environments.join(", ")) : scoreTile(best),
    human ? tile("Human-normalised", percent(best.human), "last evaluation: 0 % is a random player, 100 % a human") : null,
    tile("Steps", figure(total("steps")), `${figure(total("episodes"))} episodes, ${figure(total("updates"))} updates`),
    tile("Wall time", clock(total("time_s")), `${figure(total("steps") / total("time_s"))} steps/s, all runs together`));
}

// ---- Learning curves and videos ----

function returnCharts() {
  const of = env => data.runs.filter(run => run.env === env);
  const title = (env, text) => environments.length > 1 ? `${env}: ${text.toLowerCase()}` : text;
  return environments.flatMap(env => Object.entries(RETURNS).filter(([tag]) => tagsOf(of(env)).has(tag))
    .map(([tag, [text, unit]]) => chartOf(data, tag, [title(env, text), unit], () => of(env), 300)));
}

function learning(lead) {  // the newest video of the best run stands next to the first chart
  const charts = returnCharts(), downsampled = data.runs.some(run => run.series.each > 1);
  const beside = lead && charts.length ? [el("div", { class: "lead" }, charts.shift(), filmCard(lead))] : lead ? [filmCard(lead)] : [];
  return section("Learning curves", beside, el("div", { class: "grid wide" }, charts), el("p", { class: "small soft" },
    data.runs.length > data.groups.length ? "A thick line is the mean over seeds. A band covers the range from the lowest to the highest seed. Both cover the range where all seeds have data. Thin lines are single seeds, as logged. " : "",
    "Smoothing changes only thick lines, and not those of evaluations, counts and schedules. ",
    "Drag across a chart to zoom all charts; double-click to show everything again. With the keyboard: arrow keys read values, + and − zoom, 0 shows everything. ",
    downsampled ? `In long runs each point is the mean of up to ${Math.max(...data.runs.map(run => run.series.each))} records.` : ""));
}

const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
const onScreen = new IntersectionObserver(entries => entries.forEach(({ target, isIntersecting }) => {
  if (isIntersecting && !calm) target.play().catch(() => {}); else target.pause(); }), { threshold: .3 });

function bestFilm() {  // of the run with the highest score, or else the highest evaluation, among runs with videos
  const value = run => run.score?.mean ?? run.best ?? -Infinity;
  const run = environments.length === 1 ? highest(data.runs.filter(each => each.films.length), value) : null;
  return run && { run, film: run.films[0] };
}

function filmCard({ run, film }) {
  const encoded = document.getElementById(`reel-${film.reel}`).textContent;
  const bytes = Uint8Array.from(atob(encoded), letter => letter.charCodeAt(0));
  const video = el("video", { controls: true, loop: true, playsinline: true, preload: "metadata", "aria-label": `${run.name}, ${film.name}`,
    src: URL.createObjectURL(new Blob([bytes], { type: "video/mp4" })) });
  video.muted = true;
  onScreen.observe(video);
  const step = /^step-0*(\d+)/.exec(film.name), what = step ? `evaluation at step ${(+step[1]).toLocaleString("en")}`
    : /^best-/.test(film.name) ? `best policy · ${film.name}` : film.name;
  return el("figure", { class: "card film", "data-group": run.group }, video,
    el("figcaption", { class: "small" }, run.name, el("span", { class: "soft" }, ` · ${what}`)));
}

function videos(lead) {
  const shown = data.runs.flatMap(run => run.films.map(film => ({ run, film }))).filter(({ film }) => film !== lead?.film);
  return shown.length ? section("Videos", el("div", { class: "grid" }, shown.map(filmCard))) : null;
}

// ---- Other sections ----

function bottlenecks() {
  const limited = data.runs.filter(run => run.verdict);
  if (!limited.length) return null;
  return section("What limited the runs", el("div", { class: "grid wide" }, limited.map(run => el("div", { class: "card", "data-group": run.group },
    el("h3", {}, run.name), limitStrip(run), el("details", {}, el("summary", {}, `At the end: limited by ${run.verdict[0]}`),
      el("p", { class: "small" }, run.verdict[1], "."), el("p", { class: "small soft" }, `Remedy: ${run.verdict[2]}.`))))));
}

function others() {  // any tag, including those of an agent
  const known = [...tagsOf(data.runs)].sort();
  if (!known.length) return null;
  let tag = known.includes("train/loss") ? "train/loss" : known[0];
  const chart = new Chart(() => ({ title: tag, ...common(data, tag), curves: curvesOf(data, tag, data.runs) }), 260);
  view.charts.push(chart);
  return section("Any metric", el("p", {}, el("label", {}, "tag ", el("select", { id: "any",
    onchange: event => { tag = event.target.value; chart.draw(); } },
  known.map(name => el("option", { selected: name === tag }, name))))), chart.node);
}

const constant = constantTags(data.runs), lead = bestFilm();
const panels = panelSections(data, runs, constant).map(([title, charts]) => section(title, el("div", { class: "grid" }, charts)));
const sections = [learning(lead), scores(), videos(lead), bottlenecks(), ...panels, constantSection(data, data.runs, constant),
  others(), configuration(), origins()].filter(Boolean);
document.getElementById("page").replaceChildren(header(), el("nav", { "aria-label": "Sections" }, sections.map(part => {
  const heading = part.querySelector("h2");
  return el("a", { href: `#${heading.id}` }, heading.textContent);
})), tiles(), ...gaps(), controls(), ...sections);
redraw();
