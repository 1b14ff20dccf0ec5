"""Evaluation: full episodes with fixed weights, played by an actor with constant ε and no recorder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from qfleet.actor.actor import Actor
from qfleet.actor.policy import Policy
from qfleet.config import Config, Count, Fraction, PositiveCount, Real
from qfleet.core.clock import Progress, Schedule
from qfleet.core.env import VectorEnv
from qfleet.core.episode import Episode, mean_info
from qfleet.core.errors import EnvFault
from qfleet.core.evaluation import Score
from qfleet.core.exploration import Explorer
from qfleet.core.seeds import lane_seeds, seed_for
from qfleet.core.weights import WeightSource
from qfleet.explore.bandit import Bandit, BanditExplorer
from qfleet.explore.constant import Constant

log = logging.getLogger(__name__)

ENDLESS_STEPS = 100_000
"""Vector steps without the end of any episode after which an evaluation takes the returns so far; the longest Atari
episode takes 27,000."""

BANDIT_WINDOW_PER_ARM = 5
"""Sliding window of the evaluator's bandit, in episodes per arm."""

MAX_FAULTS_PER_LANE = 10
"""Environment faults per lane without a completed episode before an evaluation fails. An aborted episode does not
count, so without this limit an evaluation might never end."""


class EvalConfig(Config):
    """The eval section: evaluations during training."""

    period_steps: Count | None = Field(
        None, description="environment steps between evaluations; null = only at the end of the run")
    period_updates: Count | None = Field(None, description="updates between evaluations, instead of period_steps")
    from_return: Real | None = Field(
        None, description="evaluate only while the mean return of the last 100 training episodes is at least this; "
                          "null = always")
    episodes: PositiveCount = Field(10, description="full episodes per evaluation; returns are unclipped")
    final_episodes: Count = Field(
        20, description="fresh episodes after the training for the score of the best policy: the best evaluation is "
                        "the maximum of several, and thus too high; 0 = none")
    epsilon: Fraction = Field(0.0, description="probability of a random action in evaluation; 0 = greedy")
    lanes: PositiveCount = Field(4, description="environments that an evaluation steps together")
    max_episode_steps: PositiveCount | None = Field(
        None, description="truncate evaluation episodes after this many steps; the return so far counts. null = "
                          "env.max_episode_steps")
    process: bool | Literal["auto"] = Field(
        "auto", description="evaluate in a separate process on the CPU while training continues; auto = whenever the "
                            "run has several processes")
    video_period: Count = Field(
        0, description="record a video of one episode at every n-th evaluation, from the first on; 0 = never")


class EvaluationAborted(Exception):
    """`stop` returned true before the last episode of an evaluation."""


