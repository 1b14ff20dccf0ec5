"""Naive twin of chunker and replay: each lane is a plain list of rows, each frame a small array."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Chunk, Window
from qfleet.replay.chunker import Chunker
from qfleet.replay.config import ReplayConfig
from qfleet.replay.device_store import DeviceReplay
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout

LANE = 1_000_000
SPEC = EnvSpec("twin", {
    "image": Leaf((3, 16, 18), "uint8", "image", stack=3),
    "small": Leaf((4, 5), "uint8", "image", stack=2),
    "wide": Leaf((70,), "float32", "vector"),
    "vector": Leaf((4,), "float32", "vector"),
}, num_actions=5)
EXTRAS = {"row": ((), "int64")}
STATES = {"state": ((2,), "int64")}
"""A state is the key of its row, twice; stored only at `state_rows`."""


def key(lane: int, t: int) -> int:
    """Value of the column `row`; never 0, which is padding."""
    return (lane + 1) * LANE + t


def place(row: int) -> tuple[int, int]:
    """Lane and t of a key."""
    return row // LANE - 1, row % LANE


@dataclass
class Row:
    frames: dict[str, np.ndarray]
    action: int
    reward: float
    discount: float
    last: bool


@dataclass
class Twin:
    """Generates random episodes on N lanes; `rows[lane][t]` is the true row, identified by the column `row`."""

    lanes: int
    seed: int
    end_chance: float = 0.1
    rows: list[list[Row]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.rows = [[] for _ in range(self.lanes)]

    def advance(self, end: bool = False) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Append one row per lane (a final row if `end`); return stacked observations [N, ...] and columns [N]."""
        for lane in range(self.lanes):
            self.rows[lane].append(self._row(self.rows[lane], end))
        now = [len(rows) - 1 for rows in self.rows]
        obs = {name: np.stack([self.stacked(name, lane, t) for lane, t in enumerate(now)]) for name in SPEC.observation}
        newest = [rows[-1] for rows in self.rows]
        columns = {name: np.array([getattr(row, name) for row in newest])
                   for name in ("action", "reward", "discount", "last")}
        columns["row"] = np.array([key(lane, t) for lane, t in enumerate(now)])
        return obs, columns

    def _row(self, previous: list[Row], end: bool) -> Row:
        frames = {name: self.rng.integers(1, 255, leaf.frame_shape).astype(leaf.dtype)
                  for name, leaf in SPEC.observation.items()}
        terminated = (bool(previous) and previous[-1].discount == 0 and previous[-1].action == 0
                      and not previous[-1].last)
        if end or terminated or self.rng.random() < self.end_chance / 2:  # the last condition is a truncation
            return Row(frames, 1, 0.0, 0.0, True)
        # Discount 0 with action 0 terminates; with any other action it is a lost life, and the episode continues.
        discount = float(self.rng.random() > self.end_chance)
        return Row(frames, int(self.rng.integers(5)), float(np.float32(self.rng.normal())), discount, False)

    def stacked(self, name: str, lane: int, t: int) -> np.ndarray:
        leaf, rows = SPEC.observation[name], self.rows[lane]
        frames, alive = [], True
        for back in range(leaf.stack):
            alive = alive and t - back >= 0 and (back == 0 or not rows[t - back].last)
            frames.insert(0, rows[t - back].frames[name] if alive else np.zeros(leaf.frame_shape, leaf.dtype))
        return frames[0] if leaf.stack == 1 else np.concatenate(frames)

    def n_step(self, lane: int, t: int, n: int, gamma: float) -> tuple[float, float, int]:
        """n-step return, bootstrap discount and bootstrap t, computed one transition at a time."""
        ret, scale, steps = 0.0, 1.0, 0
        while steps < n and not self.rows[lane][t].last:
            ret += scale * self.rows[lane][t].reward
            scale *= gamma * self.rows[lane][t].discount
            t += 1
            steps += 1
        return ret, scale, t


def layout_for(window: Window, chunk_steps: int) -> Layout:
    return Layout(SPEC, window, chunk_steps, EXTRAS, STATES, (0, window.past + window.unroll - 1))


def append(chunker: Chunker, twin: Twin, end: bool = False) -> list[tuple[int, Chunk]]:
    obs, columns = twin.advance(end)
    row = columns.pop("row")
    return chunker.append(obs, **columns, extras={"row": row, "state": np.stack([row, row], 1)})


STORES = {"host": HostReplay, "device": DeviceReplay}
chosen = {"store": "host"}
"""Kind of store that `replay_for` creates, so that one test suite covers all of them."""


def replay_for(layout: Layout, seed: int = 0, **cfg: float) -> HostReplay | DeviceReplay:
    """A replay without rate limiting, unless `cfg` says otherwise."""
    values = {"capacity": 1000, "min_steps": 0, "samples_per_insert": 1e9, "chunk_steps": layout.chunk_steps} | cfg
    return STORES[chosen["store"]](layout, ReplayConfig.model_validate(values), seed, torch.device("cpu"))


def play(twin: Twin, chunker: Chunker, replay: HostReplay | DeviceReplay, steps: int) -> None:
    for _ in range(steps):
        replay.clock.count_steps(twin.lanes)
        for _, chunk in append(chunker, twin):
            assert replay.add(chunk) is not None
