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
    """What others have published, beside ours where there is one."""
    yield "## Beside published scores\n"
    yield ("Ours is the mean over seeds of the last evaluation that all of them have, with the number of decisions "
           "until then. Most have not been run here to any length: that is said, not hidden.\n")
    yield "| environment | theirs | their score and protocol | ours | decisions | seeds |"
    yield "|---|---|---|---|---|---|"
    for row in json.loads((ROOT / "benchmarks" / "published.json").read_text()):
        theirs = f"{figure(row['score'])}, {row['protocol']}"
        yield f"| {row['environment']} | {row['who']} | {theirs} | {' | '.join(ours(row['ours']))} |"
    yield ""


def ours(place: list[str] | None) -> list[str]:
    file, name = place or ("none", "")
    found = json.loads((RESULTS / file).read_text())["rows"].get(name, []) if (RESULTS / file).exists() else []
    rows = found if isinstance(found, list) else [found]  # one run, or one for each seed
    curves = [run["evaluations"] if "evaluations" in run else run["curve"] for run in rows]
    if not all(curves) or not curves:
        return ["not run yet", "-", "-"]
    count = min(len(curve) for curve in curves)
    last = [curve[count - 1] for curve in curves]
    scores = [score for _, score, _ in last]
    link = f"[{figure(statistics.fmean(scores))}](../benchmarks/results/{file}) ({name}, worst {figure(min(scores))})"
    return [link, f"{max(step for step, _, _ in last):,}", str(len(rows))]


def sources() -> Iterator[str]:
    """Pictures beside those of the systems that this one grew from, and how far each of our runs went."""
    told = {"figures": "pytorch-distributed and Gorila on Pong, by learner updates and by episodes as they drew them; "
                       "theirs is read off their pictures.",
            "games": "rainbow-with-ray's games and agents, and its scores after 200 million decisions."}
    for kind, text in told.items():
        path = RESULTS / f"sources_{kind}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        yield f"## Beside the sources' {kind}\n"
        yield f"{text} `python benchmarks/sources.py {kind}` on {machine_words(data['machine'])}.\n"
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