class EpisodeCounter:
    """Keeps the first episodes of each lane, a fixed number per lane, so that short episodes are not favoured."""

    def __init__(self, episodes: int, lanes: int) -> None:
        self.quota = [episodes // lanes + (lane < episodes % lanes) for lane in range(lanes)]
        self.results: list[list[Episode]] = [[] for _ in range(lanes)]
        self.completed = 0  # includes episodes beyond the quota

    def episode(self, episode: Episode) -> None:
        self.completed += 1
        if len(self.results[episode.lane]) < self.quota[episode.lane]:
            self.results[episode.lane].append(replace(episode, final_info=None))

    def write(self, values: Mapping[str, float]) -> None:
        """Ignored: only episodes are collected."""

    def count(self, name: str, by: int = 1) -> None:
        """Ignored: only episodes are collected."""

    @property
    def done(self) -> bool:
        return all(len(results) >= quota for results, quota in zip(self.results, self.quota, strict=True))


def evaluate(policy: Policy, env: VectorEnv, episodes: int, epsilon: float, seed: int,
             stop: Callable[[], bool] = lambda: False, on_episode: Callable[[int], None] = lambda episodes: None,
             explorer: Explorer | None = None) -> Score:
    """Play full episodes with the policy's weights; the same seed gives the same episodes.

    Args:
        stop: checked before every step; true aborts the evaluation.
        on_episode: called with the number of completed episodes whenever it grows.
        explorer: replaces the constant `epsilon`.

    Raises:
        EvaluationAborted: `stop` returned true.
        EnvFault: the environment aborts episode after episode.
    """
    counter = EpisodeCounter(episodes, env.lanes)
    policy.rng.manual_seed(seed_for(seed, "evaluation"))
    policy.end_episodes()
    actor = Actor(policy, env, explorer or Constant(epsilon, env.lanes), counter)
    actor.begin(lane_seeds(seed, env.lanes, "evaluation"))
    completed, faults, steps = 0, env.faults(), 0
    while not counter.done:
        if stop():
            raise EvaluationAborted
        actor.step()
        actor.receive_step()
        steps += 1
        if counter.completed > completed:
            completed, faults, steps = counter.completed, env.faults(), 0
            on_episode(completed)
        elif steps >= ENDLESS_STEPS:
            log.warning("%s was evaluated for %d steps without the end of an episode: the returns so far are used; set "
                        "env.max_episode_steps, or eval.max_episode_steps for evaluations alone, to truncate long "
                        "episodes", env.spec.id, steps)
            for episode in actor.running_episodes():
                counter.episode(episode)
            break
        elif env.faults() - faults >= MAX_FAULTS_PER_LANE * env.lanes:
            raise EnvFault(f"{env.spec.id} lost {env.faults() - faults} episodes of an evaluation in a row, in "
                           f"{env.lanes} lanes: run `qfleet check-env` to find the error in the environment")
    if explorer is not None:  # it receives the return of an episode at the first step of the next one
        actor.step()
        actor.receive_step()
    flat = [episode for lane in counter.results for episode in lane]
    return Score([episode.reward for episode in flat], [episode.length for episode in flat], policy.version,
                 info=mean_info(flat))


class EvaluatorSlot(Protocol):
    """Evaluator interface of a learner's run: an `Evaluator` in its process, or one that is reached elsewhere."""

    def step(self) -> bool:
        """Evaluate, or start an evaluation, if one is due; returns whether time was spent on it."""

    def evaluate(self) -> None:
        """Evaluate the newest weights now and wait for the score."""

    def request(self) -> None:
        """Evaluate soon, in addition to the schedule."""

    def resume(self) -> None:
        """Resume without saved state."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class NoEvaluator:
    """Evaluator that does nothing, for runs that another process evaluates."""

    def step(self) -> bool:
        return False

    def evaluate(self) -> None: ...
    def request(self) -> None: ...
    def resume(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class EvaluatorHooks:
    """What an evaluator reads from the run and reports to it.

    `on_score` receives the score and the evaluated weights. `stop` aborts a running evaluation, which may take
    minutes. `recent_return` is the mean return of recent training episodes.
    """

    progress: Callable[[], Progress]
    on_score: Callable[[Score, dict[str, torch.Tensor]], None]
    stop: Callable[[], bool] = lambda: False
    recent_return: Callable[[], float | None] = lambda: None


class Evaluator:
    """Evaluates the newest weights on schedule. An aborted evaluation is repeated after a resume, or by `request`."""

    def __init__(self, policy: Policy, env: VectorEnv, weights: WeightSource, cfg: EvalConfig, seed: int,
                 hooks: EvaluatorHooks) -> None:
        self.policy, self.env, self.weights, self.cfg, self.seed = policy, env, weights, cfg, seed
        self.hooks = hooks
        self.schedule = Schedule(cfg.period_steps, cfg.period_updates)
        self.count = 0
        self.evaluated_version = -1
        self.pending = False
        self._saved_buffers: dict[str, torch.Tensor] = {}  # `eval_buffers` after the last evaluation
        self.bandit = (
            Bandit(policy.agent.arms, BANDIT_WINDOW_PER_ARM * policy.agent.arms) if policy.agent.arms > 1 else None)

    def step(self) -> bool:
        """Run one full evaluation if one is due; returns whether it was."""
        if not (self.pending or (self.reached_from_return() and self.schedule.due(self.hooks.progress()))):
            return False
        self.evaluate()
        return True

    def request(self) -> None:
        """Evaluate at the next step, in addition to the schedule."""
        self.pending = True

    def restart(self) -> None:
        """Follow a learner that has resumed: it has other weights under the same version numbers."""
        self.evaluated_version = -1
        self.resume()

    def reached_from_return(self) -> bool:
        """True if recent training returns have reached `from_return`, or if it is not set."""
        if self.cfg.from_return is None:
            return True
        recent = self.hooks.recent_return()
        return recent is not None and recent >= self.cfg.from_return

    def evaluate(self) -> None:
        """Evaluate the newest weights now, unless that version was evaluated last."""
        self.pending = False
        self.policy.refresh(self.weights)
        self.policy.flat.set_buffers(self._saved_buffers)  # newer than those in the fetched weights
        if self.evaluated_version == self.policy.version:
            return
        seed, begin = seed_for(self.seed, "evaluations", self.count), perf_counter()
        try:
            if self.bandit is not None:
                self._try_arms(self.bandit, seed)
            score = evaluate(self.policy, self.env, self.cfg.episodes, self.cfg.epsilon, seed, self.hooks.stop)
            self.policy.save_persistent()
            self._saved_buffers = {
                name: self.policy.flat.buffer(name).clone() for name in self.policy.agent.eval_buffers
            }
        except EvaluationAborted:
            self.pending = True
            return
        self.evaluated_version = score.version
        self.count += 1
        self.hooks.on_score(replace(score, seconds=perf_counter() - begin), self.policy.flat.state())

    def _try_arms(self, bandit: Bandit, seed: int) -> None:
        """Play trial episodes, which do not count, to select the arm for those that do."""
        explorer = BanditExplorer(bandit, Constant(self.cfg.epsilon, self.env.lanes), self.env.lanes)
        evaluate(self.policy, self.env, self.cfg.episodes, self.cfg.epsilon, seed_for(seed, "trials"), self.hooks.stop,
                 explorer=explorer)
        self.policy.save_persistent()
        self.policy.flat.set_buffers({"arm": torch.tensor(bandit.best())})

    def state_dict(self) -> dict[str, Any]:
        state = {"count": self.count, "judged": self.evaluated_version, "owed": self.pending}
        return state if self.bandit is None else state | {"bandit": self.bandit.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.bandit is not None and "bandit" in state:
            self.bandit.load_state_dict(state["bandit"])
        self.count, self.evaluated_version, self.pending = state["count"], state["judged"], state.get("owed", False)
        self.schedule.resume(self.hooks.progress())

    def resume(self) -> None:
        """Resume without saved evaluator state: derive schedule and count from the run's progress."""
        self.schedule.resume(self.hooks.progress())
        self.count = self.schedule.index
