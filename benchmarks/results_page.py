"""The text of docs/results.md: every learning row of the committed results, wins and losses alike; for figures.py."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import evidence
from evidence import (
    RESULTS,
    ROOT,
    agent_of,
    as_it_is,
    command_of,
    commits_of,
    fast_runs,
    figure,
    quoted,
    read,
    runs_of,
    settings_of,
    version_of,
)
from learn import MATRIX

from qfleet.runconfig.resolution import recipe_names

PAGE = ROOT / "docs" / "results.md"
TITLES = {"learn": "CartPole, Catch, Pendulum", "learn_control": "Continuous control",
          "learn_memory": "Tasks that need memory or curiosity",
          "learn_chain": "Wiring: every algorithm in every place"}
PLACES = {"pong_family.json": "Pong, agent by agent", "sources_games.json": "Beside the sources' games",
          "sources_figures.json": "Beside the sources' figures"} | {
              f"{stem}.json": title for stem, title in TITLES.items()}
"""File -> the heading under which its rows stand; those of other files are beside published scores."""
BESIDE = "Beside published scores"
IDLE = "not run at length here; runs for a few steps in CI"

HEAD = """# Results

<!-- Written by `make figures` from benchmarks/results: change those, and run it again. -->

What was trained, on how many seeds, and what came of it. A seed counts as solved when the mean return of 20 fresh
greedy episodes of its best policy, played after training, reaches the threshold within the step budget of the recipe.
The page is written by `make figures` from the files in `benchmarks/results`, failures included; a test fails if it is
not up to date. A row of the tables from CartPole on is trained again, its seeds one after the other, by

```console
$ python benchmarks/learn.py --only "ROW" --out runs/again.json
```

(without `--out` it goes on with the committed file, and skips the seeds that are in it). Rows of `tcp+tls` are for
fleets whose only actor joins over TCP: that command starts it, too, while the one in the table needs `--token-file` and
an actor that joins. Other tables name their own commands.

Commands of results that were recorded with qfleet 0.1 use the keys of that version. The tables from CartPole on show
the commands of this version.

Speed and memory are on [another page](benchmarks.md).
"""


def page() -> str:
    files = sorted(RESULTS.glob("learn*.json"), key=lambda path: (list(TITLES).index(path.stem)
                                                                  if path.stem in TITLES else 99, path.stem))
    seen: set[str] = set()
    tables = [line for path in files for line in learning(path, seen)]
    return "\n".join([HEAD, *recipes(), *published(), *pong(), *sources(), *tables, *made()]).rstrip() + "\n"


def recipes() -> Iterator[str]:
    """Every recipe, and the rows that train it."""
    yield "## Recipe by recipe\n"
    yield ("What of this page was trained by each recipe, as it is or with other settings. Every recipe is also run "
           "for a few hundred steps in CI (`tests/system/test_recipes_run.py`), which shows that it runs, not that it "
           "learns.\n")
    yield "| recipe | as it is, but for how it is judged | with other settings |"
    yield "|---|---|---|"
    found: dict[str, list[evidence.Row]] = {name: [] for name in recipe_names()}
    for row in evidence.rows():
        found[row.recipe].append(row)
    for name, rows in found.items():
        plain = [row for row in rows if as_it_is(row.settings)]
        cells = [told(plain), told([row for row in rows if row not in plain])] if rows else [IDLE, "-"]
        yield f"| [`{name}`](../qfleet/recipes/{name}.yaml) | {' | '.join(cells)} |"
    yield ""


def told(rows: list[evidence.Row]) -> str:
    """Rows by the heading where they stand; many of one heading in sum."""
    parts = []
    for title, some in groupby(rows, key=lambda row: PLACES.get(row.file, BESIDE)):
        group = list(some)
        words = "; ".join(f"{row.name.removeprefix('qfleet_')}: {row.outcome}" for row in group)
        if len(group) > 4:
            words = f"{len(group)} rows" + (f", {sum(row.solved for row in group)} of {sum(row.runs for row in group)} "
                                            "runs reached their threshold" if all(row.runs for row in group) else "")
        parts.append(f"{words} ([{title}](#{slug(title)}))")
    return "; ".join(parts) or "-"


def slug(heading: str) -> str:
    """The anchor that is made of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def learning(path: Path, seen: set[str]) -> Iterator[str]:
    """One file of the learning matrix as a table; rows that a table above has `seen` are older ones."""
    data = json.loads(path.read_text())
    runs = [run for row in data["rows"].values() for run in row]
    solved = sum(run["mean_reward"] >= MATRIX[name][1] for name, row in data["rows"].items() if name in MATRIX
                 for run in row)
    counted = sum(len(row) for name, row in data["rows"].items() if name in MATRIX)
    yield f"## {TITLES.get(path.stem, path.stem)}\n"
    raw = f"[Raw data](../benchmarks/results/{path.name})."
    yield f"{made_with(data['machine'], runs)} {raw} {data.get('note', '')}".rstrip()
    yield f"\n{solved} of {counted} runs reached their threshold.\n"
    yield "| row | threshold | solved | steps, median of the solved | score: mean over seeds (worst) | command |"
    yield "|---|---|---|---|---|---|"
    for name, row in data["rows"].items():
        again = ", an earlier time" if name in seen else ""
        yield f"| {' | '.join([name + again, *cells(name, row)])} |"
    seen.update(data["rows"])
    yield ""


