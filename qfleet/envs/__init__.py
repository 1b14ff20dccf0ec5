"""Environments, one suite per file: `claims(id)`, `make(cfg, lanes, render)` and `inactive(cfg)`.

A suite registers by lying in this folder. The generic Gymnasium suite takes what no other claims.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field

from qfleet.config import Config, Count, Fraction, Positive, PositiveCount
from qfleet.types import VectorEnv

if TYPE_CHECKING:
    from qfleet.envs.spaces import Interpreter

GENERIC = "gym"
"""The suite that is asked last and refuses nobody before it has tried."""


class EnvConfig(Config):
    """The env section of a run: which environment, in how many lanes, seen through which eyes."""

    id: str = Field(min_length=1, description="environment: a Gymnasium id, module:Id or module:callable")
    lanes: PositiveCount = Field(8, description="copies stepped together by one actor")
    protocol: Literal["classic", "sticky"] | None = Field(
        None, description="Atari rules; by default sticky for ALE/...-v5, classic for ...NoFrameskip-v4")
    stack: PositiveCount | None = Field(None, description="frames per image observation; 4 for Atari, else 1")
    frame_size: PositiveCount | None = Field(None, description="side of the square image, pixels; 84 for Atari")
    frame_skip: PositiveCount = Field(4, description="emulator frames per step (Atari)")
    colour: Literal["grey", "rgb"] = Field("grey", description="colour of resized images")
    wrappers: list[str] = Field(default_factory=list, description="module:attribute of wrappers, innermost first")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments for the environment's constructor")
    max_episode_steps: PositiveCount | None = Field(
        None, description="truncate episodes after so many steps; by default as registered")
    unlimited_episode_steps: PositiveCount | None = Field(
        None, description="the same, only where the environment has no time limit; 10,000 in evaluations")
    noop_max: Count | None = Field(None, description="random no-op frames before an Atari game, fewer than this")
    full_action_space: bool | None = Field(None, description="all 18 Atari actions; by default as the protocol says")
    sticky: Fraction | None = Field(None, description="probability that Atari repeats the last action")
    clip_rewards: bool | None = Field(None, description="train on the sign of the reward; scores stay unclipped")
    life_loss: bool | None = Field(None, description="a lost life (info['lives']) is terminal for the learner only")
    max_action_combinations: PositiveCount = Field(1024, description="largest MultiDiscrete to flatten, actions")
    threads: Count = Field(0, description="emulator threads; 0 = as planned")
    on_nan: Literal["error", "drop_episode"] = Field("error", description="what a NaN from the environment does")
    max_faults: PositiveCount = Field(
        5, description="failures of a lane to stop at, with no episode completed between")
    isolate: bool = Field(False, description="run the environment in a process of its own")
    step_timeout_s: Positive = Field(60.0, description="an isolated step that takes longer counts as hung, seconds")

    def inactive(self) -> dict[str, str]:
        reasons = suite(self.id).inactive(self)
        if not self.isolate:
            reasons["step_timeout_s"] = "without env.isolate=true"
        return reasons


class Suite(Protocol):
    """What a file of this folder offers to be a suite."""

    def claims(self, id: str) -> bool: ...
    def make(self, cfg: EnvConfig, lanes: int, render: bool) -> VectorEnv: ...
    def inactive(self, cfg: EnvConfig) -> dict[str, str]: ...


@cache
def suites() -> dict[str, Suite]:
    """Every suite of the folder by file name, the generic one last."""
    names = sorted((m.name for m in pkgutil.iter_modules(__path__)), key=lambda name: (name == GENERIC, name))
    modules: dict[str, Any] = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "claims")}


def suite(id: str) -> Suite:
    """The suite that knows this environment."""
    return next(suite for suite in suites().values() if suite.claims(id))


def make(cfg: EnvConfig, lanes: int, *, render: bool = False) -> VectorEnv:
    """Build `lanes` copies of the environment; `render` makes them slower and visible."""
    return suite(cfg.id).make(cfg, lanes, render)


def interpreter(cfg: EnvConfig) -> Interpreter | None:
    """From the environment's own observations and to its own actions; None where the agent's are the same (Atari).

    One environment is built, to look at its spaces, in this process.
    """
    from qfleet.envs import gym, toy
    from qfleet.envs.spaces import Interpreter, View

    if suite(cfg.id) not in (gym, toy):
        return None
    toy.register()
    build, _ = gym.source(cfg)
    env = build()
    try:
        view = View(cfg.stack or 1, cfg.frame_size, cfg.colour == "grey")
        return Interpreter(env.observation_space, env.action_space, view, cfg.max_action_combinations)
    finally:
        env.close()
