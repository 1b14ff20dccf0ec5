"""Do the agents of the recipes learn Pong? Runs side by side, judged by 30 full games of the best policy of each.

    python benchmarks/pong_family.py [--only rainbow iqn ...] [--steps 3000000] [--seconds 570] [--threads 4] [k=v]

With `--seconds` the runs are stopped when the time is up, each with a checkpoint; the same command goes on with them
where `--runs` is still there. A run ends early when an evaluation reaches 19. Curves and results are written to OUT,
and added to what it holds already. Meant for a machine with a GPU (`device=auto` finds it): on two cores it takes days.
"""

from __future__ import annotations

import sys
from typing import Any

import trials
from trials import Trial, blank

from qfleet.report.plots import COLOURS

GOAL = 18
COMMON = [
    "stop_at=19", "env.lanes=32", "env.groups=2", "replay.capacity=300000", "replay.min_steps=20000",
    "eval.period_steps=50000", "eval.from_return=-10", "eval.episodes=30", "eval.lanes=30",
    "eval.epsilon=0", "eval.max_episode_steps=3500",
    "checkpoint.period_steps=100000", "checkpoint.keep=1", "checkpoint.replay=false", "run.log_period_steps=10000",
    "run.tensorboard=false"]
QUICK = ["learner.batch_size=256", "learner.learning_rate=2e-4", "learner.optimizer_eps=2e-5", "agent.n_step=3",
         "learner.target_period_updates=500", "learner.publish_period_updates=2", "replay.samples_per_insert=16"]
FIVE = [*QUICK, "agent.n_step=5", "agent.norm=layer", "learner.learning_rate=2.5e-4", "learner.optimizer_eps=1e-5"]
"""As `pong-fast` has it."""
CURIOUS = ["env.id=PongNoFrameskip-v4", "agent.arms=4", "explore.arms=4", "agent.beta=0.003",
           "agent.episodic_capacity=7000", "env.stack=4", "env.full_action_space=false", "replay.chunk_steps=160"]
"""Over those of `r2d2`: few arms that are a little curious, and what `r2d2` sees and does."""
SETTINGS: dict[str, list[str]] = {
    "rainbow": [*QUICK, "replay.beta_steps=3000000"],
    "iqn": [*QUICK, "explore.steps=100000"],
    "btr": ["explore.steps=100000", "replay.beta_steps=3000000", "replay.samples_per_insert=8",
            "eval.from_return=-15", "eval.period_steps=60000"],
    "r2d2": ["agent.norm=layer", "agent.gamma=0.99", "agent.n_step=3", "agent.burn_in=4", "agent.unroll=8",
             "agent.stride=4", "replay.alpha=0.6", "replay.samples_per_insert=4", "learner.learning_rate=2.5e-4",
             "learner.optimizer_eps=1e-5", "learner.target_period_updates=250", "learner.publish_period_updates=4",
             "eval.from_return=-16", "eval.period_steps=150000", "checkpoint.period_steps=500000"],
}
SETTINGS |= {"c51": [*FIVE, "explore.steps=100000"], "qrdqn": [*FIVE, "explore.steps=100000"],
             "munchausen": [*FIVE, "explore.steps=100000"], "apex": FIVE,
             "ngu": [*SETTINGS["r2d2"], *CURIOUS],
             "agent57": [*SETTINGS["r2d2"], *CURIOUS, "eval.from_return=-4", "eval.period_steps=75000"]}
"""Over the recipes, whose settings are for 200 million frames of any game: what suits an easy one and a short time."""


def draw(document: dict[str, Any]) -> Any:
    """Returns of training as lines, evaluations as dots."""
    figure = blank(8.6, 4.6)
    axis = figure.subplots()
    for place, (name, row) in enumerate(document["rows"].items()):
        colour, line = COLOURS[place % len(COLOURS)], ("-", "--", ":")[place // len(COLOURS) % 3]
        for points, style, label in ((row["training"], line, name), (row["curve"], "o", None)):
            axis.plot([point[0] for point in points], [point[1] for point in points], style, color=colour,
                      markersize=5, linewidth=1.5, label=label)
    axis.axhline(GOAL, color="0.5", linestyle=":", linewidth=1)
    axis.set(title="Pong: training (lines) and greedy games (dots)", ylabel="return",
             xlabel="environment steps, of 4 frames each")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    return figure


def main() -> int:
    parser = trials.options(__doc__, "runs/pong_family", "benchmarks/results/pong_family.json", 3_000_000)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    args = parser.parse_args()
    rows = trials.run([Trial(name, name, (*COMMON, *SETTINGS[name])) for name in args.only], args)
    for name, row in rows.items():
        score = row.get("games", {}).get("mean_reward")
        print(f"{name:8} {row['steps']:>9,} steps  {args.games} games: {score}  (aim {GOAL})", flush=True)
    return 0 if len(rows) == len(args.only) else 1


if __name__ == "__main__":
    sys.exit(main())
