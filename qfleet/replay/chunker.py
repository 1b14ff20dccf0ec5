"""Turns the rows of N lanes into self-contained chunks, every frame kept once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qfleet.core.env import OBS_PREFIX, Obs
from qfleet.core.replay import Chunk
from qfleet.replay.layout import Layout


class Chunker:
    """Gathers one row per lane and step, and cuts a chunk out of every lane that is full.

    A lane is one endless stream: windows that span the end of an episode are cut at its `last` row by whoever
    reads them. With whole windows a chunk ends with its episode instead, so that none crosses into another.
    Rows that are not there (before the stream, after a short chunk) are zeros with `last = True`.

        burn-in 2, 4 trained rows, look-ahead 1, stride 2; an episode of five steps, its final row is F:

            _ _ 0 1 2 3 4 F            start 0 trains steps 0 to 3; its burn-in is padding
                0 1 2 3 4 F _          start 2 trains steps 2 to 4
                    2 3 4 F _ _ _      start 4 trains step 4

    A stream may begin with more `padding`, so many rows for each lane; see `staggered`.
    """

    def __init__(self, layout: Layout, lanes: int, padding: Sequence[int] = ()) -> None:
        self._layout = layout
        self._lanes = np.arange(lanes)
        self._fill = np.zeros(lanes, np.int64)
        self._rows = {column.name: np.zeros((lanes, layout.rows, *column.shape), column.dtype)
                      for column in layout.columns + layout.state_columns}
        self._padding = padding or [0] * lanes
        for lane in range(lanes):
            self._restart(lane)

    def append(self, obs: Obs, action: np.ndarray, reward: np.ndarray, discount: np.ndarray, last: np.ndarray,
               extras: Mapping[str, np.ndarray] | None = None) -> list[tuple[int, Chunk]]:
        """Take one row of every lane, [N, ...]; return (lane, chunk) for the lanes that became full."""
        row = {"action": action, "reward": reward, "discount": discount, "last": last, **(extras or {})}
        for name, leaf in self._layout.spec.observation.items():
            row[OBS_PREFIX + name] = obs[name] if leaf.stack == 1 else obs[name][:, -leaf.frame_shape[0]:]
        for name, rows in self._rows.items():
            rows[self._lanes, self._fill] = row[name]
        self._fill += 1
        whole = self._layout.window.within_episode
        due = self._fill == self._layout.rows
        if whole:
            due |= last
        chunks = list[tuple[int, Chunk]]()
        for lane in due.nonzero()[0].tolist():
            if whole and last[lane]:
                chunks += self._close(lane)
            else:
                chunks.append((lane, self._cut(lane)))
        return chunks

    def last_rows(self) -> dict[str, np.ndarray]:
        """A copy of the row that each lane was given last [N, ...]; anything where a stream has just begun."""
        return {name: rows[self._lanes, self._fill - 1] for name, rows in self._rows.items()}

    def flush(self) -> list[tuple[int, Chunk]]:
        """Ship what is left, in short chunks, and begin new streams; meant for when every lane has just ended."""
        return [item for lane in range(len(self._lanes)) for item in self._close(lane)]

    def state_dict(self) -> dict[str, Any]:
        return {"fill": self._fill.copy(), **{"rows." + name: rows.copy() for name, rows in self._rows.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._fill[:] = state["fill"]
        for name, rows in self._rows.items():
            rows[:] = state["rows." + name]

    def _close(self, lane: int) -> list[tuple[int, Chunk]]:
        """Cut chunks until no row of the lane is left to start from; look-ahead rows may need a second one."""
        chunks = []
        while not self._rows["last"][lane, self._layout.context:self._fill[lane]].all():
            chunks.append((lane, self._cut(lane)))
        self._restart(lane)
        return [(lane, chunk) for lane, chunk in chunks if chunk.valid.any()]

    def _cut(self, lane: int) -> Chunk:
        """Copy the lane's rows into a chunk, and move those that the next chunk needs to the front."""
        fill, steps = int(self._fill[lane]), self._layout.chunk_steps
        columns = {name: rows[lane].copy() for name, rows in self._rows.items()}
        for name, values in columns.items():
            values[fill:] = name == "last"
        for column in self._layout.state_columns:
            columns[column.name] = columns[column.name][self._layout.state_chunk_rows]
        kept = max(self._layout.context, fill - steps)
        for rows in self._rows.values():
            rows[lane, :kept] = rows[lane, steps:steps + kept].copy()
        self._fill[lane] = kept
        return Chunk(columns, valid_starts(self._layout, columns["last"], fill))

    def _restart(self, lane: int) -> None:
        before = self._layout.context + self._layout.lead + self._padding[lane]
        for name, rows in self._rows.items():
            rows[lane, :before] = name == "last"
        self._fill[lane] = before


def staggered_padding(layout: Layout, lanes: int) -> list[int]:
    """Paddings with which the chunks of lanes that begin together come one by one: else all of them come at once."""
    stride = layout.window.stride
    return [lane * layout.chunk_steps // lanes // stride * stride for lane in range(lanes)]


def valid_starts(layout: Layout, last: np.ndarray, fill: int) -> np.ndarray:
    """Bool [S]: the first trained row is real and not final, and the window complete or ended by a `last` row."""
    start = layout.context + np.arange(layout.starts) * layout.window.stride
    first = start + layout.window.past
    stop = np.minimum(start + layout.window.length, fill)
    finals_before = np.concatenate([[0], np.cumsum(last)])
    ended = finals_before[np.maximum(stop, first)] > finals_before[first]
    return (first < fill) & ~last[first] & ((start + layout.window.length <= fill) | ended)