def cells(name: str, row: list[dict[str, Any]]) -> list[str]:
    scores = [run["mean_reward"] for run in row]
    score = f"{figure(statistics.fmean(scores))} ({figure(min(scores))})" if row else "-"
    if name not in MATRIX:
        return ["-", f"{len(row)} seeds", "-", score, "a row of an earlier matrix"]
    recipe, goal, overrides = MATRIX[name]
    steps = [run["steps"] for run in row if run["mean_reward"] >= goal]
    words = " ".join(["qfleet train", recipe, *(quoted(word) for word in overrides)]).replace("|", "\\|")
    words = words.replace(" joined", " actors=1 --no-local-actors --listen 127.0.0.1:4440 --token-file token")
    return [f"{goal:g}", f"{len(steps)} of {len(row)}", f"{statistics.median(steps):,.0f}" if steps else "-", score,
            f"`{words}`"]


def published() -> Iterator[str]:
    """What others have published, beside ours where there is one."""
    yield f"## {BESIDE}\n"
    yield ("Ours is the mean over seeds: for Atari, of the 30 games that the best policy played after training, or, "
           "where a seed has none, of its last evaluation; elsewhere of the last evaluation that all seeds have; with "
           "the number of decisions until then. Ours is not always the agent of the paper: its recipe and what it is "
           "made of stand beside it. No run was nearly as long as those of the papers: compare the columns of "
           "decisions before those of scores.\n")
    yield "| environment | theirs | their score and protocol | ours | our recipe and agent | decisions | seeds |"
    yield "|---|---|---|---|---|---|---|"
    rows = json.loads((ROOT / "benchmarks" / "published.json").read_text())
    for row in rows:
        score = row["score"]
        if isinstance(score, str):  # of somebody whom we have run ourselves
            score = statistics.fmean(found for found, _ in runs_of(*score.split()))
        theirs = f"{'no score by game' if score is None else figure(score)}, {row['protocol']}"
        yield f"| {row['environment']} | {row['who']} | {theirs} | {' | '.join(ours(row['ours']))} |"
    yield ""


def made() -> Iterator[str]:
    """How every file of this page was made."""
    yield "## How the data was made\n"
    yield ("Where rows of a file were made by several calls, machine and versions are those of the newest. The commit "
           "is that of the code, with a + where it had been changed since; older data did not write it down.\n")
    yield "| data | made by | on | with | commit |"
    yield "|---|---|---|---|---|"
    rows = json.loads((ROOT / "benchmarks" / "published.json").read_text())
    shown = [row["ours"][0] for row in rows if row["ours"] and runs_of(*row["ours"])]
    for file in dict.fromkeys([*shown, *(name for name in PLACES if (RESULTS / name).exists())]):
        machine = documented(file)
        command = machine["command"] if isinstance(machine["command"], str) else machine["command"][-1]
        with_ = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
        yield (f"| [{file}](../benchmarks/results/{file}) | `python {command}` | {machine_words(machine)} "
               f"| Python {machine['python']}, {with_} | {commits_of(file)} |")
    yield ""


def documented(file: str) -> dict[str, Any]:
    """Machine, versions and command of a result file; of several runs, of the last that we show."""
    if file.endswith(".jsonl"):
        return fast_runs()[-1]
    machine: dict[str, Any] = read(file)["machine"]
    return machine


def ours(place: list[str] | None) -> list[str]:
    found = runs_of(*place) if place else []
    if place is None or not found:
        return ["not run yet", "-", "-", "-"]
    scores = [score for score, _ in found]
    worst = f" (worst {figure(min(scores))})" if len(scores) > 1 else ""
    link = f"[{figure(statistics.fmean(scores))}](../benchmarks/results/{place[0]}){worst}"
    settings = settings_of(*place) or ()
    agent = f"`{settings[0]}`{'' if as_it_is(settings) else ' with other settings'}: {agent_of(settings)}"
    return [link, agent, f"{max(steps for _, steps in found):,}", str(len(found))]


