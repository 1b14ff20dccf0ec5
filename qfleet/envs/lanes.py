"""Python environments as lanes of one vector environment, stepped in a loop and rebuilt after failures.

    row t      step: reward, discount, raw_reward of the step; `last` if the episode ends with this observation
    row t + 1  after a `last`: reset; the action is ignored, reward, discount and raw_reward are zero
    row t + 1  after a failure: the lane was rebuilt; `aborted`, and the observation starts a new episode
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium
import numpy as np

from qfleet.config.objects import is_local
from qfleet.core.env import EnvSpec, Obs, StepResult
from qfleet.core.errors import BadOutput, EnvFault, UserError
from qfleet.core.tracebacks import user_traceback
from qfleet.envs import EnvConfig
from qfleet.envs.gym_api import fault_of_call, fault_of_reset, fault_of_reward, fault_of_step
from qfleet.envs.images import ImageFormat
from qfleet.envs.info import EpisodeInfo, parse_metrics
from qfleet.envs.leaf_reader import SpaceMismatch
from qfleet.envs.packages import missing_package
from qfleet.envs.spaces import FrameStack, ObservationEncoder, make_action_decoder
from qfleet.envs.stored_spaces import spaces_to_json

log = logging.getLogger("qfleet.envs")

FAILURES = (Exception, SystemExit)
"""Exceptions for which an environment is rebuilt; one that calls exit() must not end the training silently."""

MAX_REWARD = float(np.finfo(np.float32).max)
"""Rewards are trained on as float32."""

NO_ANSWER = object()
"""Placeholder for the return value of a call that raised."""

BOUNDS_CHECK_STEPS = 1000
"""Steps for which observations are checked against their bounds; violations that occur at all occur early."""


@dataclass(frozen=True)
class EpisodeRules:
    """Step limit of episodes and rewards for the learner.

    `fallback_limit`: the environment has no limit of its own, `limit` is qfleet's.
    """

    limit: int | None
    clip: bool = False
    life_loss: bool = False
    frames_per_step: int = 1
    fallback_limit: bool = False


@dataclass(slots=True)
class Lane:
    """One environment and the state of its episode.

    `consecutive_faults` counts failures since the last completed episode; `rebuilt` counts in total,
    `rebuilds_since_reset` since the last reset, so that a run resumed there derives the same seeds.
    """

    env: gymnasium.Env[Any, Any]
    info: EpisodeInfo
    seed: int = 0
    steps: int = 0
    over: bool = False
    lives: int = 0
    rebuilt: int = 0
    rebuilds_since_reset: int = 0
    consecutive_faults: int = 0

    def reseed(self, seed: int) -> None:
        self.seed, self.rebuilds_since_reset = seed, 0

    def begin_episode(self, lives: int) -> None:
        self.steps, self.over, self.lives = 0, False, lives
        self.info.reset()

    def advance(self, lives: int) -> bool:
        """Count a step of the episode; returns True if a life was lost in it."""
        lost = 0 < lives < self.lives
        self.steps += 1
        self.lives = lives
        return lost

    def end_episode(self) -> None:
        self.over = True

    def clear_faults(self) -> None:
        """Note that an episode was completed without a failure."""
        self.consecutive_faults = 0

    def count_fault(self) -> int:
        """Count a failure; returns the number of consecutive ones."""
        self.rebuilt += 1
        self.rebuilds_since_reset += 1
        self.consecutive_faults += 1
        return self.consecutive_faults

    def rebuild(self, build: Callable[[], gymnasium.Env[Any, Any]]) -> None:
        self.env = build()

    def rebuilt_seed(self) -> int:
        """Seed of the rebuilt environment, derived from the lane's seed and its number of failures."""
        return int(np.random.SeedSequence([self.seed, self.rebuilds_since_reset]).generate_state(1)[0] >> 1)


class StepBuffer:
    """Columns of one vector step while it is assembled. In `fresh` lanes the frame starts an episode."""

    __slots__ = ("aborted", "discount", "final_info", "frames", "fresh", "info", "last", "raw_reward")

    def __init__(self, frames: Obs, lanes: int) -> None:
        self.frames = frames
        self.raw_reward = np.zeros(lanes)
        self.discount = np.ones(lanes, np.float32)
        self.info, self.final_info = dict[int, dict[str, float]](), dict[int, dict[str, Any]]()
        self.last, self.aborted, self.fresh = np.zeros(lanes, bool), np.zeros(lanes, bool), np.zeros(lanes, bool)

    def abort(self, i: int) -> None:
        """Mark the episode of lane i as aborted; a new one starts in this row."""
        self.raw_reward[i] = self.discount[i] = 0
        self.last[i], self.aborted[i], self.fresh[i] = False, True, True
        self.info.pop(i, None)
        self.final_info.pop(i, None)


