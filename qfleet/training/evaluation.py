"""Evaluation: an actor with a constant explorer and no recorder, whole episodes of frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from pydantic import Field

from qfleet.actor.actor import Actor
from qfleet.actor.policy import Policy
from qfleet.config import Config, Count, Fraction, PositiveCount, Real
from qfleet.core.env import VectorEnv
from qfleet.core.errors import EnvFault, UserError
from qfleet.core.evaluation import Score
from qfleet.core.exploration import Explorer
from qfleet.core.schedule import Progress, Schedule
from qfleet.core.seeds import lane_seeds, seed_for
from qfleet.core.weights import WeightSource
from qfleet.explore.bandit import Bandit, BanditExplorer
from qfleet.explore.constant import Constant

ENDLESS_STEPS = 100_000
"""Vector steps of an evaluation without the end of any episode; the longest Atari game takes 27,000."""

TRIALS = 5
"""Episodes that an evaluator's bandit remembers, times its arms."""

LOSSES_PER_LANE = 10
"""Episodes that an evaluation may lose in a row, times its lanes: none that was lost counts, so it might never end."""


class EvalConfig(Config):
    """The eval section: evaluations during training."""

    period_steps: Count | None = Field(
        None, description="environment steps between evaluations; null = only at the end of the run")
    period_updates: Count | None = Field(None, description="updates between evaluations, instead of period_steps")
    from_return: Real | None = Field(
        None, description="evaluate only while the mean return of the last 100 training episodes is at least this; "
                          "null = always")
    episodes: PositiveCount = Field(10, description="full episodes per evaluation; returns are unclipped")
    epsilon: Fraction = Field(0.0, description="probability of a random action in evaluation; 0 = greedy")
    lanes: PositiveCount = Field(4, description="environments that an evaluation steps together")
    max_episode_steps: PositiveCount | None = Field(
        None, description="truncate evaluation episodes after this many steps; the return so far counts. null = "
                          "env.max_episode_steps")
    beside: bool = Field(
        False, description="evaluate in a separate process on the CPU while training continues (placement=inline)")
    video_period: Count = Field(
        0, description="record a video of one episode at every n-th evaluation, from the first on; 0 = never")




class EvaluationAborted(Exception):
    """An evaluation was told to stop before its last episode."""


