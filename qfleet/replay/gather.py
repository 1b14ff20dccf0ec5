"""Gatherer: assembles batches of windows from stored chunks. Dense columns are indexed, blocked columns decoded.

Shapes: B windows, T rows of a window, K frames of a stack, C context rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from qfleet.core.devices import reads_pinned
from qfleet.maths.aligned import aligned_tensor
from qfleet.replay.decode import Decoder
from qfleet.replay.layout import Column, Layout


class Gatherer:
    """Reads windows [B, T, ...] from `dense` records [slots, R], `states` [slots, S, M, ...] and a `decoder`.

    Observations are stacked. Tensors are on `device`; for a GPU they are assembled in pinned memory and copied
    asynchronously.
    """

    def __init__(self, layout: Layout, dense: np.ndarray, states: Mapping[str, np.ndarray],
                 decoder: Decoder, device: torch.device) -> None:
        self._layout = layout
        self.set_records(dense)
        self._states = states
        self._decoder = decoder
        self._pinned = reads_pinned(device)
        self._device = device
        self._window = np.arange(-layout.context, layout.window.length)

    def set_records(self, dense: np.ndarray) -> None:
        """Read dense columns from another array; needed after the store was resized."""
        self._records = dense.reshape(-1)

    def windows(self, slots: np.ndarray, starts: np.ndarray) -> dict[str, torch.Tensor]:
        """Columns of B windows; window i begins at start `starts[i]` of the chunk in `slots[i]`."""
        first = self._layout.context + starts * self._layout.window.stride
        # The batch is the inner, long axis of this sum: broadcasting over T would cost as much as the gather.
        records = self._records.take((self._window[:, None] + (slots * self._layout.rows + first)).T)
        gathered = {}
        for column in self._layout.dense:
            values = records[column.name]
            if column.stack > 1:
                values = self._restack(column, values, self._alive(column, records["last"]))
            else:
                values = np.ascontiguousarray(values[:, self._layout.context:])
            gathered[column.name] = self._send(aligned_tensor(values))
        for column in self._layout.blocked:
            gathered[column.name] = self._decode(column, slots, first, self._alive(column, records["last"]))
        for name, states in self._states.items():
            gathered[name] = self._send(aligned_tensor(states[slots, starts]))
        return gathered

    def _alive(self, column: Column, ended: np.ndarray) -> np.ndarray:
        """Mask of valid frames, bool [B, T, K]: frame k belongs to the same episode as row t."""
        length, context, depth = self._layout.window.length, self._layout.context, column.stack
        alive = np.ones((len(ended), length, depth), bool)
        for k in range(depth - 2, -1, -1):
            back = context - depth + 1 + k
            alive[:, :, k] = alive[:, :, k + 1] & ~ended[:, back:back + length]
        return alive

    def _restack(self, column: Column, frames: np.ndarray, alive: np.ndarray) -> np.ndarray:
        """Stack frames [B, C + T, ...] of a dense column for each of the T rows."""
        length, oldest = self._layout.window.length, self._layout.context - column.stack + 1
        stacks = np.stack([frames[:, oldest + k:oldest + k + length] for k in range(column.stack)], axis=2)
        stacks[~alive] = 0
        return stacks.reshape(len(frames), length, *column.stacked_shape)

    def _decode(self, column: Column, slots: np.ndarray, first: np.ndarray, alive: np.ndarray) -> torch.Tensor:
        length = self._layout.window.length
        result = torch.empty((len(slots), length, *column.stacked_shape), pin_memory=self._pinned,
                             dtype=getattr(torch, column.dtype))
        self._decoder.fill(column, slots, first, alive, result.numpy().reshape(len(slots), length, column.stack, -1))
        return self._send(result)

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory().to(self._device, non_blocking=True) if self._pinned else values
