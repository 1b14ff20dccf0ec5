"""Replay in main memory: compressed chunks, prioritised or uniform sampling, FIFO eviction.

Shapes of batches: B windows, T rows of a window, K frames of a stack, C context rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qfleet.core.clock import RunClock
from qfleet.core.devices import reads_pinned
from qfleet.core.errors import UserError
from qfleet.core.replay import Chunk, Sample
from qfleet.core.rng import restore_numpy_rng
from qfleet.maths.aligned import aligned_tensor
from qfleet.replay.codec import Blocks, PackedChunk
from qfleet.replay.config import ReplayConfig
from qfleet.replay.decode import Decoder
from qfleet.replay.layout import Column, Layout
from qfleet.replay.memory_plan import fixed_bytes, slot_count
from qfleet.replay.priorities import Priorities, importance_exponent
from qfleet.replay.store import ReplayStore, move_slots


class HostReplay(ReplayStore[PackedChunk]):
    """Replay in main memory: small columns as arrays, wide columns as compressed blocks, priorities in a sum tree.

    With `cfg.max_bytes = None` only the capacity limits the size. Up to `threads` threads decompress a batch. If
    chunks end with short episodes, the arrays grow until the store holds the capacity or reaches `max_bytes`.
    """

    def __init__(self, layout: Layout, cfg: ReplayConfig, seed: int, device: torch.device, threads: int = 1,
                 clock: RunClock | None = None) -> None:
        self._priorities = Priorities(slot_count(layout, cfg) * layout.starts, cfg.alpha)
        super().__init__(layout, cfg, self._priorities, clock)
        self._device = device
        self._fixed = sum(fixed_bytes(layout, self._slots))
        if cfg.max_bytes is not None and self._fixed >= cfg.max_bytes:
            raise UserError(f"replay.max_bytes={cfg.max_bytes} does not exceed the {self._fixed} bytes of arrays that "
                            f"replay.capacity={cfg.capacity} needs: raise max_bytes or lower the capacity")
        # Zeroed pages use no memory until they are written, so memory use grows as the store fills.
        self._dense = np.zeros((self._slots, layout.rows), layout.dense_dtype)
        self._states = {c.name: np.zeros((self._slots, layout.starts, len(layout.state_rows), *c.shape), c.dtype)
                        for c in layout.state_columns}
        self._data: dict[str, list[bytes]] = {c.name: [b""] * self._slots for c in layout.blocked}
        self._ends = {c.name: np.zeros((self._slots, layout.blocks), np.uint32) for c in layout.blocked}
        decoder = Decoder(layout, self._data, self._ends, threads)
        self._gatherer = Gatherer(layout, self._dense, self._states, decoder, device)
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._blob_bytes = 0

    def _sample(self, n: int) -> Sample:
        beta = importance_exponent(self._cfg, self.clock.steps)
        leaves, weight, max_weight = self._priorities.draw(self._rng.random(n), beta, self._size)
        slot = leaves // self._layout.starts
        return Sample(keys=leaves + self._key_offset[slot], weight=aligned_tensor(weight).to(self._device),
                      rows=self._gatherer.windows(slot, leaves - slot * self._layout.starts), max_weight=max_weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays and the sum tree at full capacity, and of the compressed blocks.

        Decoding a batch takes up to 8 MB per thread in addition.
        """
        return self._fixed + self._blob_bytes

    def check_valid(self) -> None:
        super().check_valid()
        assert self._blob_bytes == sum(len(data) for column in self._data.values() for data in column)
        assert all(bool(data) == flag for column in self._data.values()
                   for data, flag in zip(column, self._occupied(), strict=True))

    def _from_chunk(self, chunk: Chunk) -> PackedChunk:
        return self._codec.pack(chunk)

    def _from_packed(self, packed: PackedChunk) -> PackedChunk:
        self._codec.verify(packed)
        return packed

    def _fits(self, packed: PackedChunk) -> bool:
        needed = sum(len(blocks.data) for blocks in packed.blocked.values())
        return self._cfg.max_bytes is None or self.nbytes + needed <= self._cfg.max_bytes

    def _resize(self, slots: int) -> bool:
        """Copy all arrays, one at a time, to arrays of `slots` slots; compressed blocks are not copied.

        Returns False if that many slots, filled like the current ones, would exceed `max_bytes`: larger arrays leave
        less room for blocks.
        """
        if slots == self._slots:
            return True
        fixed = sum(fixed_bytes(self._layout, slots))
        filled = fixed + self._blob_bytes * slots / self._slots
        if slots > self._slots and self._cfg.max_bytes is not None and filled > self._cfg.max_bytes:
            return False
        leaves = self._priorities.get(np.arange(self._slots * self._layout.starts)).reshape(self._slots, -1)
        mapping = *self._move_common(slots), slots
        self._priorities.resize(move_slots(leaves, *mapping).reshape(-1))
        self._dense = move_slots(self._dense, *mapping)
        self._gatherer.set_records(self._dense)
        # Decoder and gatherer refer to these dicts, so replace their values, not the dicts.
        for name, states in self._states.items():
            self._states[name] = move_slots(states, *mapping)
        for name, data in self._data.items():
            self._ends[name] = move_slots(self._ends[name], *mapping)
            self._data[name] = [b""] * slots
            for old, new in zip(*map(np.ndarray.tolist, mapping[:2]), strict=True):
                self._data[name][new] = data[old]
        self._fixed = fixed
        return True

    def _put(self, slot: int, packed: PackedChunk) -> int:
        for name, values in packed.dense.items():
            (self._states[name] if name in self._states else self._dense[name])[slot] = values
        for name, blocks in packed.blocked.items():
            self._data[name][slot] = blocks.data
            self._ends[name][slot] = blocks.ends
            self._blob_bytes += len(blocks.data)
        return zlib.crc32(packed.to_bytes())

    def _drop(self, slot: int) -> None:
        for column in self._data.values():
            self._blob_bytes -= len(column[slot])
            column[slot] = b""

    def _pack(self, slot: int, valid: np.ndarray) -> PackedChunk:
        dense = {column.name: self._dense[column.name][slot] for column in self._layout.dense}
        return PackedChunk(dense | {name: states[slot] for name, states in self._states.items()},
                           {name: self._blocks(name, slot) for name in self._data}, valid)

    def _blocks(self, name: str, slot: int) -> Blocks:
        return Blocks(self._data[name][slot], self._ends[name][slot])

    def _random_state(self) -> Any:
        return self._rng.bit_generator.state

    def _restore_random(self, state: Any) -> None:
        restore_numpy_rng(self._rng, state)


class Gatherer:
    """Assembles batches [B, T, ...] from `dense` records [slots, R], `states` [slots, S, M, ...] and a `decoder`.

    Dense columns are indexed, blocked ones decoded, and observations stacked. Tensors are on `device`; for a GPU they
    are assembled in pinned memory and copied asynchronously.
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
