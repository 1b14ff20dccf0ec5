"use strict";
// The report: one page of runs that have been trained.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = () => data.runs;
const several = data.groups.length > 1, environments = [...new Set(data.runs.map(run => run.env))];

function header() {
  const seeds = data.runs.length === 1 ? "1 run" : `${data.runs.length} runs`;
  return el("header", {}, el("div", {}, el("h1", {}, data.title),
    el("p", { class: "soft" }, `${seeds}, ${data.groups.length === 1 ? "1 configuration" : `${data.groups.length} configurations`} · made ${data.made.replace("T", " ")} · qfleet ${data.version}`)), themeButton());
}

function controls() {
  return el("div", { class: "controls" }, axisChoice(), smoothing(), el("div", { class: "legend" }, data.groups.map((group, index) =>
    el("label", {}, several ? el("input", { type: "checkbox", checked: true, onchange: event => {
      view.hidden[event.target.checked ? "delete" : "add"](index); redraw(); } }) : null,
      el("span", { class: "key", style: { background: colour(index) } }), group.label))));
}

function tiles() {
  const tile = (name, value, note) => el("div", { class: "card tile" }, el("span", { class: "soft small" }, name), el("b", {}, value), el("span", { class: "soft small" }, note));
  const judged = data.runs.filter(run => run.best !== null);
  const best = judged.reduce((most, run) => !most || run.best > most.best ? run : most, null);
  const total = (name, runs = data.runs) => runs.reduce((sum, run) => sum + (run[name] || 0), 0);
  return el("div", { class: "grid", style: { marginTop: "16px" } },
    environments.length > 1 ? tile("Environments", environments.length, environments.join(", ")) : best ? tile("Best evaluation", figure(best.best), best.name) : null,
    environments.length === 1 && best && best.human !== null ? tile("Human-normalised", `${Math.round(100 * best.human)} %`, "its last evaluation: 0 % a random player, 100 % a human") : null,
    tile("Steps", figure(total("steps")), `${figure(total("episodes"))} episodes, ${figure(total("updates"))} updates`),
    tile("Wall time", clock(total("time_s")), `${figure(total("steps") / total("time_s"))} steps/s, all runs together`));
}

function learning() {
  const of = env => data.runs.filter(run => run.env === env);
  const charts = environments.flatMap(env => Object.entries(RETURNS).filter(([tag]) => tagsOf(of(env)).has(tag)).map(([tag, [title, unit]]) =>
    chartOf(data, tag, [environments.length > 1 ? `${env}: ${title.toLowerCase()}` : title, unit], () => of(env), 300)));
  const thinned = data.runs.find(run => run.series.each > 1);
  return section("Learning curves", el("div", { class: "grid wide" }, charts), el("p", { class: "small soft" },
    "A band reaches from the lowest to the highest seed, its line is their mean, over the stretch that all of them cover.",
    thinned ? ` Long runs are shown by means of up to ${Math.max(...data.runs.map(run => run.series.each))} records.` : ""));
}

function whisker(row, name, rows) {
  const ends = rows.flatMap(each => [each[name], each[`${name}_low`], each[`${name}_high`]]).filter(value => value !== null && value !== undefined);
  const [low, high] = [Math.min(...ends), Math.max(...ends)], place = value => 6 + (value - low) / (high - low || 1) * 128;
  const ink = row.group === null ? "var(--ink)" : colour(row.group), known = row[`${name}_low`] !== null;
  return svg("svg", { width: 140, height: 18, role: "img", "aria-label": `${figure(row[name])}` },
    known ? svg("line", { x1: place(row[`${name}_low`]), x2: place(row[`${name}_high`]), y1: 9, y2: 9, stroke: ink, "stroke-width": 3, opacity: .5 }) : null,
    svg("circle", { cx: place(row[name]), cy: 9, r: 5, fill: ink }));
}

function scores() {
  if (!data.scores.length) return null;
  const human = data.scores.some(row => row.human !== undefined);
  const span = (row, name, form) => row[`${name}_low`] === null || row[`${name}_low`] === undefined ? "one seed" : `${form(row[`${name}_low`])} to ${form(row[`${name}_high`])}`;
  const percent = value => `${Math.round(100 * value)} %`, name = human ? "human" : "score";
  const head = ["configuration", "environment", "seeds", "IQM", "95 % interval", ...(human ? ["human-normalised IQM", "95 % interval"] : []), "", "last evaluations"];
  return section("Scores", el("div", { class: "scroll" }, el("table", { id: "score-table" }, el("thead", {}, el("tr", {}, head.map(text => el("th", { scope: "col", class: /seeds|IQM|interval/.test(text) ? "number" : null }, text)))),
    el("tbody", {}, data.scores.map(row => el("tr", {}, el("th", { scope: "row" }, row.label), el("td", {}, row.env), el("td", { class: "number" }, row.seeds),
      el("td", { class: "number" }, row.score === undefined ? "" : figure(row.score)), el("td", { class: "number" }, row.score === undefined ? "" : span(row, "score", figure)),
      human ? [el("td", { class: "number" }, row.human === undefined ? "" : percent(row.human)), el("td", { class: "number" }, row.human === undefined ? "" : span(row, "human", percent))] : null,
      el("td", {}, row[name] === undefined ? "" : whisker(row, name, data.scores.filter(each => each[name] !== undefined && (human || each.env === row.env)))),
      el("td", { class: "small soft" }, row.finals.map(figure).join(", "))))))),
    el("p", { class: "small soft" }, "The score of a seed is its last evaluation. IQM is the mean of the middle half of the seeds; the interval is a stratified bootstrap over seeds, 2,000 resamples. ",
      human ? "Human-normalised: 0 % is a random player, 100 % a human tester (Wang et al. 2016)." : ""));
}

