"""The text of docs/results.md: every learning row of the committed results, wins and losses alike; for figures.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from learn import MATRIX

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
TITLES = {"learn": "CartPole, Catch, Pendulum", "learn_memory": "Tasks that need memory or curiosity",
          "learn_chain": "Wiring: every algorithm in every place"}

HEAD = """# Results

<!-- Written by `make figures` from benchmarks/results: change those, and run it again. -->

What was trained, on how many seeds, and what came of it. A seed counts as solved when the mean return of 20 fresh
greedy episodes of its best policy, played after training, reaches the threshold within the step budget of the recipe.
The page is written by `make figures` from the files in `benchmarks/results`, failures included; a test fails if it is
not up to date. A row is trained again, its seeds one after the other, by

```console
$ python benchmarks/learn.py --only "ROW"
```

Speed and memory are on [another page](benchmarks.md).
"""


def page() -> str:
    files = sorted(RESULTS.glob("learn*.json"), key=lambda path: (list(TITLES).index(path.stem)
                                                                  if path.stem in TITLES else 99, path.stem))
    tables = [line for path in files for line in learning(path)]
    return "\n".join([HEAD, *published(), *sources(), *tables]).rstrip() + "\n"


def learning(path: Path) -> Iterator[str]:
    """One file of the learning matrix as a table."""
    data = json.loads(path.read_text())
    runs = [run for row in data["rows"].values() for run in row]
    solved = sum(run["mean_reward"] >= MATRIX[name][1] for name, row in data["rows"].items() if name in MATRIX
                 for run in row)
    counted = sum(len(row) for name, row in data["rows"].items() if name in MATRIX)
    yield f"## {TITLES.get(path.stem, path.stem)}\n"
    raw = f"[Raw data](../benchmarks/results/{path.name})."
    yield f"{made_with(data['machine'], runs)} {raw} {data.get('notes', '')}".rstrip()
    yield f"\n{solved} of {counted} runs reached their threshold.\n"
    yield "| row | threshold | solved | steps, median of the solved | score: mean over seeds (worst) | command |"
    yield "|---|---|---|---|---|---|"
    for name, row in data["rows"].items():
        yield f"| {' | '.join([name, *cells(name, row)])} |"
    yield ""


def cells(name: str, row: list[dict[str, Any]]) -> list[str]:
    scores = [run["mean_reward"] for run in row]
    score = f"{figure(statistics.fmean(scores))} ({figure(min(scores))})" if row else "-"
    if name not in MATRIX:
        return ["-", f"{len(row)} seeds", "-", score, "a row of an earlier matrix"]
    recipe, goal, overrides = MATRIX[name]
    steps = [run["steps"] for run in row if run["mean_reward"] >= goal]
    words = " ".join(["qfleet train", recipe, *(quoted(word) for word in overrides)]).replace("|", "\\|")
    words = words.replace(" joined", " --no-local-actors --listen 127.0.0.1:4440 --token-file token")
    return [f"{goal:g}", f"{len(steps)} of {len(row)}", f"{statistics.median(steps):,.0f}" if steps else "-", score,
            f"`{words}`"]


def published() -> Iterator[str]:
    """What others have published, beside ours where there is one, and how ours was made."""
    yield "## Beside published scores\n"
    yield ("Ours is the mean over seeds: for Atari, of the 30 games that the best policy played after training, or, "
           "where a seed has none, of its last evaluation; elsewhere of the last evaluation that all seeds have; with "
           "the number of decisions until then. No run was nearly as long as those of the papers: compare the columns "
           "of decisions before those of scores.\n")
    yield "| environment | theirs | their score and protocol | ours | decisions | seeds |"
    yield "|---|---|---|---|---|---|"
    rows = json.loads((ROOT / "benchmarks" / "published.json").read_text())
    for row in rows:
        score = row["score"]
        if isinstance(score, str):  # of somebody whom we have run ourselves
            score = statistics.fmean(found for found, _ in runs_of(*score.split()))
        theirs = f"{'no score by game' if score is None else figure(score)}, {row['protocol']}"
        yield f"| {row['environment']} | {row['who']} | {theirs} | {' | '.join(ours(row['ours']))} |"
    yield ""
    yield "| data | made by | on | with |"
    yield "|---|---|---|---|"
    for file in dict.fromkeys(row["ours"][0] for row in rows if row["ours"] and runs_of(*row["ours"])):
        machine = documented(file)
        command = machine["command"] if isinstance(machine["command"], str) else machine["command"][-1]
        with_ = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
        yield (f"| [{file}](../benchmarks/results/{file}) | `python {command}` | {machine_words(machine)} "
               f"| Python {machine['python']}, {with_} |")
    yield ""


def documented(file: str) -> dict[str, Any]:
    """Machine, versions and command of a result file; of several runs, of the last that we show."""
    if file.endswith(".jsonl"):
        return _fast_runs()[-1]
    machine: dict[str, Any] = json.loads((RESULTS / file).read_text())["machine"]
    return machine


def ours(place: list[str] | None) -> list[str]:
    found = runs_of(*place) if place else []
    if place is None or not found:
        return ["not run yet", "-", "-"]
    scores = [score for score, _ in found]
    told = place[1].removeprefix("qfleet_") + (f", worst {figure(min(scores))}" if len(scores) > 1 else "")
    link = f"[{figure(statistics.fmean(scores))}](../benchmarks/results/{place[0]}) ({told})"
    return [link, f"{max(steps for _, steps in found):,}", str(len(found))]


def runs_of(file: str, name: str) -> list[tuple[float, int]]:
    """Score and steps of every seed."""
    if not (RESULTS / file).exists():
        return []
    if file.endswith(".jsonl"):
        return [(run["games"]["mean_reward"] if isinstance(run["games"], dict) else run["judged"][-1][2], run["steps"])
                for run in _fast_runs() if run["judged"]]
    found = json.loads((RESULTS / file).read_text())["rows"].get(name, [])
    runs = found if isinstance(found, list) else [found]  # one run, or one for each seed
    if all("games" in run for run in runs):
        return [(run["games"]["mean_reward"], run["steps"]) for run in runs]
    if all("mean_reward" in run for run in runs):
        return [(run["mean_reward"], run["steps"]) for run in runs]
    curves = [run["evaluations"] if "evaluations" in run else run["curve"] for run in runs]
    count = min(len(curve) for curve in curves)
    return [(curve[count - 1][1], curve[count - 1][0]) for curve in curves] if count else []


def _fast_runs() -> list[dict[str, Any]]:
    """The newest runs of `pong-fast` as it is, one for each seed."""
    records = [json.loads(line) for line in (RESULTS / "fast_speed.jsonl").read_text().splitlines()]
    runs = {run["seed"]: run for run in records if run["kind"] == "pong" and run.get("recipe") == "pong-fast"
            and not run["set"]}
    return list(runs.values())


def sources() -> Iterator[str]:
    """Pictures beside those of the systems that this one grew from, and how far each of our runs went."""
    told = {"figures": "pytorch-distributed's and Gorila's pictures of Pong, by learner updates and by episodes as "
                       "they drew them; theirs is read off the pictures. One run of each that is in the table, all at "
                       "once, stopped by the clock; what is not in the table was not run. Our learners make an update "
                       "for a fixed number of steps, where nothing paced theirs.",
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


def machine_words(machine: dict[str, Any]) -> str:
    parts = [machine.get("gpu"), machine["cpu"], f"{machine['cores']} cores", machine["date"]]
    return ", ".join(part for part in parts if part)


def made_with(machine: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    cpus = dict.fromkeys([*(run["cpu"] for run in runs if "cpu" in run), machine["cpu"]])
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (f"{' and '.join(cpus)}, {machine['cores']} cores, no GPU, {machine['date']}; Python {machine['python']}, "
            f"{versions}.")


def quoted(word: str) -> str:
    return f"'{word}'" if any(letter in word for letter in " {}[]") else word


def figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
