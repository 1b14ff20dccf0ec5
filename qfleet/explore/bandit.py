"""Agent57's way (Badia et al. 2020b): a bandit learns from what episodes brought which policy to follow in the next.

It forgets: only the last episodes count, since the policies that it chooses among are learning. By UCB, or by
UCB1-Tuned (Auer et al. 2002), which takes the spread of an arm's returns into account.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from qfleet.agent import Arm
from qfleet.config import Config as Section
from qfleet.config import Count, Fraction, NonNegative, PositiveCount
from qfleet.explore import Explorer
from qfleet.explore.ladder import Config as Rungs
from qfleet.explore.ladder import Ladder

Rule = Literal["ucb", "ucb1_tuned"]


class Config(Section):
    kind: Literal["bandit"] = Field("bandit", description="the kind of exploration")
    arms: PositiveCount = Field(32, description="policies to choose among, as many as agent.arms")
    window: PositiveCount = Field(90, description="newest episodes of an actor that count, episodes")
    rule: Rule = Field("ucb", description="how much an arm that was tried seldom is favoured: ucb or ucb1_tuned")
    weight: NonNegative = Field(1.0, description="how much that counts, in units of return (ucb) or of its range")
    random: Fraction = Field(0.5, description="probability that an episode follows any arm")
    base: Fraction = Field(0.4, description="ε of the first lane, or arm")
    alpha: NonNegative = Field(8.0, description="how steeply the ladder falls")
    epsilon_by: Literal["lane", "arm"] = Field("lane", description="what the rungs of ε belong to: lanes or arms")
    warmup_steps: Count = Field(0, description="steps over which ε comes down from 1 to the ladder")


class Bandit:
    """Which of N arms brings most, judged by the last `window` episodes of all its lanes."""

    def __init__(self, arms: int, window: int, rule: Rule = "ucb", weight: float = 1.0, random: float = 0.0) -> None:
        self.arms, self.rule, self.weight, self.random = arms, rule, weight, random
        self.history: deque[tuple[int, float]] = deque(maxlen=window)
        self.rng = np.random.default_rng(0)
        self.dealt = 0

    def choose(self) -> int:
        """Every arm once, then the most promising one, or with probability `random` any."""
        if self.dealt < self.arms:
            self.dealt += 1
            return self.dealt - 1
        if self.rng.random() < self.random:
            return int(self.rng.integers(self.arms))
        return int(np.argmax(self.scores()))

    def tell(self, arm: int, ret: float) -> None:
        self.history.append((arm, ret))

    def scores(self) -> np.ndarray:
        """Mean return plus bonus [N]; an arm of which nothing is known any more is promising beyond measure."""
        found = np.full(self.arms, math.inf)
        everything = [ret for _, ret in self.history]
        for arm in range(self.arms):
            if own := [ret for which, ret in self.history if which == arm]:
                found[arm] = np.mean(own) + self.weight * self._bonus(own, everything)
        return found

    def best(self) -> int:
        """The arm with the greatest mean return, the first one if nothing is known."""
        means = np.full(self.arms, -math.inf)
        for arm in {which for which, _ in self.history}:
            means[arm] = np.mean([ret for which, ret in self.history if which == arm])
        return int(np.argmax(means))

    def _bonus(self, own: list[float], everything: list[float]) -> float:
        trials = math.log(max(len(everything), 1)) / len(own)
        if self.rule == "ucb":
            return math.sqrt(trials)
        span = max(everything) - min(everything)
        spread = (float(np.var(own)) / span**2 if span else 0.0) + math.sqrt(2 * trials)
        return span * math.sqrt(trials * min(0.25, spread))

    def state_dict(self) -> dict[str, Any]:
        return {"history": [list(pair) for pair in self.history], "dealt": self.dealt,
                "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.clear()
        self.history.extend((int(arm), float(ret)) for arm, ret in state["history"])
        self.dealt, self.rng.bit_generator.state = int(state["dealt"]), state["rng"]


class Choosing:
    """An arm for every episode of every lane, chosen by one bandit; implements `Chooser`."""

    def __init__(self, bandit: Bandit, rungs: Explorer, lanes: int, by_arm: bool = False) -> None:
        self.bandit, self.rungs, self.by_arm = bandit, rungs, by_arm
        self._arm = np.array([bandit.choose() for _ in range(lanes)])

    def seed(self, seed: int) -> None:
        self.bandit.rng, self.bandit.dealt = np.random.default_rng(seed), 0
        self._arm[:] = [self.bandit.choose() for _ in self._arm]

    def arms(self, steps: int) -> Arm:
        index, epsilon = torch.from_numpy(self._arm.copy()), self.rungs.arms(steps).epsilon
        return Arm(epsilon[index] if self.by_arm else epsilon, index=index, count=self.bandit.arms)

    def episode(self, lane: int, ret: float | None) -> None:
        if ret is not None:
            self.bandit.tell(int(self._arm[lane]), ret)
        self._arm[lane] = self.bandit.choose()

    def state_dict(self) -> dict[str, Any]:
        return {"bandit": self.bandit.state_dict(), "arm": self._arm.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The bandit goes on; so do the arms under way, unless they are of other lanes than these."""
        self.bandit.load_state_dict(state["bandit"])
        if len(state["arm"]) == len(self._arm):
            self._arm[:] = state["arm"]


def build(cfg: Config, lanes: int, first: int, total: int) -> Choosing:
    rungs = Rungs(base=cfg.base, alpha=cfg.alpha, warmup_steps=cfg.warmup_steps)
    by_arm = cfg.epsilon_by == "arm"
    ladder = Ladder(rungs, cfg.arms, 0, cfg.arms) if by_arm else Ladder(rungs, lanes, first, total)
    return Choosing(Bandit(cfg.arms, cfg.window, cfg.rule, cfg.weight, cfg.random), ladder, lanes, by_arm)
