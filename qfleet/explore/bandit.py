"""Agent57's meta-controller (Badia et al. 2020b): a sliding-window bandit selects the arm of each episode.

Only the last episodes count, since the policies behind the arms change as they learn. The rule is the paper's
simplified UCB, or UCB1-Tuned (Auer et al. 2002), which uses the variance of an arm's returns.

One bandit serves all lanes of an actor. Arms of running episodes count as trials whose return is pending, and an arm
without returns is tried by one lane at a time.
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
from qfleet.core.rng import restore_numpy_rng
from qfleet.explore.ladder import Config as LadderConfig
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
    epsilon: Fraction = Field(
        0.4, description="ε of the first lane (or arm); number i of N has epsilon^(1 + steepness · i / (N − 1))")
    steepness: NonNegative = Field(8.0, description="the last lane (or arm) has ε = epsilon^(1 + steepness)")
    epsilon_by: Literal["lane", "arm"] = Field("lane", description="whether ε depends on the lane or on the arm")
    warmup_steps: Count = Field(
        0, description="environment steps of the run over which ε falls linearly from 1 to these values")


class Bandit:
    """Sliding-window UCB over N arms, based on the last `window` episodes of all lanes.

    `playing` lists the arms of the other lanes' running episodes. The caller keeps them, so that the arm of a lost
    lane is dropped with it.
    """

    def __init__(self, arms: int, window: int, rule: Rule = "ucb", weight: float = 1.0, random: float = 0.0) -> None:
        self.arms, self.rule, self.weight, self.random = arms, rule, weight, random
        self.window, self.history = window, deque[tuple[int, float]]()
        self._returns = [deque[float]() for _ in range(arms)]  # the history's returns, per arm
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Seed the random choices, and try each arm once again."""
        self.rng, self.dealt = np.random.default_rng(seed), 0

    def choose(self, playing: Sequence[int] = ()) -> int:
        """Next arm: each arm once, then a random one with probability `random`, else the one with the best score.

        Ties go to the arm that the fewest lanes are playing.
        """
        if self.dealt < self.arms:
            self.dealt += 1
            return self.dealt - 1
        if self.rng.random() < self.random:
            return int(self.rng.integers(self.arms))
        scores, running = self.scores(playing), Counter(playing)
        return min(np.flatnonzero(scores == scores.max()).tolist(), key=lambda arm: running[arm])

    def update(self, arm: int, ret: float) -> None:
        self.history.append((arm, ret))
        self._returns[arm].append(ret)
        if len(self.history) > self.window:
            self._returns[self.history.popleft()[0]].popleft()

    def scores(self, playing: Sequence[int] = ()) -> np.ndarray:
        """Mean return plus bonus [N]. Arms without returns rank first, or last if a lane is playing them."""
        found, running = np.full(self.arms, math.inf), Counter(playing)
        for arm, own in enumerate(self._returns):
            if own:
                found[arm] = sum(own) / len(own) + self.weight * self._bonus(own, len(own) + running[arm])
            elif running[arm]:
                found[arm] = -math.inf
        return found

    def best(self) -> int:
        """Arm with the largest mean return; arm 0 without data."""
        return int(np.argmax([sum(own) / len(own) if own else -math.inf for own in self._returns]))

    def _bonus(self, own: Sequence[float], trials: int) -> float:
        if self.rule == "ucb":
            return math.sqrt(1 / trials)
        returns = [ret for _, ret in self.history]
        span, log = max(returns) - min(returns), math.log(len(returns)) / trials
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
                raise ValueError(f"a bandit of {self.arms} arms cannot load a history with arm {arm:g}")
            self.update(int(arm), float(ret))
        self.dealt = int(state["dealt"])
        restore_numpy_rng(self.rng, state["rng"])


class BanditExplorer:
    """One arm per episode and lane, chosen by a shared bandit; implements `AdaptiveExplorer`."""

    def __init__(self, bandit: Bandit, epsilon_ladder: Explorer, lanes: int, by_arm: bool = False) -> None:
        self.bandit, self.epsilon_ladder, self.by_arm = bandit, epsilon_ladder, by_arm
        self._arm = np.zeros(lanes, np.int64)
        self._begin()

    def seed(self, seed: int) -> None:
        self.bandit.seed(seed)
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
        """Restore the bandit, and the arms of running episodes if the number of lanes is unchanged."""
        self.bandit.load_state_dict(state["bandit"])
        if len(state["arm"]) == len(self._arm):
            self._arm[:] = state["arm"]

    def _begin(self) -> None:
        for lane in range(len(self._arm)):
            self._arm[lane] = self.bandit.choose(self._arm[:lane].tolist())


def build(cfg: Config, lanes: int, first: int, total: int) -> BanditExplorer:
    ladder_config = LadderConfig(epsilon=cfg.epsilon, steepness=cfg.steepness, warmup_steps=cfg.warmup_steps)
    by_arm = cfg.epsilon_by == "arm"
    ladder = (Ladder(ladder_config, cfg.arms, 0, cfg.arms) if by_arm
              else Ladder(ladder_config, lanes, first, total))
    return BanditExplorer(Bandit(cfg.arms, cfg.window * lanes, cfg.rule, cfg.weight, cfg.random), ladder, lanes, by_arm)
