"""Replay in the memory of the learner's device: raw frames, each stored once, gathered and stacked on the device.

Sampling copies nothing from the host to the GPU, and only checkpoints are compressed. An Atari step takes about
7.7 KB, a million steps 8 GB. With device=cpu the same store uses CPU tensors.

Shapes: B windows, T rows of a window, C context rows before it, K frames of a stack.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from qfleet.core.clock import RunClock
from qfleet.core.devices import staged_for
from qfleet.core.env import OBS_PREFIX
from qfleet.core.replay import Chunk, Sample
from qfleet.core.rng import restore_rng
from qfleet.replay.codec import PackedChunk
from qfleet.replay.config import ReplayConfig
from qfleet.replay.device_priorities import DevicePriorities
from qfleet.replay.layout import Column, Layout
from qfleet.replay.memory_plan import plan_device_memory, record_dtype, slot_count
from qfleet.replay.priorities import importance_exponent
from qfleet.replay.store import ReplayStore

NO_KEYS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class LazySample(Sample):
    """A batch that gathers observations on access: most rows of a window are never read."""

    gather_obs: Callable[[int | torch.Tensor | None], dict[str, torch.Tensor]] = field(kw_only=True)

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        return self.gather_obs(None)

    def obs(self, row: int | torch.Tensor) -> dict[str, torch.Tensor]:
        return self.gather_obs(row)


class DeviceReplay(ReplayStore[Chunk]):
    """Replay on a device: one tensor per observation column, and one tensor of records for all other columns."""

    def __init__(self, layout: Layout, cfg: ReplayConfig, seed: int, device: torch.device,
                 clock: RunClock | None = None) -> None:
        self.priorities = DevicePriorities(slot_count(layout, cfg) * layout.starts, cfg.alpha, device)
        super().__init__(layout, cfg, self.priorities, clock)
        plan_device_memory(layout, cfg, None)
        self._device = device
        self._record = record_dtype(layout)
        self._record_columns = {
            column.name: column for column in layout.columns if not column.name.startswith(OBS_PREFIX)
        }
        self._obs_columns = [column for column in layout.columns if column.name.startswith(OBS_PREFIX)]
        rows = self._slots * layout.rows
        self._records = torch.zeros((rows, self._record.itemsize), dtype=torch.uint8, device=device)
        # The extra row at the end stays zero: stacks use it for frames before their episode began.
        self._frames = {
            column.name: torch.zeros(
                (rows + 1, column.row_bytes // copy_dtype(column).itemsize), dtype=copy_dtype(column), device=device
            )
            for column in self._obs_columns
        }
        self._zero_row = rows
        self._states = {c.name: torch.zeros((self._slots, layout.starts, len(layout.state_rows), *c.shape),
                                            dtype=getattr(torch, c.dtype), device=device) for c in layout.state_columns}
        self._window = torch.arange(-layout.context, layout.window.length, device=device)
        slot, start = torch.arange(self._slots, device=device), torch.arange(layout.starts, device=device)
        self._first_rows = (slot[:, None] * layout.rows + layout.context + start * layout.window.stride).flatten()
        self.rng = torch.Generator(device).manual_seed(seed)
        self._session = secrets.randbits(32)

    def _sample(self, n: int) -> Sample:
        self.prepare()
        at, sample, least = self.draw(n)
        rows = sample.rows | {OBS_PREFIX + name: leaf for name, leaf in sample.leaves.items()}
        leaves = at.cpu().numpy()
        beta = importance_exponent(self._cfg, self.clock.steps)
        max_weight = (self._size * self.priorities.probability(least)) ** -beta if self._cfg.alpha > 0 else 1.0
        return Sample(leaves + self._key_offset[leaves // self._layout.starts], sample.weight, rows, max_weight)

    def prepare(self) -> None:
        """Copy to the device what the next draw needs from the host: β."""
        self.priorities.set_beta(importance_exponent(self._cfg, self.clock.steps))

    def draw(self, n: int) -> tuple[torch.Tensor, Sample, torch.Tensor]:
        """Sample leaves [n] and their windows without synchronisation; also return the smallest leaf value."""
        at, weight, least = self.priorities.draw(n, self.rng)
        layout, first = self._layout, self._first_rows.index_select(0, at)
        records = self._records.index_select(0, (first[:, None] + self._window).flatten())
        windows = records.view(n, len(self._window), -1)
        rows = {name: self._column(windows, name)[:, layout.context:] for name in self._record_columns}
        rows |= {name: states.flatten(0, 1).index_select(0, at) for name, states in self._states.items()}
        ended = self._column(windows, "last")
        # For each position of the window: the newest final row up to it.
        final = torch.where(ended, self._window, -1 - layout.context).cummax(1).values if layout.context else ended

        def gather_obs(row: int | torch.Tensor | None) -> dict[str, torch.Tensor]:
            return {
                column.name[len(OBS_PREFIX) :]: self._stacks(column, first, final, row) for column in self._obs_columns
            }

        return at, LazySample(NO_KEYS, weight, rows, gather_obs=gather_obs), least

    @property
    def nbytes(self) -> int:
        tensors = [self._records, self._first_rows, *self._frames.values(), *self._states.values()]
        return self.priorities.nbytes + sum(values.nbytes for values in tensors)

    def _column(self, records: torch.Tensor, name: str) -> torch.Tensor:
        """View of one column [B, C + T, ...] in records [B, C + T, bytes]."""
        dtype, at = self._record.fields[name][:2]  # type: ignore[index]
        values = records[..., at:at + dtype.itemsize].view(getattr(torch, self._record_columns[name].dtype))
        return (
            values.unflatten(2, self._record_columns[name].shape)
            if self._record_columns[name].shape
            else values[..., 0]
        )

    def _stacks(self, column: Column, first: torch.Tensor, final: torch.Tensor,
                row: int | torch.Tensor | None) -> torch.Tensor:
        """Stacked observations [B, ...] at one row of each window, or [B, T, ...] at all rows.

        Frames of an earlier episode are replaced by zeros.
        """
        context, length = self._layout.context, self._layout.window.length
        if row is None:
            place = self._window[context:].expand(len(first), length)
        else:
            place = self._window[None, context + row:context + row + 1] if isinstance(row, int) else row[:, None]
        if column.stack > 1:
            # For each row: the newest final row before it, if any.
            before = final[:, context - 1:context + length - 1]
            if row is not None:
                before = before[:, row:row + 1] if isinstance(row, int) else before.gather(1, place)
            frame = place[..., None] + self._window[context - column.stack + 1:context + 1]
            index = torch.where(frame > before[..., None], first[:, None, None] + frame, self._zero_row)
        else:
            index = first[:, None] + place
        frames = self._frames[column.name].index_select(0, index.flatten()).view(getattr(torch, column.dtype))
        shape = column.stacked_shape
        return frames.view(len(first), *shape) if row is not None else frames.view(len(first), -1, *shape)

    def _from_chunk(self, chunk: Chunk) -> Chunk:
        return chunk

    def _from_packed(self, packed: PackedChunk) -> Chunk:
        return self._codec.unpack(packed)

    def _fits(self, chunk: Chunk) -> bool:
        return True

    def _put(self, slot: int, chunk: Chunk) -> int:
        rows, at = self._layout.rows, slot * self._layout.rows
        records = np.zeros(rows, self._record)
        for name in self._record_columns:
            records[name] = chunk.columns[name].reshape(records[name].shape)
        self._send(self._records[at:at + rows], torch.from_numpy(records.view(np.uint8).reshape(rows, -1)))
        for column in self._obs_columns:
            values = np.require(chunk.columns[column.name], requirements=["C", "W"]).reshape(rows, -1)
            self._send(self._frames[column.name][at:at + rows], torch.from_numpy(values).view(copy_dtype(column)))
        for name, states in self._states.items():
            self._send(states[slot], torch.from_numpy(np.require(chunk.columns[name], requirements=["C", "W"])))
        # Not a checksum of the contents: store instance, slot and serial identify them without a read-back.
        return zlib.crc32(b"%d %d %d" % (self._session, slot, self._next))

    def _send(self, target: torch.Tensor, values: torch.Tensor) -> None:
        target.copy_(staged_for(self._device, values), non_blocking=True)

    def _drop(self, slot: int) -> None:
        """Do nothing: the next chunk in the slot overwrites the contents."""

    def _pack(self, slot: int, valid: np.ndarray) -> PackedChunk:
        rows, at = self._layout.rows, slot * self._layout.rows
        records = self._records[at:at + rows].cpu().numpy().view(self._record)[:, 0]
        columns = {name: np.ascontiguousarray(records[name]).reshape(rows, *column.shape)
                   for name, column in self._record_columns.items()}
        for column in self._obs_columns:
            frames = self._frames[column.name][at:at + rows].view(getattr(torch, column.dtype)).cpu()
            columns[column.name] = frames.numpy().reshape(rows, *column.shape)
        columns |= {name: states[slot].cpu().numpy() for name, states in self._states.items()}
        return self._codec.pack(Chunk(columns, valid))

    def _random_state(self) -> Any:
        return self.rng.get_state()

    def _restore_random(self, state: Any) -> None:
        restore_rng(self.rng, state)


def copy_dtype(column: Column) -> torch.dtype:
    """Dtype for copies of rows: words of eight bytes where the row size allows, which is eight times faster."""
    return torch.int64 if column.row_bytes % 8 == 0 else getattr(torch, column.dtype)
