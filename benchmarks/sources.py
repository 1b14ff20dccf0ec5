"""The figures and scores of the systems that this one grew from, made again here.

    python benchmarks/sources.py figures [--game PongNoFrameskip-v4] [--only "n=5, 8 actors" ...] [--steps 3200000]
    python benchmarks/sources.py games   [--game Asterix ...] [--only "double" "prioritised"] [--steps 30000000]
    options of both: [--seconds 570] [--threads 4] [--jobs 8] [--runs DIR] [--out FILE] [key=value ...]

`figures` makes the curves of pytorch-distributed (2 and 8 actors, n = 1 and 5) and of Gorila with three clients.
Their settings are those of the sources, as far as they say; there nothing paced learner and actors, and here every
actor takes two steps per update. `games` plays those of rainbow-with-ray, and Breakout: double DQN, and with
priorities, with settings for minutes instead of its days (SHORT, below).
With `--seconds` all are stopped when the time is up, each with a checkpoint, and the same command goes on with them; at
most `--jobs` runs at a time, those first that are least far. Rows are saved every half minute, with how far each went.
`make figures` draws them. For a machine with a GPU and 16 cores; a game of another kind (--game toy/Catch-v0) tries it
anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import trials
from trials import Trial, blank

from qfleet.report.plots import COLOURS

KEPT = ("stop_at=null", "run.tensorboard=false", "checkpoint.keep=1", "checkpoint.replay=false", "device=auto")
ATARI = ("env.life_loss=true", "env.protocol=classic")
DISTRIBUTED = (
    "env.lanes=1", "agent.double=false", "agent.dueling=false", "agent.loss=mse", "agent.gamma=0.99",
    "learner.batch_size=128", "learner.learning_rate=1e-4", "learner.target_period_updates=250",
    "learner.publish_period_updates=50", "replay.capacity=50000", "replay.min_steps=5000", "explore.kind=ladder",
    "explore.epsilon=0.4", "explore.steepness=7", "explore.warmup_steps=0", "eval.period_updates=2500",
    "eval.episodes=5", "eval.lanes=5", "eval.epsilon=0", "checkpoint.period_updates=10000", *KEPT)
GORILA = (
    "sync=server", "learners=3", "parameter_server.shards=1", "parameter_server.outlier_deviations=6", "env.lanes=1",
    "agent.double=true", "agent.dueling=true", "agent.n_step=1", "agent.gamma=0.99", "learner.batch_size=32",
    "learner.learning_rate=1e-4", "learner.target_period_updates=50", "replay.capacity=200000",
    "replay.min_steps=10000", "replay.samples_per_insert=32", "explore.kind=linear", "explore.end=0.02",
    "explore.steps=75000", "eval.period_steps=30000", "eval.episodes=5", "eval.lanes=5", "eval.epsilon=0",
    "checkpoint.period_steps=100000", *KEPT)
FIGURES: dict[str, tuple[str, ...]] = {
    f"n={n}, {actors} actors": (*DISTRIBUTED, f"agent.n_step={n}", f"actors={actors}",
                                f"replay.samples_per_insert={64 // actors}")
    for n, actors in ((5, 8), (1, 8), (1, 2))} | {"Gorila, 3 clients": GORILA}
"""In the time of an update their 8 actors bring four times the experience of 2: a step is drawn a quarter as often."""

THEIRS = {"n=5, 8 actors": 75_000, "n=1, 8 actors": 115_000, "n=1, 2 actors": 165_000}
"""Learner updates after which their curves are at about +20 on Pong, read off the picture in their README."""

THEIR_CLIENTS = ((110, 20), (195, -10), (370, 19), (1300, 18))
"""(Episodes of a client, smoothed return) of the turns of Gorila's curve on Pong, read off the picture likewise."""

SHORT = (
    "env.groups=2", "env.lanes=32", "agent.double=true", "agent.norm=layer", "agent.n_step=3", "agent.gamma=0.99",
    "learner.batch_size=256", "learner.learning_rate=1.5e-4", "learner.optimizer_eps=1e-5",
    "learner.target_period_updates=500", "learner.publish_period_updates=4", "replay.capacity=1000000",
    "replay.min_steps=50000", "replay.samples_per_insert=8", "replay.chunk_steps=64", "explore.kind=ladder",
    "explore.epsilon=0.4", "explore.steepness=7", "explore.warmup_steps=50000", "eval.period_steps=250000",
    "eval.process=true", "eval.episodes=30", "eval.lanes=30", "eval.epsilon=0.05", "checkpoint.period_steps=500000",
    "run.log_period_steps=25000", *KEPT)
"""What suits minutes instead of days. Theirs have one-step returns, GroupNorm, one ε that falls over 4 million steps, a
learning rate of 6.25e-5 (with priorities 1.5e-5), and a target network every 10,000 updates: 12 of them in our time."""

