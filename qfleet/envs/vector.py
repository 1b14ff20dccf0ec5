"""A Gymnasium vector environment of the user, such as an EnvPool, as lanes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from qfleet.core.env import EnvSpec, Obs, StepResult
from qfleet.core.errors import BadOutput, EnvFault, UserError
from qfleet.core.tracebacks import user_traceback
from qfleet.envs import EnvConfig
from qfleet.envs.envpool import EnvPoolVectorEnv
from qfleet.envs.images import ImageFormat
from qfleet.envs.info import EpisodeInfo, parse_metrics
from qfleet.envs.lanes import MAX_REWARD, report_texts
from qfleet.envs.leaf_reader import SpaceMismatch
from qfleet.envs.spaces import FrameStack, ObservationEncoder, make_action_decoder
from qfleet.envs.stored_spaces import spaces_to_json

log = logging.getLogger("qfleet.envs")

GymVectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]

NOT_APPLIED: dict[str, tuple[tuple[Any, ...], str]] = {
    "wrappers": (([],), "wrap the environments where it is created"),
    "max_episode_steps": ((None,), "limit episodes where it is created; eval.max_episode_steps cannot be set either"),
    "on_nan": (("error",), "its environments cannot be rebuilt one by one")}
"""Keys of the env section that need single environments, with the values that are possible, and what to do instead."""


MAX_SEED = 2**31 - 1
"""Many environments take seeds below this only."""


class VectorEnvLanes:
    """The first `lanes` environments of a `gymnasium.vector.VectorEnv`, as a VectorEnv of qfleet.

    The vector environment must reset an environment in the step after its episode has ended (next-step autoreset).
    Environments beyond `lanes` are stepped with the first one's action, and ignored. `create` makes it anew for the
    seed of a reset, if it takes seeds only when it is created.
    """

    def __init__(self, env: GymVectorEnv, cfg: EnvConfig, lanes: int, image_format: ImageFormat,
                 create: Callable[[int], GymVectorEnv] | None = None) -> None:
        self._env, self.lanes, self._name, self._create = env, lanes, cfg.name, create
        self.require_usable(cfg, lanes)
        self._encoder = ObservationEncoder(env.single_observation_space, image_format)
        self._actions = make_action_decoder(env.single_action_space, cfg.max_action_combinations)
        self._obs_space = batch_space(env.single_observation_space, env.num_envs)
        self._buffer: Any = create_empty_array(env.single_action_space, env.num_envs)
        self._clip, self._life_loss = bool(cfg.clip_rewards), bool(cfg.life_loss)
        stored = spaces_to_json(env.single_observation_space, env.single_action_space)
        self.spec = EnvSpec(self._name, self._encoder.leaves, self._actions.n, box=self._actions.box, spaces=stored)
        self._info = [EpisodeInfo(parse_metrics(cfg.info_metrics)) for _ in range(lanes)]
        self._info_keys = {metric.key.partition(".")[0] for metric in self._info[0].metrics}
        self._over, self._lives = np.zeros(lanes, bool), np.zeros(lanes, int)
        self._sent: Any = None
        report_texts(cfg.name, self._encoder)

    def require_usable(self, cfg: EnvConfig, lanes: int) -> None:
        """UserError unless the vector environment can provide so many lanes with this config."""
        mode = self._env.metadata.get("autoreset_mode")
        if mode is None:
            _warn_mode_unknown(self._name)
        elif mode is not AutoresetMode.NEXT_STEP:
            raise UserError(f"{self._name} has autoreset_mode={mode}: create it with AutoresetMode.NEXT_STEP, the "
                            "default, so that the last observation of an episode is a step of its own")
        if lanes > self._env.num_envs:
            raise UserError(f"{self._name} has {self._env.num_envs} environments, and {lanes} are needed: set "
                            f"env.lanes and eval.lanes to at most {self._env.num_envs}, or pass a function with a "
                            "parameter num_envs")
        for key, (possible, remedy) in NOT_APPLIED.items():
            if (value := getattr(cfg, key)) not in possible:
                raise UserError(f"env.{key}={value}: {self._name} is a vector environment; {remedy}")

    def reset(self, seeds: Sequence[int]) -> Obs:
        self._drain()
        if self._create is not None:
            self._env.close()
            self._env = self._create(int(seeds[0]) % MAX_SEED)
        obs, infos = self._call("reset", seed=self._seeds(seeds))
        self._stack = FrameStack(self.spec.observation, self.lanes)
        self._over, self._lives = np.zeros(self.lanes, bool), self._lives_in(infos)
        for info in self._info:
            info.reset()
        return self._stack.push(self._encode(obs), np.ones(self.lanes, bool))

    def send(self, actions: np.ndarray) -> None:
        if self._sent is not None:
            raise RuntimeError("send() was called twice without recv()")
        try:
            decoded = [self._actions.decode(action) for action in self._actions.validate(actions)]
        except ValueError as error:
            raise ValueError(f"{self._name} has {error}") from None
        batch = [*decoded, *(decoded[0] for _ in range(self._env.num_envs - self.lanes))]
        self._sent = concatenate(self._env.single_action_space, batch, self._buffer)
        if self._steps_ahead:
            self._call("step_async", self._sent)

    def recv(self) -> StepResult:
        if self._sent is None:
            raise RuntimeError("recv() was called without send()")
        sent, self._sent = self._sent, None
        obs, rewards, ends, cuts, infos = self._call("step_wait") if self._steps_ahead else self._call("step", sent)
        fresh, lanes = self._over, self.lanes
        terminated, truncated = (np.asarray(flags, bool)[:lanes] & ~fresh for flags in (ends, cuts))
        score = np.where(fresh, 0.0, np.asarray(rewards, np.float64)[:lanes])
        if not (np.abs(score) <= MAX_REWARD).all():
            raise BadOutput(f"{self._name} gave the rewards {score}, not all of which are numbers that float32 holds")
        self._over = terminated | truncated
        lives = self._lives_in(infos)
        lost_life = (lives > 0) & (lives < self._lives) & ~fresh
        self._lives = lives
        info, final_info = self._episode_info(infos, fresh)
        reward = np.sign(score) if self._clip else score
        return StepResult(self._stack.push(self._encode(obs), fresh), reward.astype(np.float32),
                          (~(terminated | lost_life | fresh)).astype(np.float32), self._over.copy(), score,
                          np.zeros(lanes, bool), info, final_info)

    def render(self) -> np.ndarray | None:
        try:
            images: Any = self._env.render()
        except Exception as error:
            raise UserError(f"{self._name} cannot be rendered: {error}; create it with render_mode=\"rgb_array\"") \
                from None
        image = images[0] if images is not None and len(images) else None
        return image if isinstance(image, np.ndarray) else None

    def faults(self) -> int:
        return 0

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._drain()
        with contextlib.suppress(Exception):
            self._env.close()

    @property
    def _steps_ahead(self) -> bool:
        """A wrapper could change the results of `step` alone, so only these are stepped in two halves."""
        return isinstance(self._env, AsyncVectorEnv | EnvPoolVectorEnv)

    def _drain(self) -> None:
        """Wait for a step in flight and forget its result."""
        if self._sent is not None:
            self._sent = None
            if self._steps_ahead:
                self._call("step_wait")

    def _seeds(self, seeds: Sequence[int]) -> Any:
        """One seed per environment, where they are known to be taken; others may take only one."""
        if not isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
            return int(seeds[0]) % MAX_SEED
        spare = range(1, self._env.num_envs - self.lanes + 1)
        return [*map(int, seeds), *(int(seeds[-1]) + i for i in spare)]

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._env, method)(*args, **kwargs)
        except (MemoryError, UserError):
            raise
        except Exception as error:
            raise EnvFault(f"{self._name} failed in {method}, and a vector environment cannot be rebuilt:\n"
                           f"{user_traceback(error)}") from error

    def _encode(self, obs: Any) -> Obs:
        frames = self._encoder.allocate(self.lanes)
        for lane, raw in zip(range(self.lanes), iterate(self._obs_space, obs), strict=False):
            try:
                self._encoder.write(frames, lane, raw)
            except SpaceMismatch as mismatch:
                raise BadOutput(f"{self._name}, lane {lane}: {mismatch}") from None
        if not self._encoder.all_finite(frames):
            lanes = ", ".join(map(str, self._encoder.nonfinite_lanes(frames).tolist()))
            raise BadOutput(f"{self._name} gave an observation with NaN or infinity in lane {lanes}")
        return frames

    def _lives_in(self, infos: Mapping[str, Any]) -> np.ndarray:
        if not self._life_loss or "lives" not in infos:
            return np.zeros(self.lanes, int)
        return np.asarray(infos["lives"], int)[:self.lanes].copy()

    def _episode_info(self, infos: Mapping[str, Any], fresh: np.ndarray
                      ) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, Any]]]:
        """Metrics and final `info` of the lanes whose episode is over."""
        metrics: dict[int, dict[str, float]] = {}
        keys = self._info_keys
        measured = {key: value for key, value in infos.items()
                    if key in keys or (key.startswith("_") and key[1:] in keys)}
        if self._info_keys:
            for lane in (~fresh).nonzero()[0].tolist():
                self._info[lane].add(_of_lane(measured, lane))
        finals = {lane: _of_lane(infos, lane) for lane in self._over.nonzero()[0].tolist()}
        if self._info_keys:
            metrics = {lane: self._info[lane].finish(self._name, info) for lane, info in finals.items()}
        return metrics, finals


def _of_lane(infos: Mapping[str, Any], lane: int) -> dict[str, Any]:
    """`info` of one environment in that of the vector: `_key` says which environments have `key`."""
    info: dict[str, Any] = {}
    for name, values in infos.items():
        present = infos.get(f"_{name}")
        if _is_mask(name, infos) or (present is not None and not present[lane]):
            continue
        if isinstance(values, Mapping):
            info[name] = _of_lane(values, lane)
        elif isinstance(values, np.ndarray | list | tuple) and len(values) > lane:
            info[name] = values[lane]
    return info


def _is_mask(name: str, infos: Mapping[str, Any]) -> bool:
    return name.startswith("_") and name[1:] in infos


@cache
def _warn_mode_unknown(name: str) -> None:
    log.warning("%s does not say how it resets its environments (metadata['autoreset_mode']); each must be reset in "
                "the step after its episode has ended", name)
