"""A Gymnasium vector environment of the user, such as an EnvPool, as lanes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from qfleet.core.env import EnvSpec, Obs, StepResult
from qfleet.core.errors import BadOutput, EnvFault, UserError
from qfleet.core.tracebacks import user_traceback
from qfleet.envs import EnvConfig
from qfleet.envs.info import EpisodeInfo, parse_metrics
from qfleet.envs.spaces import FrameStack, ImageFormat, ObservationEncoder, SpaceMismatch, make_action_decoder
from qfleet.envs.stored_spaces import spaces_to_json

NOT_APPLIED = {"wrappers": "wrap it where it is created", "max_episode_steps": "limit episodes where it is created",
               "life_loss": "end episodes where it is created"}
"""Keys of the env section that need single environments, and what to do instead."""


class VectorEnvLanes:
    """The first `lanes` environments of a `gymnasium.vector.VectorEnv`, as a VectorEnv of qfleet.

    The vector environment must reset an environment in the step after its episode has ended (next-step autoreset).
    Environments beyond `lanes` are stepped with the first one's action, and ignored.
    """

    def __init__(self, env: gymnasium.vector.VectorEnv[Any, Any, Any], cfg: EnvConfig, lanes: int,
                 image_format: ImageFormat) -> None:
        self._env, self.lanes, self._name = env, lanes, cfg.id
        _require_usable(env, cfg, lanes)
        self._encoder = ObservationEncoder(env.single_observation_space, image_format)
        self._actions = make_action_decoder(env.single_action_space, cfg.max_action_combinations)
        self._buffer: Any = create_empty_array(env.single_action_space, env.num_envs)
        self._clip = bool(cfg.clip_rewards)
        stored = spaces_to_json(env.single_observation_space, env.single_action_space)
        self.spec = EnvSpec(cfg.id, self._encoder.leaves, self._actions.n, box=self._actions.box, spaces=stored)
        self._info = [EpisodeInfo(parse_metrics(cfg.info_metrics)) for _ in range(lanes)]
        self._over, self._pending = np.zeros(lanes, bool), False

    def reset(self, seeds: Sequence[int]) -> Obs:
        own_seeds = isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv)  # others may take only one
        spare = [int(seeds[-1]) + i for i in range(1, self._env.num_envs - self.lanes + 1)]
        obs, _ = self._call("reset", seed=[*map(int, seeds), *spare] if own_seeds else int(seeds[0]))
        self._stack = FrameStack(self.spec.observation, self.lanes)
        self._over = np.zeros(self.lanes, bool)
        for info in self._info:
            info.reset()
        return self._stack.push(self._encode(obs), np.ones(self.lanes, bool))

    def send(self, actions: np.ndarray) -> None:
        decoded = [self._actions.decode(action) for action in self._actions.validate(actions)]
        batch = [*decoded, *(decoded[0] for _ in range(self._env.num_envs - self.lanes))]
        batched = concatenate(self._env.single_action_space, batch, self._buffer)
        if hasattr(self._env, "step_async"):
            self._call("step_async", batched)
            self._pending = True
        else:
            self._sent = batched

    def recv(self) -> StepResult:
        step = self._call("step_wait") if self._pending else self._call("step", self._sent)
        self._pending = False
        obs, rewards, terminated, truncated, infos = step
        fresh, lanes = self._over, self.lanes
        raw_reward = np.where(fresh, 0.0, np.asarray(rewards, np.float64)[:lanes])
        if not np.isfinite(raw_reward).all():
            raise BadOutput(f"{self._name} gave the rewards {raw_reward}")
        over = (np.asarray(terminated, bool) | np.asarray(truncated, bool))[:lanes] & ~fresh
        discount = (~(np.asarray(terminated, bool)[:lanes] | fresh)).astype(np.float32)
        info, final_info = self._episode_info(infos, fresh, over)
        self._over = over
        reward = np.sign(raw_reward) if self._clip else raw_reward
        return StepResult(self._stack.push(self._encode(obs), fresh), reward.astype(np.float32), discount, over.copy(),
                          raw_reward, np.zeros(lanes, bool), info, final_info)

    def render(self) -> np.ndarray | None:
        images = self._env.render()
        image = images[0] if images is not None and len(images) else None
        return image if isinstance(image, np.ndarray) else None

    def faults(self) -> int:
        return 0

    def close(self) -> None:
        with contextlib.suppress(Exception):
            if self._pending:
                self._pending = False
                self._call("step_wait")
            self._env.close()

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._env, method)(*args, **kwargs)
        except Exception as error:
            raise EnvFault(f"{self._name} failed in {method}, and a vector environment cannot be rebuilt:\n"
                           f"{user_traceback(error)}") from error

    def _encode(self, obs: Any) -> Obs:
        frames = self._encoder.allocate(self.lanes)
        for lane, raw in zip(range(self.lanes), iterate(self._env.observation_space, obs), strict=False):
            try:
                self._encoder.write(frames, lane, raw)
            except SpaceMismatch as mismatch:
                raise BadOutput(f"{self._name}, lane {lane}: {mismatch}") from None
        if not self._encoder.all_finite(frames):
            lanes = self._encoder.nonfinite_lanes(frames).tolist()
            raise BadOutput(f"{self._name} gave an observation with NaN or infinity in lanes {lanes}")
        return frames

    def _episode_info(self, infos: Mapping[str, Any], fresh: np.ndarray, over: np.ndarray
                      ) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, Any]]]:
        """Metrics and final `info` of the lanes whose episode is over."""
        metrics: dict[int, dict[str, float]] = {}
        finals: dict[int, dict[str, Any]] = {}
        tracked = range(self.lanes) if self._info[0].metrics else over.nonzero()[0].tolist()
        for lane in tracked:
            if fresh[lane]:
                continue
            info = _of_lane(infos, lane)
            self._info[lane].add(info)
            if over[lane]:
                metrics[lane], finals[lane] = self._info[lane].finish(self._name, info), info
        return metrics, finals


def _require_usable(env: gymnasium.vector.VectorEnv[Any, Any, Any], cfg: EnvConfig, lanes: int) -> None:
    mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    if mode != AutoresetMode.NEXT_STEP:
        raise UserError(f"{cfg.id} has {mode}: create it with autoreset_mode=AutoresetMode.NEXT_STEP, the default, so "
                        "that the last observation of an episode is not lost")
    if lanes > env.num_envs:
        raise UserError(f"{cfg.id} has {env.num_envs} environments, and {lanes} are needed: set env.lanes and "
                        f"eval.lanes to at most {env.num_envs}, or pass a function with a parameter num_envs")
    for key, remedy in NOT_APPLIED.items():
        if getattr(cfg, key):
            raise UserError(f"env.{key}={getattr(cfg, key)}: {cfg.id} is a vector environment; {remedy}")


def _of_lane(infos: Mapping[str, Any], lane: int) -> dict[str, Any]:
    """`info` of one environment in that of the vector: `_key` says which environments have `key`."""
    info: dict[str, Any] = {}
    for name, values in infos.items():
        present = infos.get(f"_{name}")
        if name.startswith("_") or (present is not None and not present[lane]):
            continue
        if isinstance(values, Mapping):
            info[name] = _of_lane(values, lane)
        elif isinstance(values, np.ndarray | list | tuple) and len(values) > lane:
            info[name] = values[lane]
    return info