AGENTS = {"double": (),
          "prioritised": ("replay.alpha=0.5", "replay.beta_start=0.4", "replay.beta_end=1",
                          "replay.beta_steps=30000000")}
GAMES = ("Asterix", "Zaxxon", "WizardOfWor", "Breakout")


def figures(args: argparse.Namespace) -> list[Trial]:
    game = args.game[0] if args.game else "PongNoFrameskip-v4"
    return [Trial(name, *words_for(game, FIGURES[name])) for name in args.only or FIGURES]


def games(args: argparse.Namespace) -> list[Trial]:
    ids = {game: game if "/" in game else f"{game}NoFrameskip-v4" for game in args.game or GAMES}
    return [Trial(f"{game} {agent}", *words_for(name, (*SHORT, *AGENTS[agent])))
            for game, name in ids.items() for agent in args.only or AGENTS]


def words_for(game: str, words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Recipe and settings; a game that is not Atari's has no lives."""
    if "NoFrameskip" in game:
        return "atari", (f"env.id={game}", *ATARI, *words)
    return "vector", (f"env.id={game}", *words)


KINDS = {"figures": (figures, 3_200_000), "games": (games, 30_000_000)}


def main() -> int:
    kind, words = "".join(sys.argv[1:2]), sys.argv[2:]
    if kind not in KINDS:
        sys.exit(__doc__)
    make, steps = KINDS[kind]
    parser = trials.options(__doc__, f"runs/sources_{kind}", f"benchmarks/results/sources_{kind}.json", steps)
    parser.add_argument("--game", nargs="+")
    parser.add_argument("--only", nargs="+", choices=list(FIGURES if kind == "figures" else AGENTS))
    parser.add_argument("--jobs", type=int, default=8, help="runs at a time")
    args = parser.parse_args(words)
    chosen = sorted(make(args), key=lambda trial: reached(trial, args.runs))
    todo = [trial for trial in chosen if reached(trial, args.runs) < args.steps][:args.jobs]
    rows = trials.run(todo, args)
    for name, row in rows.items():
        last = row["curve"][-1][1] if row["curve"] else float("nan")
        print(f"{name:24} {row['steps']:>11,} steps {row['updates']:>10,} updates {row['episodes']:>7,} episodes "
              f"{row['seconds']:>8,.0f} s  last evaluation {last:.1f}", flush=True)
    return 0 if len(rows) == len(todo) else 1


def reached(trial: Trial, root: Path) -> int:
    told: list[dict[str, Any]] = trial.records(root)
    return int(told[-1]["step"]) if told else 0


def draw_figures(document: dict[str, Any]) -> Any:
    """Their two pictures and ours over them: by learner updates, and by episodes of one client, if there are any."""
    rows, gorila = document["rows"], document["rows"].get("Gorila, 3 clients")
    figure = blank(11 if gorila else 8, 4.2)
    left, *more = figure.subplots(1, 2 if gorila else 1, squeeze=False)[0]
    for colour, (name, theirs) in zip(COLOURS, THEIRS.items(), strict=False):
        left.axvline(theirs / 1000, color=colour, linestyle=":", label=f"{name}: theirs is at about 20")
        if (row := rows.get(name)) is not None:
            left.plot([updates / 1000 for updates, _ in row["curve_clocks"]], [mean for _, mean, _ in row["curve"]],
                      color=colour, label=f"{name}: ours")
    left.set(title="pytorch-distributed: actors and n", xlabel="thousands of learner updates",
             ylabel="return of greedy evaluations")
    for right in more:
        right.plot(*zip(*THEIR_CLIENTS, strict=True), "o:", color=COLOURS[3], label="theirs, its turns")
        episodes = [count / 3 for _, count in gorila["training_clocks"]]
        right.plot(episodes, [mean for _, mean in gorila["training"]], color=COLOURS[0],
                   label="ours, mean of 100 episodes")
        right.set(title="Gorila: a server and 3 clients", xlabel="episodes of a client", ylabel="return while training")
    return dressed(figure)


def draw_games(document: dict[str, Any]) -> Any:
    """Evaluations by decisions, and what was published for far more of them."""
    figure, rows = blank(10, 6.5), document["rows"]
    published = json.loads((Path(__file__).parent / "published.json").read_text())
    for axis, game in zip(figure.subplots(2, 2).flat, GAMES, strict=True):
        for colour, agent in zip(COLOURS, AGENTS, strict=False):
            name = f"{game} {agent}"
            theirs = next(row for row in published if row["ours"] == ["sources_games.json", name])
            axis.axhline(theirs["score"], color=colour, linestyle=":", label=f"{agent}: published")
            if name in rows:
                axis.plot([step for step, _, _ in rows[name]["curve"]], [mean for _, mean, _ in rows[name]["curve"]],
                          color=colour, label=f"{agent}: ours")
        axis.set(title=game, xlabel="decisions", ylabel="return, 30 games, ε 0.05")
    return dressed(figure)


def dressed(figure: Any) -> Any:
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    sys.exit(main())
