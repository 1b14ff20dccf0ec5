"use strict";
// The report on one or more runs.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = () => data.runs;
const several = data.groups.length > 1, environments = [...new Set(data.runs.map(run => run.env))];

function header() {
  const seeds = data.runs.length === 1 ? "1 run" : `${data.runs.length} runs`;
  return el("header", {}, el("div", {}, el("h1", {}, data.title),
    el("p", { class: "soft" }, `${seeds}, ${data.groups.length === 1 ? "1 configuration" : `${data.groups.length} configurations`} · created ${data.made.replace("T", " ")} · qfleet ${data.version}`)), themeButton());
}

function controls() {
  return el("div", { class: "controls" }, axisChoice(), smoothing(), el("div", { class: "legend" }, data.groups.map((group, index) =>
    el("label", {}, several ? el("input", { type: "checkbox", checked: true, onchange: event => {
      view.hidden[event.target.checked ? "delete" : "add"](index); redraw(); } }) : null,
      el("span", { class: "key", style: { background: colour(index) } }), group.label))));
}

const withError = (value, error) => error === null || error === undefined ? figure(value) : `${figure(value)} ± ${figure(error)}`;

function gaps() {
  const wide = data.runs.filter(run => run.gap);
  return wide.length ? [el("div", { class: "card below", role: "note", id: "gaps" }, el("b", {}, "Evaluations far below the training"),
    wide.map(run => el("p", { class: "small" }, `${run.name}: ${run.gap.evidence}.`)),
    el("p", { class: "small soft" }, `Why: ${wide[0].gap.reason}. What to do: ${wide[0].gap.remedy}.`))] : [];
}

function tiles() {
  const tile = (name, value, note) => el("div", { class: "card tile" }, el("span", { class: "soft small" }, name), el("b", {}, value), el("span", { class: "soft small" }, note));
  const highest = (runs, value) => runs.reduce((most, run) => !most || value(run) > value(most) ? run : most, null);
  const best = highest(data.runs.filter(run => run.best !== null), run => run.best), scored = data.runs.filter(run => run.score);
  const maximum = run => `best evaluation ${figure(run.best)}, the highest of ${run.evaluations} evaluations${run.episodes_each ? ` of ${run.episodes_each} episodes each` : ""}`;
  const ofSeeds = () => tile("Score of the best policies", figure(scored.reduce((sum, run) => sum + run.score.mean, 0) / scored.length), `mean of ${scored.length} runs, ${scored[0].score.episodes} fresh episodes each`);
  const ofRun = run => tile("Score of the best policy", withError(run.score.mean, run.score.standard_error), `${run.name}: ${run.score.episodes} fresh episodes, ± standard error; ${maximum(run)}`);
  const score = () => scored.length > 1 && !several ? ofSeeds() : scored.length ? ofRun(highest(scored, run => run.score.mean)) : best ? tile("Best evaluation", figure(best.best), `${best.name}: ${maximum(best)}`) : null;
  const total = (name, runs = data.runs) => runs.reduce((sum, run) => sum + (run[name] || 0), 0);
  return el("div", { class: "grid", style: { marginTop: "16px" } },
    environments.length > 1 ? tile("Environments", environments.length, environments.join(", ")) : score(),
    environments.length === 1 && best && best.human !== null ? tile("Human-normalised", `${Math.round(100 * best.human)} %`, "last evaluation: 0 % is a random player, 100 % a human") : null,
    tile("Steps", figure(total("steps")), `${figure(total("episodes"))} episodes, ${figure(total("updates"))} updates`),
    tile("Wall time", clock(total("time_s")), `${figure(total("steps") / total("time_s"))} steps/s, all runs together`));
}

function learning() {
  const of = env => data.runs.filter(run => run.env === env);
  const charts = environments.flatMap(env => Object.entries(RETURNS).filter(([tag]) => tagsOf(of(env)).has(tag)).map(([tag, [title, unit]]) =>
    chartOf(data, tag, [environments.length > 1 ? `${env}: ${title.toLowerCase()}` : title, unit], () => of(env), 300)));
  const downsampled = data.runs.find(run => run.series.each > 1);
  return section("Learning curves", el("div", { class: "grid wide" }, charts), el("p", { class: "small soft" },
    data.runs.length > data.groups.length ? "Thin lines are single seeds as logged. The band covers the range from the lowest to the highest seed and the thick line is their mean, where data of all seeds are available. " : "",
    "Smoothing changes only the thick line, and not evaluations, counts or schedules: the thin line shows the logged values.",
    downsampled ? ` In long runs each point is the mean of up to ${Math.max(...data.runs.map(run => run.series.each))} records.` : ""));
}

