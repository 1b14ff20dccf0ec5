"""Environment suites, one file each: `claims(id)`, `make(cfg, lanes, render)` and `inactive(cfg)`.

Every file of this folder with these functions is a suite. The generic Gymnasium suite handles ids that no other
claims.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field

from qfleet.config import Config, Count, Fraction, Positive, PositiveCount
from qfleet.config.objects import readable
from qfleet.core.env import VectorEnv

if TYPE_CHECKING:
    from qfleet.envs.spaces import SpaceAdapter

GENERIC = "gym"
"""Suite that is tried last and claims every id."""


def _check_info_metrics(texts: list[str]) -> list[str]:
    from qfleet.envs.info import parse_metrics

    parse_metrics(texts)
    return texts


class EnvConfig(Config):
    """The env section: the environment, the number of lanes and the preprocessing of observations and rewards."""

    id: str = Field(min_length=1, description="environment: a Gymnasium id, module:Id or module:callable")
    lanes: PositiveCount = Field(
        8, description="environments of a group, stepped together; actions are computed in one batch")
    groups: PositiveCount = Field(
        1, description="groups of env.lanes environments in each acting process, which alternate: while one group "
                       "steps, the network selects actions for another")
    protocol: Literal["classic", "sticky"] | None = Field(
        None, description="Atari protocol: classic (no-op starts, a lost life is terminal, minimal actions) or sticky "
                          "(sticky actions, all 18 actions); null = classic for ...NoFrameskip-v4, sticky for "
                          "ALE/...-v5")
    stack: PositiveCount | None = Field(
        None, description="frames stacked into one image observation; null = 4 for Atari, else 1")
    frame_size: PositiveCount | None = Field(
        None, description="side of the square that images are resized to, pixels; null = 84 for Atari, else not "
                          "resized")
    frame_skip: PositiveCount = Field(4, description="emulator frames per environment step (Atari only)")
    colour: Literal["grey", "rgb"] = Field(
        "grey", description="colour of Atari images and of resized images: grey or rgb")
    image_symbols: Literal["auto"] | dict[str, Annotated[int, Field(ge=2, le=256)]] | None = Field(
        "auto", description="images of symbols, as {observation name: number of values}: the network gets one plane "
                            "per value instead of values divided by the largest. auto = images of at most 32 x 32 "
                            "pixels and 32 values, found from the space or in a short random trial; null = none")
    wrappers: list[str | dict[str, dict[str, Any]]] = Field(
        default_factory=list, description="Gymnasium wrappers as module:attribute, the innermost first; with keyword "
                                          "arguments as {module:attribute: {name: value}}")
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the environment's constructor")
    max_episode_steps: PositiveCount | None = Field(
        None, description="truncate episodes after this many steps; null = the registered time limit, 108,000 frames "
                          "for Atari")
    unlimited_episode_steps: PositiveCount | None = Field(
        10_000, description="truncate episodes after this many steps if the environment has no time limit; null = "
                            "never in training, 10,000 in evaluation")
    noop_max: Count | None = Field(
        None, description="start Atari episodes with a random number of no-op frames below this; null = 30 (classic) "
                          "or 0 (sticky)")
    full_action_space: bool | None = Field(
        None, description="use all 18 Atari actions, not only those of the game; null = false (classic) or true "
                          "(sticky)")
    sticky: Fraction | None = Field(
        None, description="probability that Atari repeats the previous action; null = 0 (classic) or 0.25 (sticky)")
    clip_rewards: bool | None = Field(
        None, description="train on the sign of the reward; reported returns stay unclipped. null = true for Atari, "
                          "else false")
    life_loss: bool | None = Field(
        None, description="a lost life (info['lives']) is terminal for the learner while the episode continues; null "
                          "= true for Atari classic, else false")
    max_action_combinations: PositiveCount = Field(
        1024, description="largest MultiDiscrete action space to flatten, number of actions")
    threads: Count = Field(0, description="emulator threads of a process (Atari only); 0 = its share of the cores")
    on_nan: Literal["error", "drop_episode"] = Field(
        "error", description="NaN or infinity in a reward or observation: error (stop) or drop_episode (discard the "
                             "episode and rebuild the environment)")
    info_metrics: Annotated[list[str], AfterValidator(_check_info_metrics)] = Field(
        default_factory=list, examples=["[success]"],
        description="metrics from info, averaged over episodes: a key of info, whose value at the end of the episode "
                    "counts, or sum(key), mean(key), max(key), min(key) over its steps")
    max_faults: PositiveCount = Field(
        5, description="stop after this many failures of a lane without a completed episode in between")
    isolate: bool = Field(
        False, description="run the environments of an actor in a separate process, which is replaced if it crashes "
                           "or hangs; for unreliable environments")
    step_timeout_s: Positive = Field(60.0, description="replace an isolated process whose step takes longer, seconds")

    @property
    def name(self) -> str:
        """The id as it is shown: for an object of the program, its name."""
        return readable(self.id)

    def inactive(self) -> dict[str, str]:
        reasons = suite(self.id).inactive(self)
        if not self.isolate:
            reasons["step_timeout_s"] = "without env.isolate=true"
        return reasons


class Suite(Protocol):
    """Functions that a file of this folder must define to be a suite."""

    def claims(self, id: str) -> bool: ...
    def make(self, cfg: EnvConfig, lanes: int, render: bool) -> VectorEnv: ...
    def inactive(self, cfg: EnvConfig) -> dict[str, str]: ...


@cache
def suites() -> dict[str, Suite]:
    """All suites of the folder by file name, the generic one last."""
    names = sorted((m.name for m in pkgutil.iter_modules(__path__)), key=lambda name: (name == GENERIC, name))
    modules: dict[str, Any] = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "claims")}


def suite(id: str) -> Suite:
    """The first suite that claims this id."""
    return next(suite for suite in suites().values() if suite.claims(id))


def make(cfg: EnvConfig, lanes: int, *, render: bool = False) -> VectorEnv:
    """Build `lanes` copies of the environment; with `render` they are slower and can return images."""
    return suite(cfg.id).make(cfg, lanes, render)


def make_space_adapter(cfg: EnvConfig, stored: Mapping[str, Any] | None = None) -> SpaceAdapter | None:
    """Converter between the environment's spaces and the agent's; None if they are the same (Atari).

    Without `stored` spaces (`EnvSpec.spaces`), one environment is built in this process to read them. ValueError if
    the stored spaces are malformed.
    """
    from qfleet.envs import gym, toy
    from qfleet.envs.spaces import SpaceAdapter
    from qfleet.envs.stored_spaces import spaces_from_json

    if suite(cfg.id) not in (gym, toy):
        return None
    image_format = gym.image_format(cfg)
    if stored is not None:
        return SpaceAdapter(*spaces_from_json(stored), image_format, cfg.max_action_combinations)
    toy.register()
    build, _ = gym.env_factory(cfg)
    env = build()
    try:
        return SpaceAdapter(*gym.single_spaces(env), image_format, cfg.max_action_combinations)
    finally:
        env.close()
