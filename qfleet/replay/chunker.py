"""Chunker: cuts the rows of N lanes into self-contained chunks that store every frame once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qfleet.core.env import OBS_PREFIX, Obs
from qfleet.core.replay import Chunk
from qfleet.replay.layout import Layout


class Chunker:
    """Buffers one row per lane and step, and emits a chunk for every lane whose buffer is full.

    A lane is one continuous stream: a window may span the end of an episode, and its reader truncates it at
    the first `last` row. With `window.within_episode` a chunk ends with its episode instead, so that no
    window spans two episodes. Missing rows (before the stream, after a short chunk) are zeros with `last = True`.

        burn-in 2, 4 trained rows, look-ahead 1, stride 2; an episode of five steps with the final row F:

            _ _ 0 1 2 3 4 F            start 0 trains steps 0 to 3; its burn-in is padding
                0 1 2 3 4 F _          start 2 trains steps 2 to 4
                    2 3 4 F _ _ _      start 4 trains step 4

    `padding` [N] adds rows of padding at the start of each lane's stream; see `staggered_padding`.
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
        """Append one row per lane, [N, ...]; return (lane, chunk) for every lane whose buffer is full."""
        row = {"action": action, "reward": reward, "discount": discount, "last": last, **(extras or {})}
        for name, leaf in self._layout.spec.observation.items():
            row[OBS_PREFIX + name] = obs[name] if leaf.stack == 1 else obs[name][:, -leaf.frame_shape[0]:]
        for name, rows in self._rows.items():
            rows[self._lanes, self._fill] = row[name]
        self._fill += 1
        within_episode = self._layout.window.within_episode
        due = self._fill == self._layout.rows
        if within_episode:
            due |= last
        chunks = list[tuple[int, Chunk]]()
        for lane in due.nonzero()[0].tolist():
            if within_episode and last[lane]:
                chunks += self._close(lane)
            else:
                chunks.append((lane, self._cut(lane)))
        return chunks

    def last_rows(self) -> dict[str, np.ndarray]:
        """Copy of the newest row of every lane, [N, ...]; undefined for a lane whose stream has no rows yet."""
        return {name: rows[self._lanes, self._fill - 1] for name, rows in self._rows.items()}

    def flush(self) -> list[tuple[int, Chunk]]:
        """Emit the buffered rows as short chunks and start new streams; call it when every episode has just ended."""
        return [item for lane in range(len(self._lanes)) for item in self._close(lane)]

    def state_dict(self) -> dict[str, Any]:
        return {"fill": self._fill.copy(), **{"rows." + name: rows.copy() for name, rows in self._rows.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._fill[:] = state["fill"]
        for name, rows in self._rows.items():
            rows[:] = state["rows." + name]

    def _close(self, lane: int) -> list[tuple[int, Chunk]]:
        """Cut chunks until no window can start in the lane; look-ahead rows may need a second chunk."""
        chunks = []
        while not self._rows["last"][lane, self._layout.context:self._fill[lane]].all():
            chunks.append((lane, self._cut(lane)))
        self._restart(lane)
        return [(lane, chunk) for lane, chunk in chunks if chunk.valid.any()]

    def _cut(self, lane: int) -> Chunk:
        """Copy the lane's rows into a chunk and move the rows that the next chunk shares to the front."""
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
        """Start a new stream in the lane: its buffer holds only padding."""
        padding = self._layout.context + self._layout.lead + self._padding[lane]
        for name, rows in self._rows.items():
            rows[lane, :padding] = name == "last"
        self._fill[lane] = padding


def staggered_padding(layout: Layout, lanes: int) -> list[int]:
    """Padding per lane that spreads the chunks of N lanes over the steps of a chunk; without it all come at once."""
    stride = layout.window.stride
    return [lane * layout.chunk_steps // lanes // stride * stride for lane in range(lanes)]


def valid_starts(layout: Layout, last: np.ndarray, fill: int) -> np.ndarray:
    """Mask of valid starts, bool [S]: first trained row real and not final, window complete or with a final row."""
    start = layout.context + np.arange(layout.starts) * layout.window.stride
    first = start + layout.window.past
    stop = np.minimum(start + layout.window.length, fill)
    finals_before = np.concatenate([[0], np.cumsum(last)])
    ended = finals_before[np.maximum(stop, first)] > finals_before[first]
    return (first < fill) & ~last[first] & ((start + layout.window.length <= fill) | ended)