function whisker(row, name, rows, form) {  // interval on a scale that is shared by rows of one kind
  const ends = rows.flatMap(each => [each[name], each[`${name}_low`], each[`${name}_high`]]).filter(value => value !== null && value !== undefined);
  let [low, high] = [Math.min(...ends), Math.max(...ends)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * .1, high + (Math.abs(high) || 1) * .1];
  const place = value => 22 + (value - low) / (high - low) * 136, ink = row.group === null ? "var(--ink)" : colour(row.group);
  return svg("svg", { class: "whisker", width: 180, height: 34, role: "img", "aria-label": `${form(row[name])} on a scale from ${form(low)} to ${form(high)}` },
    svg("line", { x1: 22, x2: 158, y1: 18, y2: 18, stroke: "var(--line)" }),
    ticks(low, high, 2).map(([value, text]) => [svg("line", { x1: place(value), x2: place(value), y1: 18, y2: 22, stroke: "var(--soft)" }),
      svg("text", { x: place(value), y: 32, "text-anchor": "middle" }, form === figure ? text : form(value))]),
    row[`${name}_low`] !== null ? svg("line", { x1: place(row[`${name}_low`]), x2: place(row[`${name}_high`]), y1: 9, y2: 9, stroke: ink, "stroke-width": 3, opacity: .5 }) : null,
    svg("circle", { cx: place(row[name]), cy: 9, r: 5, fill: ink }));
}

const FEW_SEEDS = 5;
const percent = value => `${Math.round(100 * value)} %`;

function intervalOf(row, name, form) {
  const low = row[`${name}_low`], few = row.fewest < FEW_SEEDS ? el("span", { class: "soft small few" }, "few seeds") : null;
  return low === undefined || row[name] === undefined ? "–" : low === null ? "one seed" : [`${form(low)} to ${form(row[`${name}_high`])}`, few];
}

function scoreCells(row, human) {  // [name of the column, content, true if it is a number]
  const name = human ? "human" : "score", known = row[name] !== undefined, alike = data.scores.filter(each => each[name] !== undefined && (human || each.env === row.env));
  return [["environment", row.env], ["seeds", row.seeds, true], ["IQM", row.score === undefined ? "–" : figure(row.score), true], ["95 % interval", intervalOf(row, "score", figure), true],
    ...(human ? [["human-normalised IQM", known ? percent(row.human) : "–", true], ["human-normalised 95 % interval", intervalOf(row, "human", percent), true]] : []),
    [human ? "human-normalised with interval" : "IQM with interval", known ? whisker(row, name, alike, human ? percent : figure) : "–"], ["last evaluations", row.finals.map((value, index) => withError(value, row.errors[index])).join(", ") || "–"],
    ...(data.scores.some(each => each.fresh.length) ? [["best policies, fresh episodes", row.fresh.map(score => withError(score.mean, score.standard_error)).join(", ") || "–"]] : [])];
}

function scores() {
  if (!data.scores.length) return null;
  const human = data.scores.some(row => row.human !== undefined), rows = data.scores.map(row => [row, scoreCells(row, human)]);
  const fresh = data.scores.flatMap(row => row.fresh.map(score => score.episodes));
  const span = (counts, unit) => { const known = [...new Set(counts.filter(Boolean))].sort((a, b) => a - b); return known.length ? ` (${known.join(" or ")} ${unit})` : ""; };
  const few = data.scores.some(row => row.fewest < FEW_SEEDS && (row.score_low != null || row.human_low != null));
  return section("Scores", el("div", { class: "scroll" }, el("table", { id: "score-table" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "configuration"),
      rows[0][1].map(([text, , number]) => el("th", { scope: "col", class: number ? "number" : null }, text)))),
    el("tbody", {}, rows.map(([row, cells]) => el("tr", {}, el("th", { scope: "row" }, row.label),
      cells.map(([text, content, number]) => el("td", { "data-label": text, class: number ? "number" : null }, content))))))),
    few ? el("p", { class: "small", id: "few-seeds" }, `Few seeds: with fewer than ${FEW_SEEDS} the interval is too narrow to trust.`) : null,
    el("p", { class: "small soft" }, `The score of a seed is its last evaluation${span(data.runs.map(run => run.episodes_each), "episodes")}, ± standard error. `,
      fresh.length ? `The best policy of a seed was scored by fresh episodes after the training${span(fresh, "each")}, since its best evaluation is the highest of several and thus too high. ` : "", "IQM is the mean of the middle half of the seeds; the interval is a stratified bootstrap over seeds, 2,000 resamples. ",
      human ? "Human-normalised: 0 % is a random player, 100 % a human tester (Wang et al. 2016)." : ""));
}