def pong() -> Iterator[str]:
    """All runs of pong_family.py, failures and runs with other settings included."""
    data = read("pong_family.json")
    yield f"## {PLACES['pong_family.json']}\n"
    yield ("Every run of `python benchmarks/pong_family.py`, which is for a machine with a GPU (on two cores a run "
           "takes days), those that failed or were ended included, but for trials of less than a minute "
           "([raw data](../benchmarks/results/pong_family.json), [curves](values.md#measured)). The score is that of "
           f"{data['games']} whole games of the best policy, played after training, greedily, without sticky actions; "
           "often only a few of them differ by more than their no-ops ([how many](values.md#measured)), so that their "
           "mean says little of other games. The command has the settings that "
           "differ from the recipe, but for those of files, with the keys of the version that recorded the run; a run "
           "ended at its `stop_at` or when its time was up.\n")
    yield "| row | agent | decisions | seeds | score | version | commit | command |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in data["rows"]:
        settings = settings_of("pong_family.json", name) or ()
        runs = evidence.runs_in(data["rows"][name])
        version = ", ".join(dict.fromkeys(version_of(run) for run in runs))
        commits = ", ".join(dict.fromkeys(run.get("commit") or "not recorded" for run in runs))
        steps = f"{max(run['steps'] for run in runs):,}"
        yield (f"| {name} | {agent_of(settings)} | {steps} | {len(runs)} | {judged(runs)} | {version} | {commits} | "
               f"`{command_of(runs[0])}` |")
    yield ""


def judged(runs: list[dict[str, Any]]) -> str:
    """Of fresh games; else of the last evaluation, or what training returned last."""
    words = []
    for run in runs:
        if "games" in run:
            words.append(figure(run["games"]["mean_reward"]))
        elif run["curve"]:
            words.append(f"{figure(run['curve'][-1][1])} in its last evaluation, no games afterwards")
        else:
            words.append(f"never evaluated; training returned {figure(run['training'][-1][1])} in the end"
                         if run["training"] else "never evaluated")
    return ", ".join(words)


def sources() -> Iterator[str]:
    """Pictures beside those of the systems that this one grew from, and how far each of our runs went."""
    told = {"figures": "pytorch-distributed's and Gorila's pictures of Pong, by learner updates and by episodes as "
                       "they drew them; theirs is read off the pictures. One run of each that is in the table, those "
                       "of pytorch-distributed all at once, stopped by the clock; what is not in the table was not "
                       "run. Our learners make an update for a fixed number of steps, where nothing paced theirs.",
            "games": "rainbow-with-ray's games and agents, and Breakout, with settings for minutes: one run of each, "
                     "four at a time on one GPU for eight minutes, about a hundredth of the 200 million decisions "
                     "after which rainbow-with-ray has the scores that are drawn dotted; those of Breakout are of the "
                     "papers."}
    for kind, text in told.items():
        path = RESULTS / f"sources_{kind}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        yield f"## Beside the sources' {kind}\n"
        yield f"{text} `python {data['machine']['command']}` on {machine_words(data['machine'])}.\n"
        yield f"![Ours beside theirs](assets/sources_{kind}.png)\n"
        yield "| run | decisions | updates | episodes | seconds | last evaluation | best |"
        yield "|---|---|---|---|---|---|---|"
        for name, row in data["rows"].items():
            scores = [score for _, score, _ in row["curve"]]
            ends = [figure(scores[-1]), figure(max(scores))] if scores else ["-", "-"]
            clocks = [f"{row[clock]:,.0f}" for clock in ("steps", "updates", "episodes", "seconds")]
            yield f"| {' | '.join([name, *clocks, *ends])} |"
        yield ""
        for name, row in data["rows"].items():
            if "machine" in row:
                yield f"{name}: `python {row['machine']['command']}` on {machine_words(row['machine'])}.\n"


def machine_words(machine: dict[str, Any]) -> str:
    parts = [machine.get("gpu"), machine["cpu"], f"{machine['cores']} cores", machine["date"]]
    return ", ".join(part for part in parts if part)


def made_with(machine: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    cpus = dict.fromkeys([*(run["cpu"] for run in runs if "cpu" in run), machine["cpu"]])
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (f"{' and '.join(cpus)}, {machine['cores']} cores, no GPU, {machine['date']}; Python {machine['python']}, "
            f"{versions}.")

