"""How curiosity explores DeepSea: where it went, which arms it followed and how far each dives, and the intrinsic
reward along episodes.

    python benchmarks/curiosity_plots.py [--steps 120000] [--out benchmarks/results/deep_sea.json] [key=value ...]

Trains the recipe `deep-sea` in one process and looks over the actor's shoulder at every step. With agent.algo=agent57
and explore.kind=bandit it shows where the bandit moves when there is something to exploit. `make figures` draws OUT.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from speed import describe_machine

from qfleet.runconfig import resolution
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_run import LearnerRun

BINS = 24


class Watcher:
    """Counts visits of cells, the deepest column of every episode by arm, and the bonuses of each lane's episode."""

    def __init__(self, size: int, lanes: int) -> None:
        self.visits = np.zeros((size, size))
        self.dives: list[tuple[int, int, int]] = []  # step, arm, column of the last row
        self.paths: list[list[tuple[int, float]]] = [[] for _ in range(lanes)]
        self.shown: dict[str, list[tuple[int, float]]] = {}

    def look(self, step: int, obs: np.ndarray, bonus: np.ndarray, arm: np.ndarray) -> None:
        for lane, cell in enumerate(obs):
            if not cell.any():
                continue
            row, column = np.unravel_index(cell.argmax(), cell.shape)
            self.visits[row, column] += 1
            self.paths[lane] = [*(self.paths[lane] if row else []), (int(column), float(bonus[lane]))]
            if row == len(self.visits) - 1:
                self.dives.append((step, int(arm[lane]), int(column)))
                kind = "to the far right" if column == row else "elsewhere"
                name = f"the first {kind}, step {step:,}" if kind not in self.shown else kind
                self.shown[name] = self.shown[kind] = self.paths[lane]


def play(steps: int, overrides: list[str]) -> tuple[Watcher, list[tuple[int, np.ndarray]], int]:
    cfg = resolution.resolve("deep-sea", [*overrides, "run.threads=1", "eval.period_steps=null"]).config
    env = make_env(cfg.env, cfg.env.lanes)
    cfg = resolve_auto(cfg, env.spec)
    run = LearnerRun(
        make_acting_setup(cfg, env), make_plan(cfg),
        Hooks([], lambda snapshot: None, lambda *score: True, lambda *bad: None))
    actor, watcher, maps = run.acting.actors[0], Watcher(cfg.env.kwargs["size"], cfg.env.lanes), []
    actor.begin(range(cfg.env.lanes))
    while run.core.progress().steps < steps:
        obs = actor._obs["obs"]
        actor.step()
        watcher.look(run.core.progress().steps, obs, actor._pending[1]["bonus"], actor._pending[1]["arm"])
        run.core.learner.step()
        if run.core.progress().steps >= steps * (len(maps) + 1) / 3:
            maps.append((run.core.progress().steps, watcher.visits.copy()))
    run.setup.close()
    return watcher, maps, cfg.agent.arms


def summary(watcher: Watcher, maps: list[tuple[int, np.ndarray]], arms: int) -> dict[str, Any]:
    """All that is drawn and told, as it is committed."""
    dives, size = np.array(watcher.dives), len(watcher.visits)
    edges = np.linspace(0, dives[:, 0].max(), BINS + 1)
    far = dives[dives[:, 2] == size - 1, 0]
    fifths = {"first": dives[:len(dives) // 5], "last": dives[-(len(dives) // 5):]}
    return {
        "arms": arms, "steps": int(maps[-1][0]), "maps": [[step, visits.astype(int).tolist()] for step, visits in maps],
        "edges": edges[1:].round().tolist(), "columns": [columns_of(dives, edges, arm) for arm in range(arms)],
        "shares": shares_of(dives, edges, arms).round(4).tolist(),
        "bonuses": {kind: [round(bonus, 4) for _, bonus in path] for kind, path in watcher.shown.items()},
        "fifths": {name: {"share_of_arms": (np.bincount(part[:, 1], minlength=arms) / len(part)).round(4).tolist(),
                          "treasure": float(np.mean(part[:, 2] == size - 1))} for name, part in fifths.items()},
        "corner": {"first_step": int(far[0]) if len(far) else None, "times": len(far)},
        "cells": int((watcher.visits > 0).sum()), "machine": describe_machine()}


def columns_of(dives: np.ndarray, edges: np.ndarray, arm: int) -> list[float | None]:
    """The mean column in which an arm's episodes ended, between two edges each; None where it had none."""
    own = dives[dives[:, 1] == arm]
    place = np.digitize(own[:, 0], edges)
    return [float(own[place == i, 2].mean().round(3)) if (place == i).any() else None for i in range(1, len(edges))]


def shares_of(dives: np.ndarray, edges: np.ndarray, arms: int) -> np.ndarray:
    """Which part of the episodes between two edges followed each arm [edges - 1, arms]."""
    found = np.stack([np.histogram(dives[dives[:, 1] == arm, 0], edges)[0] for arm in range(arms)], axis=1)
    return found / np.maximum(found.sum(1, keepdims=True), 1)


def draw(found: dict[str, Any]) -> Any:
    """The picture of a summary, a matplotlib Figure."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure, arms = Figure(figsize=(20, 3.4), layout="constrained"), found["arms"]
    axes, colours = figure.subplots(1, 6), [colormaps["plasma"](arm / arms) for arm in range(arms)]
    for axis, (step, counts) in zip(axes, found["maps"], strict=False):
        visits = np.array(counts)
        axis.imshow(np.log10(np.where(visits > 0, visits, np.nan)), cmap="viridis", vmin=0, vmax=4)
        axis.set_title(f"visits (log10) by step {step:,}\n{int((visits > 0).sum())} cells", fontsize=9)
    for arm, mean in enumerate(found["columns"]):
        points = [np.nan if one is None else one for one in mean]
        axes[3].plot(found["edges"], points, color=colours[arm], label=f"{arm}")
    axes[3].set_title("column of the last row, mean by arm", fontsize=9)
    axes[3].legend(title="arm", fontsize=6, ncols=2)
    for kind, path in found["bonuses"].items():
        if kind.startswith("the first to the far right") or "step" not in kind:
            axes[4].plot(path, label=kind)
    axes[4].set_title("intrinsic reward along an episode", fontsize=9)
    axes[4].legend(fontsize=6)
    axes[5].stackplot(found["edges"], np.array(found["shares"]).T, colors=colours)
    axes[5].set_title("share of episodes by arm, arm 0 at the bottom", fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/deep_sea.json"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    found = summary(*play(args.steps, args.overrides))
    args.out.write_text(json.dumps(found) + "\n")
    for name, part in found["fifths"].items():
        print(f"the {name} fifth of the episodes: share of each arm {np.round(part['share_of_arms'], 2).tolist()}, "
              f"treasure in {part['treasure']:.0%}")
    first, times = found["corner"]["first_step"], found["corner"]["times"]
    print(f"the far right corner was first reached at step {first:,}" if times else "the corner was never reached",
          f"and {times} times in all; {found['cells']} cells were seen")


if __name__ == "__main__":
    main()