function videos() {
  const shown = data.runs.flatMap(run => run.films.map(film => ({ run, film })));
  if (!shown.length) return null;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const seen = new IntersectionObserver(entries => entries.forEach(({ target, isIntersecting }) => {
    if (isIntersecting && !calm) target.play().catch(() => {}); else target.pause(); }), { threshold: .3 });
  return section("Videos", el("div", { class: "grid" }, shown.map(({ run, film }) => {
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
  const limited = data.runs.filter(run => run.verdict);
  if (!limited.length) return null;
  return section("What limited the runs", el("div", { class: "grid wide" }, limited.map(run => el("div", { class: "card" },
    el("h3", {}, run.name), limitStrip(run), el("details", {}, el("summary", {}, `At the end: limited by ${run.verdict[0]}`),
      el("p", { class: "small" }, run.verdict[1], "."), el("p", { class: "small soft" }, `Remedy: ${run.verdict[2]}.`))))));
}

function others() {  // any tag, including those of an agent
  const known = [...tagsOf(data.runs)].sort();
  let tag = known.includes("train/loss") ? "train/loss" : known[0];
  const chart = new Chart(() => ({ title: tag, ...axis(tag), curves: curvesOf(data, tag, data.runs) }), 260);
  view.charts.push(chart);
  return section("Any metric", el("p", {}, el("label", {}, "tag ", el("select", { id: "any", onchange: event => { tag = event.target.value; chart.draw(); } },
    known.map(name => el("option", { selected: name === tag }, name))))), chart.node);
}

const broken = key => key.split(/(?<=[._])/).flatMap(part => [part, el("wbr")]);  // possible line breaks

function configuration() {
  if (!data.config.length) return null;
  const body = el("tbody"), only = el("input", { type: "checkbox", checked: several, onchange: () => fill() });
  const find = el("input", { type: "search", placeholder: "search keys and values", "aria-label": "search keys and values", oninput: () => fill() });
  const fill = () => body.replaceChildren(...data.config.filter(row => (!only.checked || row.differs) &&
    [row.key, ...row.values].some(text => text.toLowerCase().includes(find.value.toLowerCase()))).map(row =>
    el("tr", { class: row.differs ? "differs" : null }, el("th", { scope: "row", class: "mono" }, broken(row.key)), row.values.map(value => el("td", { class: "mono" }, value)))));
  fill();
  const keys = [el("p", { class: "tools" }, find, several ? el("label", {}, only, "only differences") : null),
    el("div", { class: "scroll config" }, el("table", { id: "config-table" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "key"),
      data.groups.map(group => el("th", { scope: "col" }, group.label)))), body))];
  return section("Configuration", several ? keys : el("details", {}, el("summary", {}, `${data.config.length} keys`), keys));
}

function origins() {
  const all = data.runs.flatMap(run => run.attempts), uneven = key => new Set(all.map(attempt => attempt[key] || "")).size > 1;
  const marked = key => uneven(key) && !["started", "command", "folder", "resumed from"].includes(key);
  return section("Provenance", data.runs.map(run => el("details", { class: "card origin", open: data.runs.length === 1 },
    el("summary", {}, el("b", {}, run.name), ` · ${run.state} · ${figure(run.steps)} steps in ${clock(run.time_s)}`),
    run.attempts.map(attempt => el("dl", {}, Object.entries(attempt).map(([key, value]) =>
      [el("dt", {}, key), el("dd", { class: "mono" }, marked(key) ? el("mark", {}, value) : value)]))))));
}

const sections = [learning(), scores(), videos(), bottlenecks(), ...panelSections(data, runs).map(([title, charts]) => section(title, el("div", { class: "grid" }, charts))),
  others(), configuration(), origins()].filter(Boolean);
document.getElementById("page").replaceChildren(header(), el("nav", { "aria-label": "Sections" }, sections.map(part => {
  const heading = part.querySelector("h2");
  return el("a", { href: `#${heading.id}` }, heading.textContent);
})), tiles(), ...gaps(), controls(), ...sections);
redraw();
