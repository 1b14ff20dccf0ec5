"""Atari 2600 on ale-py's C++ vector environment, under two named protocols.

    classic   up to 30 no-ops, minimal actions, a lost life is terminal for the learner only     ...NoFrameskip-v4
    sticky    Machado et al. 2018: actions repeat with probability 0.25, all 18, full games      ALE/...-v5

Both skip 4 frames (pixel-wise maximum of the last two), stack 4 grey frames of 84 x 84, train on the sign of the
reward, truncate at 108,000 frames, and press no FIRE at reset. Scores are those of full games, unclipped.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from gymnasium.spaces import flatdim

from qfleet.core.env import EnvSpec, Leaf, Obs, StepResult, VectorEnv
from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig
from qfleet.envs.images import ImageFormat
from qfleet.envs.lanes import EpisodeRules, GymLanes
from qfleet.envs.spaces import ROOT

MAX_FRAMES = 108_000
"""Episode limit of the literature: half an hour of play."""

PROTOCOLS: dict[str, dict[str, Any]] = {
    "classic": {"noop_max": 30, "full_action_space": False, "sticky": 0.0, "clip_rewards": True, "life_loss": True},
    "sticky": {"noop_max": 0, "full_action_space": True, "sticky": 0.25, "clip_rewards": True, "life_loss": False},
}

NEW_ID = re.compile(r"ALE/(\w+)-v5")
OLD_ID = re.compile(r"(\w+?)(NoFrameskip|Deterministic|)-v([04])")
TWO_PLAYERS_ONLY = {"combat", "joust", "maze_craze", "warlords"}


@dataclass(frozen=True)
class AtariRules:
    """Game and protocol with all defaults filled in."""

    rom: str
    protocol: str
    noop_max: int
    full_action_space: bool
    sticky: float
    clip_rewards: bool
    life_loss: bool
    frame_skip: int
    stack: int
    size: int
    grey: bool
    max_frames: int


def claims(id: str) -> bool:
    old = OLD_ID.fullmatch(id)
    return id.startswith("ALE/") or bool(old and (old[2] == "NoFrameskip" or old[1] in _games_if_installed()))


def inactive(cfg: EnvConfig) -> dict[str, str]:
    reasons = {"kwargs": f"{cfg.id} is built from the other env keys",
               "max_action_combinations": "Atari actions are not combinations",
               "unlimited_episode_steps": "Atari games have a limit",
               "image_symbols": "Atari images are pictures, not symbols"}
    if not cfg.wrappers:
        reasons["on_nan"] = "an emulator returns no NaN"
        reasons["info_metrics"] = "without env.wrappers, since the games return no info"
    return reasons


def make(cfg: EnvConfig, lanes: int, render: bool) -> VectorEnv:
    """The C++ vector environment, or Python lanes of the same game if rendering or wrappers are needed."""
    rules = rules_of(cfg)
    if cfg.kwargs:
        raise UserError(f"env.kwargs={cfg.kwargs} has no effect on {cfg.id}; use the other env keys instead")
    if not render and not cfg.wrappers:
        return AtariLanes(cfg, rules, lanes)
    from qfleet.envs.atari_game import AtariGame
    from qfleet.envs.gym import with_wrappers

    build = with_wrappers(lambda: AtariGame(rules), cfg)
    limit = -(-rules.max_frames // rules.frame_skip)
    episode_rules = EpisodeRules(limit, rules.clip_rewards, rules.life_loss, rules.frame_skip)
    return GymLanes(build, cfg, lanes, ImageFormat(rules.stack), episode_rules)


def rules_of(cfg: EnvConfig) -> AtariRules:
    """Game and protocol of an id; env keys that are set override the protocol."""
    rom, protocol = _game(cfg.id)
    protocol = cfg.protocol or protocol
    given = {key: getattr(cfg, key) for key in PROTOCOLS[protocol]}
    rules = PROTOCOLS[protocol] | {key: value for key, value in given.items() if value is not None}
    max_frames = cfg.max_episode_steps * cfg.frame_skip if cfg.max_episode_steps else MAX_FRAMES
    return AtariRules(rom, protocol, frame_skip=cfg.frame_skip, stack=cfg.stack or 4, size=cfg.frame_size or 84,
                      grey=cfg.colour == "grey", max_frames=max_frames, **rules)


def protocol(cfg: EnvConfig) -> str:
    """Name of the protocol of a config."""
    return rules_of(cfg).protocol


class AtariLanes:
    """N emulators on C++ threads as a VectorEnv: `send` starts a step, `recv` collects it."""

    def __init__(self, cfg: EnvConfig, rules: AtariRules, lanes: int) -> None:
        from ale_py.vector_env import AtariVectorEnv

        self.lanes, self._rules = lanes, rules
        # Reward clipping and life loss are handled here: the library's own flags lose the score, restart the
        # game at every life, or do not distinguish a lost life from a lost game.
        self._emulators: Any = AtariVectorEnv(
            rules.rom, lanes, num_threads=cfg.threads, max_num_frames_per_episode=rules.max_frames,
            repeat_action_probability=rules.sticky, full_action_space=rules.full_action_space,
            img_height=rules.size, img_width=rules.size, grayscale=rules.grey, stack_num=rules.stack,
            frameskip=rules.frame_skip, noop_max=rules.noop_max, reward_clipping=False, use_fire_reset=False)
        channels = rules.stack if rules.grey else 3 * rules.stack
        leaf = Leaf((channels, rules.size, rules.size), "uint8", "image", stack=rules.stack)
        actions = flatdim(self._emulators.single_action_space)
        self.spec = EnvSpec(cfg.id, {ROOT: leaf}, actions, rules.frame_skip)
        self._running = False

    def reset(self, seeds: Sequence[int]) -> Obs:
        self._drain()
        images, info = self._emulators.reset(seed=np.array([int(seed) % 2**31 for seed in seeds]))
        self._lives = info["lives"]
        self._over = np.zeros(self.lanes, bool)
        return self._obs(images)

    def send(self, actions: np.ndarray) -> None:
        if self._running:
            raise RuntimeError("send() was called twice without recv()")
        actions = np.ascontiguousarray(actions, np.int64)
        # An action out of range would make the emulators' next recv() block forever.
        if actions.shape != (self.lanes,) or actions.min() < 0 or actions.max() >= self.spec.num_actions:
            raise ValueError(f"{self.spec.id} needs {self.lanes} actions 0..{self.spec.num_actions - 1}, not {actions}")
        self._emulators.send(actions)
        self._running = True

    def recv(self) -> StepResult:
        if not self._running:
            raise RuntimeError("recv() was called without send()")
        self._running = False
        images, rewards, terminated, truncated, info = self._emulators.recv()
        lives = info["lives"]
        ended = terminated | self._over
        if self._rules.life_loss:
            # Zero lives is not game over yet: some games continue for a few frames and then terminate.
            ended = ended | ((lives < self._lives) & (lives > 0))
        last = terminated | truncated
        self._lives, self._over = lives, last
        score = rewards.astype(np.float64)
        reward = np.sign(score) if self._rules.clip_rewards else score
        return StepResult(self._obs(images), reward.astype(np.float32), (~ended).astype(np.float32), last, score,
                          np.zeros(self.lanes, bool))

    def render(self) -> np.ndarray | None:
        return None

    def faults(self) -> int:
        return 0

    def close(self) -> None:
        """Stop the emulators and their threads, even if a reference cycle keeps this object alive."""
        self._drain()
        self._emulators = None

    def _obs(self, images: np.ndarray) -> Obs:
        if not self._rules.grey:
            shape = (self.lanes, *self.spec.observation[ROOT].shape)
            images = np.ascontiguousarray(images.transpose(0, 1, 4, 2, 3)).reshape(shape)
        return {ROOT: images}

    def _drain(self) -> None:
        if self._running:
            self._running = False
            self._emulators.recv()


@cache
def games() -> dict[str, str]:
    """Games by their name in ids -> ROM name, e.g. MsPacman -> ms_pacman."""
    try:
        from ale_py import roms
    except ImportError:
        raise UserError("Atari games need the package ale-py; pip install 'qfleet[atari]'") from None
    return {rom.title().replace("_", ""): rom for rom in roms.get_all_rom_ids() if rom not in TWO_PLAYERS_ONLY}


def _games_if_installed() -> dict[str, str]:
    try:
        return games()
    except UserError:
        return {}


def _game(id: str) -> tuple[str, str]:
    """ROM and default protocol of an id."""
    new, old = NEW_ID.fullmatch(id), OLD_ID.fullmatch(id)
    name = new[1] if new else old[1] if old else id.removeprefix("ALE/").partition("-")[0]
    if name not in games():
        near = [f"ALE/{match}-v5" for match in difflib.get_close_matches(name, games(), 3)]
        raise UserError(f"there is no Atari game '{name}' (env.id={id})"
                        + (f"; did you mean {' or '.join(near)}?" if near else ""))
    if new:
        return games()[name], "sticky"
    if old and old[2] == "NoFrameskip" and old[3] == "4":
        return games()[name], "classic"
    raise UserError(f"env.id={id} is an unsupported Atari variant; use {name}NoFrameskip-v4 (classic: no "
                    f"sticky actions, 4 frames skipped) or ALE/{name}-v5 (sticky)")
