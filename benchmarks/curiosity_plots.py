"""How curiosity explores DeepSea: where it went, which arms it followed and how far each dives, and the intrinsic
reward along episodes.

    python benchmarks/curiosity_plots.py [--steps 120000] [--out docs/assets/deep_sea.png] [key=value ...]

Trains the recipe `deep-sea` in one process and looks over the actor's shoulder at every step. With agent.algo=agent57
and explore.kind=bandit it shows where the bandit moves when there is something to exploit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np

from qfleet import recipe
from qfleet.assemble import cast_of, make_env, plan_of, settle
from qfleet.runtime.cell import Outside
from qfleet.runtime.inline import Inline

matplotlib.use("Agg")
import matplotlib.pyplot as plt


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
    cfg = recipe.resolve("deep-sea", [*overrides, "run.threads=1", "eval.period_steps=null"]).config
    env = make_env(cfg.env, cfg.env.lanes)
    cfg = settle(cfg, env.spec)
    run = Inline(cast_of(cfg, env), plan_of(cfg), Outside([], lambda snapshot: None, lambda *score: True,
                                                          lambda *bad: None))
    actor, watcher, maps = run.actors[0], Watcher(cfg.env.kwargs["size"], cfg.env.lanes), []
    actor.begin(range(cfg.env.lanes))
    while run.cell.progress().steps < steps:
        obs = actor._obs["obs"]
        actor.step()
        watcher.look(run.cell.progress().steps, obs, actor._sent[1]["bonus"], actor._sent[1]["arm"])
        run.cell.learner.step()
        if run.cell.progress().steps >= steps * (len(maps) + 1) / 3:
            maps.append((run.cell.progress().steps, watcher.visits.copy()))
    run.cast.close()
    return watcher, maps, cfg.agent.arms


def draw(watcher: Watcher, maps: list[tuple[int, np.ndarray]], arms: int, out: Path) -> None:
    figure, axes = plt.subplots(1, 6, figsize=(20, 3.4), constrained_layout=True)
    for axis, (step, visits) in zip(axes, maps, strict=False):
        axis.imshow(np.log10(np.where(visits > 0, visits, np.nan)), cmap="viridis", vmin=0, vmax=4)
        axis.set_title(f"visits (log10) by step {step:,}\n{int((visits > 0).sum())} cells", fontsize=9)
    dives = np.array(watcher.dives)
    edges = np.linspace(0, dives[:, 0].max(), 25)
    for arm in range(arms):
        own = dives[dives[:, 1] == arm]
        place = np.digitize(own[:, 0], edges)
        mean = [own[place == i, 2].mean() if (place == i).any() else np.nan for i in range(1, 25)]
        axes[3].plot(edges[1:], mean, color=plt.cm.plasma(arm / arms), label=f"{arm}")
    axes[3].set_title("column of the last row, mean by arm", fontsize=9)
    axes[3].legend(title="arm", fontsize=6, ncols=2)
    ends = [kind for kind in watcher.shown if "step" not in kind]
    for kind in ends:
        axes[4].plot([bonus for _, bonus in watcher.shown[kind]], label=kind)
    first = next((kind for kind in watcher.shown if kind.startswith("the first to the far right")), None)
    if first:
        axes[4].plot([bonus for _, bonus in watcher.shown[first]], label=first)
    axes[4].set_title("intrinsic reward along an episode", fontsize=9)
    axes[4].legend(fontsize=6)
    shares = shares_of(dives, edges, arms)
    axes[5].stackplot(edges[1:], shares.T, colors=[plt.cm.plasma(arm / arms) for arm in range(arms)])
    axes[5].set_title("share of episodes by arm, arm 0 at the bottom", fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def shares_of(dives: np.ndarray, edges: np.ndarray, arms: int) -> np.ndarray:
    """Which part of the episodes between two edges followed each arm [edges - 1, arms]."""
    found = np.stack([np.histogram(dives[dives[:, 1] == arm, 0], edges)[0] for arm in range(arms)], axis=1)
    return found / np.maximum(found.sum(1, keepdims=True), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120_000)
    parser.add_argument("--out", type=Path, default=Path("docs/assets/deep_sea.png"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    watcher, maps, arms = play(args.steps, args.overrides)
    draw(watcher, maps, arms, args.out)
    far = [step for step, _, column in watcher.dives if column == len(watcher.visits) - 1]
    dives, size = np.array(watcher.dives), len(watcher.visits)
    for name, part in (("first", dives[:len(dives) // 5]), ("last", dives[-len(dives) // 5:])):
        counts = np.bincount(part[:, 1], minlength=arms) / len(part)
        print(f"the {name} fifth of the episodes: share of each arm {np.round(counts, 2).tolist()}, "
              f"treasure in {np.mean(part[:, 2] == size - 1):.0%}")
    print(f"the far right corner was first reached at step {far[0]:,}" if far else "the corner was never reached",
          f"and {len(far)} times in all; {int((watcher.visits > 0).sum())} cells were seen")


if __name__ == "__main__":
    main()