class EpisodeCounter:
    """Counts the first episodes of every lane, a fixed number each, so that short ones are not favoured."""

    def __init__(self, episodes: int, lanes: int) -> None:
        self.quota = [episodes // lanes + (lane < episodes % lanes) for lane in range(lanes)]
        self.results: list[list[tuple[float, int]]] = [[] for _ in range(lanes)]
        self.completed = 0  # those beyond the quota, too

    def episode(self, lane: int, ret: float, length: int) -> None:
        self.completed += 1
        if len(self.results[lane]) < self.quota[lane]:
            self.results[lane].append((ret, length))

    def write(self, values: Mapping[str, float]) -> None:
        """Nothing but episodes counts here."""

    def count(self, name: str, by: int = 1) -> None:
        """Nothing but episodes counts here."""

    @property
    def done(self) -> bool:
        return all(len(results) >= quota for results, quota in zip(self.results, self.quota, strict=True))


def evaluate(policy: Policy, env: VectorEnv, episodes: int, epsilon: float, seed: int,
             stop: Callable[[], bool] = lambda: False, on_episode: Callable[[int], None] = lambda episodes: None,
             explorer: Explorer | None = None) -> Score:
    """Play whole episodes with the policy's weights; the same seed, the same episodes. BrokenOff if told to stop.

    `told` hears how many episodes have ended so far. An `explorer` may take the place of the constant ε.
    EnvFault if the environment loses episode after episode, UserError if none ever ends.
    """
    tally = EpisodeCounter(episodes, env.lanes)
    policy.rng.manual_seed(seed_for(seed, "evaluation"))
    policy.memory = None
    actor = Actor(policy, env, explorer or Constant(epsilon, env.lanes), tally)
    actor.begin(lane_seeds(seed, env.lanes, "evaluation"))
    completed, faults, waited = 0, env.faults(), 0
    while not tally.done:
        if stop():
            raise EvaluationAborted
        actor.step()
        actor.receive_step()
        waited += 1
        if tally.completed > completed:
            completed, faults, waited = tally.completed, env.faults(), 0
            on_episode(completed)
        elif waited >= ENDLESS_STEPS:
            raise UserError(f"{env.spec.id} was evaluated for {waited:,} steps without the end of an episode: set "
                            "env.max_episode_steps, or eval.max_episode_steps for evaluations alone, so that episodes "
                            "that never end are truncated")
        elif env.faults() - faults >= LOSSES_PER_LANE * env.lanes:
            raise EnvFault(f"{env.spec.id} lost {env.faults() - faults} episodes of an evaluation without completing "
                           f"one between, in {env.lanes} lanes: mend what fails there (`qfleet check-env` plays it)")
    if explorer is not None:  # it hears of an episode when the next one begins
        actor.step()
        actor.receive_step()
    flat = [result for lane in tally.results for result in lane]
    return Score([ret for ret, _ in flat], [length for _, length in flat], policy.version)


class Evaluator:
    """Judges the newest weights whenever that is due; `on_score` gets the score and the weights it belongs to.

    `stop` breaks an evaluation off, which may take minutes, for somebody who cannot wait; it is made up for on resume.
    """

    def __init__(
        self,
        policy: Policy,
        env: VectorEnv,
        weights: WeightSource,
        cfg: EvalConfig,
        seed: int,
        progress: Callable[[], Progress],
        on_score: Callable[[Score, dict[str, torch.Tensor]], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.policy, self.env, self.weights, self.cfg, self.seed = policy, env, weights, cfg, seed
        self.progress, self.on_score, self.stop = progress, on_score, stop
        self.schedule = Schedule(cfg.period_steps, cfg.period_updates)
        self.count = 0
        self.evaluated_version = -1
        self.pending = False
        self.recent_return: Callable[[], float | None] = lambda: None  # the mean return of training
        self._saved_buffers: dict[str, torch.Tensor] = {}  # the agent's notes after the last evaluation
        self.bandit = Bandit(policy.agent.arms, TRIALS * policy.agent.arms) if policy.agent.arms > 1 else None

    def step(self) -> bool:
        """One whole evaluation, if one is due."""
        if not (self.pending or (self.reached_from_return() and self.schedule.due(self.progress()))):
            return False
        self.evaluate()
        return True

    def reached_from_return(self) -> bool:
        """Whether training has come far enough for evaluations (`from_return`)."""
        if self.cfg.from_return is None:
            return True
        recent = self.recent_return()
        return recent is not None and recent >= self.cfg.from_return

    def evaluate(self) -> None:
        """Evaluate the newest weights now, unless they have just been judged."""
        self.pending = False
        self.policy.refresh(self.weights)
        self.policy.flat.set_buffers(self._saved_buffers)  # newer than what weights that were published meanwhile hold
        if self.evaluated_version == self.policy.version:
            return
        seed, begin = seed_for(self.seed, "evaluations", self.count), perf_counter()
        try:
            if self.bandit is not None:
                self._try_arms(self.bandit, seed)
            score = evaluate(self.policy, self.env, self.cfg.episodes, self.cfg.epsilon, seed, self.stop)
            self.policy.save_persistent()
            self._saved_buffers = {
                name: self.policy.flat.buffer(name).clone() for name in self.policy.agent.eval_buffers
            }
        except EvaluationAborted:
            self.pending = True
            return
        self.evaluated_version = score.version
        self.count += 1
        self.on_score(replace(score, seconds=perf_counter() - begin), self.policy.flat.state())

    def _try_arms(self, bandit: Bandit, seed: int) -> None:
        """Episodes that do not count, to find out with which arm to play those that do."""
        chooser = BanditExplorer(bandit, Constant(self.cfg.epsilon, self.env.lanes), self.env.lanes)
        evaluate(self.policy, self.env, self.cfg.episodes, self.cfg.epsilon, seed_for(seed, "trials"), self.stop,
                 explorer=chooser)
        self.policy.save_persistent()
        self.policy.flat.set_buffers({"arm": torch.tensor(bandit.best())})

    def state_dict(self) -> dict[str, Any]:
        state = {"count": self.count, "judged": self.evaluated_version, "owed": self.pending}
        return state if self.bandit is None else state | {"bandit": self.bandit.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.bandit is not None and "bandit" in state:
            self.bandit.load_state_dict(state["bandit"])
        self.count, self.evaluated_version, self.pending = state["count"], state["judged"], state.get("owed", False)
        self.schedule.resume(self.progress())

    def resume(self) -> None:
        """Go on in a run that has got somewhere already, of whose evaluations nothing is known here."""
        self.schedule.resume(self.progress())
        self.count = self.schedule.index