function films() {
  const shown = data.runs.flatMap(run => run.films.map(film => ({ run, film })));
  if (!shown.length) return null;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const seen = new IntersectionObserver(entries => entries.forEach(({ target, isIntersecting }) => {
    if (isIntersecting && !calm) target.play().catch(() => {}); else target.pause(); }), { threshold: .3 });
  return section("Films", el("div", { class: "grid" }, shown.map(({ run, film }) => {
    const bytes = Uint8Array.from(atob(document.getElementById(`reel-${film.reel}`).textContent), letter => letter.charCodeAt(0));
    const video = el("video", { controls: true, loop: true, playsinline: true, preload: "metadata", "aria-label": `${run.name}, ${film.name}`,
      src: URL.createObjectURL(new Blob([bytes], { type: "video/mp4" })) });
    video.muted = true;
    seen.observe(video);
    const step = /^step-0*(\d+)/.exec(film.name);
    return el("figure", { class: "card" }, video, el("figcaption", { class: "small" }, run.name, el("span", { class: "soft" },
      step ? ` · evaluation at step ${(+step[1]).toLocaleString("en")}` : ` · ${film.name}`)));
  })));
}

function bottlenecks() {
  const judged = data.runs.filter(run => run.verdict);
  if (!judged.length) return null;
  return section("What limited the runs", el("div", { class: "grid wide" }, judged.map(run => el("div", { class: "card" },
    el("h3", {}, run.name), limitStrip(run), el("details", {}, el("summary", {}, `At the end: ${LIMIT_WORDS[run.verdict[0]] || run.verdict[0]}`),
      el("p", { class: "small" }, run.verdict[1], "."), el("p", { class: "small soft" }, `Remedy: ${run.verdict[2]}.`))))));
}

function others() {  // any tag at all, an agent's own among them
  const known = [...tagsOf(data.runs)].sort();
  let tag = known.includes("train/loss") ? "train/loss" : known[0];
  const chart = new Chart(() => ({ title: tag, xLabel: AXES[view.x], xText: view.x === "time" ? clock : figure, smooth: view.smooth, curves: curvesOf(data, tag, data.runs) }), 260);
  view.charts.push(chart);
  return section("Any figure", el("p", {}, el("label", {}, "tag ", el("select", { id: "any", onchange: event => { tag = event.target.value; chart.draw(); } },
    known.map(name => el("option", { selected: name === tag }, name))))), chart.node);
}

function configuration() {
  if (!data.config.length) return null;
  const body = el("tbody"), only = el("input", { type: "checkbox", checked: several, onchange: () => fill() });
  const find = el("input", { type: "search", placeholder: "find a key or value", "aria-label": "find a key or value", oninput: () => fill() });
  const fill = () => body.replaceChildren(...data.config.filter(row => (!only.checked || row.differs) &&
    [row.key, ...row.values].some(text => text.toLowerCase().includes(find.value.toLowerCase()))).map(row =>
    el("tr", { class: row.differs ? "differs" : null }, el("th", { scope: "row", class: "mono" }, row.key), row.values.map(value => el("td", { class: "mono" }, value)))));
  fill();
  return section("Configuration", el("p", {}, find, " ", several ? el("label", {}, only, " only what differs") : null),
    el("div", { class: "scroll config" }, el("table", { id: "config-table" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "key"),
      data.groups.map(group => el("th", { scope: "col" }, group.label)))), body)));
}

function origins() {
  const all = data.runs.flatMap(run => run.attempts), uneven = key => new Set(all.map(attempt => attempt[key] || "")).size > 1;
  const marked = key => uneven(key) && !["started", "command", "folder", "resumed from"].includes(key);
  return section("How it was made", data.runs.map(run => el("details", { class: "card", style: { marginBottom: "10px" }, open: data.runs.length === 1 },
    el("summary", {}, el("b", {}, run.name), ` · ${run.state} · ${figure(run.steps)} steps in ${clock(run.time_s)}`),
    run.attempts.map(attempt => el("dl", {}, Object.entries(attempt).map(([key, value]) =>
      [el("dt", {}, key), el("dd", { class: "mono" }, marked(key) ? el("mark", {}, value) : value)]))))));
}

const sections = [learning(), scores(), films(), bottlenecks(), ...panelSections(data, runs).map(([title, charts]) => section(title, el("div", { class: "grid" }, charts))),
  others(), configuration(), origins()].filter(Boolean);
document.getElementById("page").replaceChildren(header(), el("nav", { "aria-label": "Sections" }, sections.map(part => {
  const heading = part.querySelector("h2");
  return el("a", { href: `#${heading.id}` }, heading.textContent);
})), tiles(), controls(), ...sections);
redraw();
