"""Agent57's way (Badia et al. 2020b): a bandit learns from what episodes brought which policy to follow in the next.

It forgets: only the last episodes count, since the policies that it chooses among are learning. By the paper's
simplified UCB, or by UCB1-Tuned (Auer et al. 2002), which takes the spread of an arm's returns into account.

One bandit serves all lanes of an actor. It is told which arms are being played: their returns are on their way, so they
count as trials, and an arm without returns is tried by one lane at a time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Count, Fraction, NonNegative, PositiveCount
from qfleet.core.agent import ExplorationParams
from qfleet.core.exploration import Explorer
from qfleet.explore.ladder import Config as Rungs
from qfleet.explore.ladder import Ladder

Rule = Literal["ucb", "ucb1_tuned"]


class Config(Section):
    kind: Literal["bandit"] = Field(
        "bandit", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    arms: PositiveCount = Field(32, description="arms to choose from, one per episode; must equal agent.arms")
    window: PositiveCount = Field(90, description="length of the sliding window, episodes per lane of an actor")
    rule: Rule = Field(
        "ucb", description="exploration bonus: ucb (as in Agent57) or ucb1_tuned (uses the variance of the returns)")
    weight: NonNegative = Field(
        1.0, description="weight of the exploration bonus, in units of return (ucb) or of its range (ucb1_tuned)")
    random: Fraction = Field(0.5, description="probability that an episode follows a uniformly random arm")
    base: Fraction = Field(
        0.4, description="ε of the first lane (or arm); number i of N has base^(1 + alpha i / (N − 1))")
    alpha: NonNegative = Field(8.0, description="steepness of the ε values: the last one is base^(1 + alpha)")
    epsilon_by: Literal["lane", "arm"] = Field("lane", description="whether ε depends on the lane or on the arm")
    warmup_steps: Count = Field(
        0, description="environment steps of the run over which ε falls linearly from 1 to these values")


class Bandit:
    """Which of N arms brings most, judged by the last `window` episodes of all its lanes.

    `playing` are the arms of the other lanes, which are in the middle of an episode. The caller keeps them: the arm of
    a lane that is lost is lost with it.
    """

    def __init__(self, arms: int, window: int, rule: Rule = "ucb", weight: float = 1.0, random: float = 0.0) -> None:
        self.arms, self.rule, self.weight, self.random = arms, rule, weight, random
        self.window, self.history = window, deque[tuple[int, float]]()
        self._returns = [deque[float]() for _ in range(arms)]  # the same, arm by arm
        self.rng = np.random.default_rng(0)
        self.dealt = 0

    def choose(self, playing: Sequence[int] = ()) -> int:
        """Every arm once, then the most promising one, of equals the one that fewest play, or with probability `random`
        any."""
        if self.dealt < self.arms:
            self.dealt += 1
            return self.dealt - 1
        if self.rng.random() < self.random:
            return int(self.rng.integers(self.arms))
        scores, under_way = self.scores(playing), Counter(playing)
        return min(np.flatnonzero(scores == scores.max()).tolist(), key=lambda arm: under_way[arm])

    def update(self, arm: int, ret: float) -> None:
        self.history.append((arm, ret))
        self._returns[arm].append(ret)
        if len(self.history) > self.window:
            self._returns[self.history.popleft()[0]].popleft()

    def scores(self, playing: Sequence[int] = ()) -> np.ndarray:
        """Mean return plus bonus [N]. An arm without returns comes first, or last if a lane is playing it."""
        found, under_way = np.full(self.arms, math.inf), Counter(playing)
        for arm, own in enumerate(self._returns):
            if own:
                found[arm] = sum(own) / len(own) + self.weight * self._bonus(own, len(own) + under_way[arm])
            elif under_way[arm]:
                found[arm] = -math.inf
        return found

    def best(self) -> int:
        """The arm with the greatest mean return, the first one if nothing is known."""
        return int(np.argmax([sum(own) / len(own) if own else -math.inf for own in self._returns]))

    def _bonus(self, own: Sequence[float], trials: int) -> float:
        if self.rule == "ucb":
            return math.sqrt(1 / trials)
        everything = [ret for _, ret in self.history]
        span, log = max(everything) - min(everything), math.log(len(everything)) / trials
        spread = (float(np.var(own)) / span**2 if span else 0.0) + math.sqrt(2 * log)
        return span * math.sqrt(log * min(0.25, spread))

    def state_dict(self) -> dict[str, Any]:
        return {"history": np.array(self.history, np.float64).reshape(-1, 2), "dealt": self.dealt,
                "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.clear()
        for own in self._returns:
            own.clear()
        for arm, ret in state["history"]:
            if not 0 <= arm < self.arms:
                raise ValueError(f"a bandit of {self.arms} arms cannot remember arm {arm:g}")
            self.update(int(arm), float(ret))
        self.dealt, self.rng.bit_generator.state = int(state["dealt"]), state["rng"]


class BanditExplorer:
    """An arm for every episode of every lane, chosen by one bandit; implements `Chooser`."""

    def __init__(self, bandit: Bandit, rungs: Explorer, lanes: int, by_arm: bool = False) -> None:
        self.bandit, self.epsilon_ladder, self.by_arm = bandit, rungs, by_arm
        self._arm = np.zeros(lanes, np.int64)
        self._begin()

    def seed(self, seed: int) -> None:
        self.bandit.rng, self.bandit.dealt = np.random.default_rng(seed), 0
        self._begin()

    def params(self, steps: int) -> ExplorationParams:
        index, epsilon = torch.from_numpy(self._arm.copy()), self.epsilon_ladder.params(steps).epsilon
        return ExplorationParams(epsilon[index] if self.by_arm else epsilon, index=index, count=self.bandit.arms)

    def end_episode(self, lane: int, ret: float | None) -> None:
        if ret is not None:
            self.bandit.update(int(self._arm[lane]), ret)
        self._arm[lane] = self.bandit.choose(np.delete(self._arm, lane).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"bandit": self.bandit.state_dict(), "arm": self._arm.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The bandit goes on; so do the arms under way, unless they are of other lanes than these."""
        self.bandit.load_state_dict(state["bandit"])
        if len(state["arm"]) == len(self._arm):
            self._arm[:] = state["arm"]

    def _begin(self) -> None:
        for lane in range(len(self._arm)):
            self._arm[lane] = self.bandit.choose(self._arm[:lane].tolist())


def build(cfg: Config, lanes: int, first: int, total: int) -> BanditExplorer:
    rungs = Rungs(base=cfg.base, alpha=cfg.alpha, warmup_steps=cfg.warmup_steps)
    by_arm = cfg.epsilon_by == "arm"
    ladder = Ladder(rungs, cfg.arms, 0, cfg.arms) if by_arm else Ladder(rungs, lanes, first, total)
    return BanditExplorer(Bandit(cfg.arms, cfg.window * lanes, cfg.rule, cfg.weight, cfg.random), ladder, lanes, by_arm)
