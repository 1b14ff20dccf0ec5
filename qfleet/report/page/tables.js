"use strict";
// Tables of the report: scores, configuration, provenance. Functions only; report.js calls them.

// ---- Scores ----

const FEW_SEEDS = 5;

function whisker(row, name, rows, form) {  // interval on a scale that is shared by rows of one kind
  const ends = rows.flatMap(each => [each[name], each[`${name}_low`], each[`${name}_high`]]).filter(value => value !== null && value !== undefined);
  let [low, high] = [Math.min(...ends), Math.max(...ends)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * .1, high + (Math.abs(high) || 1) * .1];
  const place = value => 22 + (value - low) / (high - low) * 136, ink = row.group === null ? "var(--ink)" : colour(row.group);
  const label = `${form(row[name])} on a scale from ${form(low)} to ${form(high)}`, [from, to] = [row[`${name}_low`], row[`${name}_high`]];
  return svg("svg", { class: "whisker", width: 180, height: 34, role: "img", "aria-label": label },
    svg("line", { x1: 22, x2: 158, y1: 18, y2: 18, stroke: "var(--line)" }),
    ticks(low, high, 2).map(([value, text]) => [svg("line", { x1: place(value), x2: place(value), y1: 18, y2: 22, stroke: "var(--soft)" }),
      svg("text", { x: place(value), y: 32, "text-anchor": "middle" }, form === figure ? text : form(value))]),
    from !== null ? svg("line", { x1: place(from), x2: place(to), y1: 9, y2: 9, stroke: ink, "stroke-width": 3, opacity: .5 }) : null,
    svg("circle", { cx: place(row[name]), cy: 9, r: 5, fill: ink }));
}

function intervalOf(row, name, form) {
  const low = row[`${name}_low`], few = row.fewest < FEW_SEEDS ? el("span", { class: "soft small few" }, "few seeds") : null;
  if (low === undefined || row[name] === undefined) return "–";
  return low === null ? "one seed" : [`${form(low)} to ${form(row[`${name}_high`])}`, few];
}

function scoreCells(row, human) {  // [name of the column, content, true if it is a number]
  const name = human ? "human" : "score", known = row[name] !== undefined;
  const alike = data.scores.filter(each => each[name] !== undefined && (human || each.env === row.env));
  const drawn = known ? whisker(row, name, alike, human ? percent : figure) : "–";
  const last = row.finals.map((value, index) => withError(value, row.errors[index])).join(", ") || "–";
  const fresh = row.fresh.map(score => withError(score.mean, score.standard_error)).join(", ") || "–";
  return [["environment", row.env], ["seeds", row.seeds, true], ["IQM", row.score === undefined ? "–" : figure(row.score), true],
    ["95 % interval", intervalOf(row, "score", figure), true],
    ...(human ? [["human-normalised IQM", known ? percent(row.human) : "–", true],
      ["human-normalised 95 % interval", intervalOf(row, "human", percent), true]] : []),
    [human ? "human-normalised with interval" : "IQM with interval", drawn], ["last evaluations", last],
    ...(data.scores.some(each => each.fresh.length) ? [["best policies, fresh episodes", fresh]] : [])];
}

function scoreTable(human) {
  const rows = data.scores.map(row => [row, scoreCells(row, human)]);
  const head = rows[0][1].map(([text, , number]) => el("th", { scope: "col", class: number ? "number" : null }, text));
  const label = row => [row.group === null ? null : lineSample(row.group, several), " ", row.label];
  return el("div", { class: "scroll" }, el("table", { id: "score-table" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "configuration"), head)),
    el("tbody", {}, rows.map(([row, cells]) => el("tr", { "data-group": row.group }, el("th", { scope: "row" }, label(row)),
      cells.map(([text, content, number]) => el("td", { "data-label": text, class: number ? "number" : null }, content)))))));
}