class GymLanes:
    """N environments made by `build`, as a VectorEnv. All work is done in `recv`.

    `first` is the environment of lane 0 if it was built already.
    """

    def __init__(
        self, build: Callable[[], gymnasium.Env[Any, Any]], cfg: EnvConfig, lanes: int, view: ImageFormat,
        rules: EpisodeRules, first: gymnasium.Env[Any, Any] | None = None) -> None:
        self._build, self._cfg, self._rules, self.lanes = build, cfg, rules, lanes
        metrics = parse_metrics(cfg.info_metrics)
        self._lanes = [Lane(build() if i or first is None else first, EpisodeInfo(metrics)) for i in range(lanes)]
        self._tracks_info = bool(metrics)
        env = self._lanes[0].env
        self._encoder = ObservationEncoder(env.observation_space, view)
        self._actions = make_action_decoder(env.action_space, cfg.max_action_combinations)
        self.spec = EnvSpec(cfg.name, self._encoder.leaves, self._actions.n, rules.frames_per_step, self._actions.box,
                            spaces_to_json(env.observation_space, env.action_space))
        self._sent: list[Any] | None = None
        self._bounds_checks_left = BOUNDS_CHECK_STEPS
        report_texts(cfg.name, self._encoder)

    @property
    def has_time_limit(self) -> bool:
        """True if the environment or the user limits its episodes."""
        return self._rules.limit is not None and not self._rules.fallback_limit

    def reset(self, seeds: Sequence[int]) -> Obs:
        row = StepBuffer(self._encoder.allocate(self.lanes), self.lanes)
        self._stack = FrameStack(self.spec.observation, self.lanes)
        self._sent = None
        for i, seed in enumerate(seeds):
            self._lanes[i].reseed(int(seed))
            self._begin(i, row.frames, int(seed))
        self._restart_nonfinite(row)
        return self._stack.push(row.frames, np.ones(self.lanes, bool))

    def send(self, actions: np.ndarray) -> None:
        if self._sent is not None:
            raise RuntimeError("send() was called twice without recv()")
        if len(actions) != self.lanes:
            raise ValueError(f"{self.spec.id} has {self.lanes} lanes, not {len(actions)}")
        try:
            self._sent = self._actions.validate(actions)
        except ValueError as error:
            raise ValueError(f"{self.spec.id} has {error}") from None

    def recv(self) -> StepResult:
        if self._sent is None:
            raise RuntimeError("recv() was called without send()")
        sent, self._sent = self._sent, None
        row = StepBuffer(self._encoder.allocate(self.lanes), self.lanes)
        for i, action in enumerate(sent):
            if self._lanes[i].over:
                row.discount[i], row.fresh[i] = 0, True
                row.aborted[i] = self._begin(i, row.frames, None)
            else:
                self._step(i, action, row)
        self._restart_nonfinite(row)
        for i in row.last.nonzero()[0].tolist():
            self._lanes[i].clear_faults()  # only after the final observation was found finite
        if self._bounds_checks_left:
            self._check_bounds(row.frames)
        reward = np.sign(row.raw_reward) if self._rules.clip else row.raw_reward
        return StepResult(self._stack.push(row.frames, row.fresh), reward.astype(np.float32), row.discount, row.last,
                          row.raw_reward, row.aborted, row.info, row.final_info)

    def render(self) -> np.ndarray | None:
        try:
            image = self._lanes[0].env.render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise UserError(missing_package(f"rendering {self.spec.id}", error)) from None
        except NotImplementedError:
            raise UserError(f"{self.spec.id} has no render(): implement it to return an rgb_array image") from None
        return image if isinstance(image, np.ndarray) else None

    def faults(self) -> int:
        return sum(lane.rebuilt for lane in self._lanes)

    def close(self) -> None:
        for lane in self._lanes:
            with contextlib.suppress(Exception):
                lane.env.close()

    def _step(self, i: int, action: Any, row: StepBuffer) -> None:
        """Step lane i and write the result into the row; a failure starts a new episode."""
        lane, rules = self._lanes[i], self._rules
        answer: Any = NO_ANSWER
        try:
            answer = lane.env.step(self._actions.decode(action))
            raw, reward, terminated, truncated, info = answer
            score = reward if type(reward) is float else self._to_float(reward)
            lives = int(info.get("lives", 0)) if rules.life_loss else 0
        except (MemoryError, UserError):
            raise  # rebuilding cannot fix these
        except FAILURES as error:
            if lane.steps == 0:  # later failures may be rare bugs that a rebuild survives
                self._require_api(fault_of_call(error) if answer is NO_ANSWER else fault_of_step(answer))
            self._restart(i, row, self._rebuild(i, user_traceback(error)))
            return
        life_lost = lane.advance(lives)
        if not -MAX_REWARD <= score <= MAX_REWARD and not (rules.clip and math.isfinite(score)):
            large = ", which float32 cannot hold," if math.isfinite(score) else ""
            self._restart(i, row, self._not_finite(i, f"the reward {score:g}{large}"))
            return
        self._write(i, row.frames, raw)
        row.raw_reward[i] = score
        if terminated or life_lost:
            row.discount[i] = 0
        if self._tracks_info:
            lane.info.add(info)
        if terminated or truncated or lane.steps == rules.limit:
            row.last[i] = True
            lane.end_episode()
            row.final_info[i] = info
            if self._tracks_info:
                row.info[i] = lane.info.finish(self.spec.id, info)
            if rules.fallback_limit and not (terminated or truncated):
                _warn_truncated(self.spec.id, lane.steps)

    def _to_float(self, reward: Any) -> float:
        self._require_api(fault_of_reward(reward))
        try:
            return float(reward)
        except OverflowError:  # an integer with hundreds of digits
            return math.inf if reward > 0 else -math.inf

    def _restart(self, i: int, row: StepBuffer, seed: int) -> None:
        row.abort(i)
        self._begin(i, row.frames, seed)

    def _begin(self, i: int, frames: Obs, seed: int | None) -> bool:
        """Reset lane i, rebuilding it as often as allowed; returns True if it was rebuilt."""
        lane, rebuilt = self._lanes[i], False
        while True:
            answer: Any = NO_ANSWER
            try:
                answer = lane.env.reset(seed=seed)
                raw, info = answer
                lives = int(info.get("lives", 0))
                break
            except FAILURES as error:
                self._require_api(fault_of_call(error) if answer is NO_ANSWER else fault_of_reset(answer))
                seed, rebuilt = self._rebuild(i, user_traceback(error)), True
        lane.begin_episode(lives)
        self._write(i, frames, raw)
        return rebuilt

    def _require_api(self, fault: str | None) -> None:
        """Raise UserError for a violation of the Gymnasium API, which rebuilding cannot fix."""
        if fault is not None:
            check = "" if is_local(self._cfg.id) else f" (run `qfleet check-env {self._cfg.id}`)"
            raise UserError(f"{self.spec.id} does not implement the Gymnasium API: {fault}{check}") from None

    def _restart_nonfinite(self, row: StepBuffer) -> None:
        """Start a new episode in lanes whose observation is not finite."""
        while not self._encoder.all_finite(row.frames):
            for i in self._encoder.nonfinite_lanes(row.frames).tolist():
                self._restart(i, row, self._not_finite(i, "an observation with NaN or infinity"))

    def _not_finite(self, i: int, what: str) -> int:
        where = f"{self.spec.id} gave {what} in lane {i} at step {self._lanes[i].steps} of its episode"
        if self._cfg.on_nan == "error":
            raise BadOutput(f"{where}; set env.on_nan=drop_episode to discard such episodes and continue")
        return self._rebuild(i, where)

    def _rebuild(self, i: int, reason: str) -> int:
        """Rebuild the environment of lane i; returns its seed."""
        lane = self._lanes[i]
        with contextlib.suppress(Exception):
            lane.env.close()
        while True:
            if (faults := lane.count_fault()) >= self._cfg.max_faults:
                raise EnvFault(
                    f"{self.spec.id} failed {faults} times in lane {i} without completing an episode "
                    f"(env.max_faults={self._cfg.max_faults}); the last failure:\n{reason}"
                )
            try:
                lane.rebuild(self._build)
                break
            except FAILURES as error:
                reason = user_traceback(error)
        lost = self.faults()
        if lost & (lost - 1) == 0:  # log the 1st, 2nd, 4th, 8th ... only
            log.warning("%s: lane %d failed and was rebuilt, its episode is lost (%d so far): %s", self.spec.id, i,
                        lost, reason.strip().splitlines()[-1])
        return lane.rebuilt_seed()

    def _write(self, i: int, frames: Obs, raw: Any) -> None:
        try:
            self._encoder.write(frames, i, raw)
        except SpaceMismatch as mismatch:
            raise BadOutput(f"{self.spec.id}, lane {i}, step {self._lanes[i].steps}: {mismatch}") from None

    def _check_bounds(self, frames: Obs) -> None:
        self._bounds_checks_left -= 1
        violation = self._encoder.bounds_violation(frames)
        if violation:
            log.warning("%s: %s; training continues", self.spec.id, violation)
            self._bounds_checks_left = 0


def report_texts(name: str, encoder: ObservationEncoder) -> None:
    """Warn about texts that are left out."""
    if encoder.texts:
        _warn_texts(name, ", ".join(encoder.texts))


@cache
def _warn_texts(name: str, texts: str) -> None:
    """Logged once per environment, for any number of copies."""
    log.warning("%s: the agent does not observe %s, which is text; the rest of the observation is used", name, texts)


@cache
def _warn_truncated(id: str, steps: int) -> None:
    log.warning("%s has no time limit, and an episode was truncated after %d steps; its return so far is used. "
                "To change the limit set env.max_episode_steps, or eval.max_episode_steps for evaluations", id, steps)