function scores() {
  if (!data.scores.length) return null;
  const human = data.scores.some(row => row.human !== undefined);
  const fresh = data.scores.flatMap(row => row.fresh.map(score => score.episodes));
  const span = (counts, unit) => {
    const known = [...new Set(counts.filter(Boolean))].sort((a, b) => a - b);
    return known.length ? ` (${known.join(" or ")} ${unit})` : "";
  };
  const few = data.scores.some(row => row.fewest < FEW_SEEDS && (row.score_low != null || row.human_low != null));
  return section("Scores", scoreTable(human),
    few ? el("p", { class: "small", id: "few-seeds" }, `Few seeds: with fewer than ${FEW_SEEDS} the interval is too narrow to trust.`) : null,
    el("p", { class: "small soft" }, `The score of a seed is its last evaluation${span(data.runs.map(run => run.episodes_each), "episodes")}, ± standard error. `,
      fresh.length ? `The best policy of a seed was scored by fresh episodes after the training${span(fresh, "each")}, since its best evaluation is the highest of several and thus too high. ` : "",
      "IQM is the mean of the middle half of the seeds; the interval is a stratified bootstrap over seeds, 2,000 resamples. ",
      human ? "Human-normalised: 0 % is a random player, 100 % a human tester (Wang et al. 2016)." : ""));
}

// ---- Configuration ----

const broken = key => key.split(/(?<=[._])/).flatMap(part => [part, el("wbr")]);  // possible line breaks
const MOST_COLUMNS_OF_GROUPS = 6, MOST_COLUMNS_OF_KEYS = 12;

function keyTable(rows) {  // a row for each key; for many configurations that differ in little, a row for each of them
  const turned = data.groups.length > MOST_COLUMNS_OF_GROUPS && rows.length <= MOST_COLUMNS_OF_KEYS;
  const key = (row, scope) => el("th", { scope, class: "mono" }, broken(row.key)), head = text => el("th", { scope: "col" }, text);
  const cell = (row, index, group) => el("td", { class: "mono", "data-group": group }, row.values[index]);
  if (turned) return [el("thead", {}, el("tr", {}, head("configuration"), rows.map(row => key(row, "col")))),
    el("tbody", {}, data.groups.map(({ label }, index) => el("tr", { "data-group": index },
      el("th", { scope: "row" }, lineSample(index), " ", label), rows.map(row => cell(row, index, null)))))];
  return [el("thead", {}, el("tr", {}, head("key"), data.groups.map(({ label }, index) =>
    el("th", { scope: "col", "data-group": index }, label)))),
  el("tbody", {}, rows.map(row => el("tr", { class: row.differs ? "differs" : null }, key(row, "row"),
    data.groups.map((_, index) => cell(row, index, index)))))];
}

function configuration() {
  if (!data.config.length) return null;
  const table = el("table", { id: "config-table" });
  const only = el("input", { type: "checkbox", checked: several, onchange: () => fill() });
  const find = el("input", { type: "search", placeholder: "search keys and values", "aria-label": "search keys and values", oninput: () => fill() });
  const matches = row => (!only.checked || row.differs) &&
    [row.key, ...row.values].some(text => text.toLowerCase().includes(find.value.toLowerCase()));
  const fill = () => { table.replaceChildren(...keyTable(data.config.filter(matches))); applyHidden(); };
  fill();
  const keys = [el("p", { class: "tools" }, find, several ? el("label", {}, only, "only differences") : null),
    el("div", { class: "scroll config" }, table)];
  return section("Configuration", several ? keys : el("details", {}, el("summary", {}, `${data.config.length} keys`), keys));
}

// ---- Provenance ----

function origins() {
  const all = data.runs.flatMap(run => run.attempts), uneven = key => new Set(all.map(attempt => attempt[key] || "")).size > 1;
  const marked = key => uneven(key) && !["started", "command", "folder", "resumed from"].includes(key);
  const entry = ([key, value]) => [el("dt", {}, key), el("dd", { class: "mono" }, marked(key) ? el("mark", {}, value) : value)];
  return section("Provenance", data.runs.map(run => el("details", { class: "card origin", open: data.runs.length === 1, "data-group": run.group },
    el("summary", {}, el("b", {}, run.name), ` · ${run.state} · ${figure(run.steps)} steps in ${clock(run.time_s)}`),
    run.attempts.map(attempt => el("dl", {}, Object.entries(attempt).map(entry))))));
}
