"""The replay that lives in main memory: compressed chunks, prioritised or uniform, evicted first in, first out."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from qfleet.replay.codec import Blocks, Codec, Packed
from qfleet.replay.config import ReplayConfig
from qfleet.replay.gather import Gatherer
from qfleet.replay.layout import Layout
from qfleet.replay.pace import Pace
from qfleet.replay.planner import fixed_bytes, slots
from qfleet.replay.priorities import Priorities
from qfleet.replay.segments import Source, read, split
from qfleet.types import Chunk, Sample, Segment, UserError


class HostReplay:
    """Implements `types.Replay`.

    Chunks are numbered by a serial that only grows; chunk `serial` rests in slot `serial % slots`, and the live ones
    are `first <= serial < next`. A key is `serial * S + start`: once its chunk is evicted it is stale and ignored.
    With `cfg.max_bytes = None` only the capacity limits what is kept.
    """

    def __init__(self, layout: Layout, cfg: ReplayConfig, seed: int, device: torch.device) -> None:
        self._layout, self._cfg, self._device = layout, cfg, device
        self._slots = slots(layout, cfg)
        self._fixed = sum(fixed_bytes(layout, cfg))
        if cfg.max_bytes is not None and self._fixed >= cfg.max_bytes:
            raise UserError(f"replay.max_bytes={cfg.max_bytes} does not even hold the {self._fixed} bytes of arrays "
                            f"that replay.capacity={cfg.capacity} needs: raise max_bytes or lower the capacity")
        # Zeroed pages cost nothing until they are written, so a large capacity is paid for as it fills.
        self._dense = np.zeros((self._slots, layout.rows), layout.record)
        self._states = {c.name: np.zeros((self._slots, layout.starts, len(layout.marks), *c.shape), c.dtype)
                        for c in layout.marked}
        self._data: dict[str, list[bytes]] = {c.name: [b""] * self._slots for c in layout.blocked}
        self._ends = {c.name: np.zeros((self._slots, layout.blocks), np.uint32) for c in layout.blocked}
        self._priorities = Priorities(self._slots * layout.starts, cfg.alpha)
        self._sizes = np.zeros(self._slots, np.int64)
        self._key_offset = np.zeros(self._slots, np.int64)
        self._prints = np.zeros(self._slots, np.uint32)
        self._codec = Codec(layout)
        self._gatherer = Gatherer(layout, self._dense, self._states, self._blocks, device)
        self.pace = Pace(cfg.samples_per_insert, cfg.min_steps)
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._first = self._next = 0
        self._size = self._blob_bytes = 0
        self.elsewhere = 0  # steps that other replays of the run have counted, as far as is known

    @property
    def layout(self) -> Layout:
        return self._layout

    def priority_of(self, leaves: np.ndarray) -> np.ndarray | None:
        """The priorities [S] behind saved leaves [S]."""
        return leaves ** (1 / self._cfg.alpha) if self._cfg.alpha > 0 else None

    @property
    def steps(self) -> int:
        return self.pace.steps + self.elsewhere

    def tick(self, steps: int) -> None:
        self.pace.tick(steps)

    def add(self, chunk: Chunk, priority: np.ndarray | None = None) -> int | None:
        """Store a chunk with the priorities [S] of its starts (None: the largest seen); its serial, or None = wait."""
        if not self.pace.may_insert():
            return None
        return self.insert(self._codec.pack(chunk), priority)

    def insert(self, packed: Packed, priority: np.ndarray | None = None) -> int:
        """Store a chunk that was packed elsewhere, whatever the pace; its serial."""
        empty = self._size == 0
        self._make_room(packed)
        serial = self._next
        self._next += 1
        self._store(serial, packed)
        slot = serial % self._slots
        self._priorities.write(self._leaves(slot), priority, packed.valid)
        self._count(slot, int(packed.valid.sum()))
        if empty and self._size:
            self.pace.open()
        return serial

    def sample(self, n: int) -> Sample | None:
        """Draw n windows, each from its own n-th of the total priority; None = wait."""
        if self._size == 0 or not self.pace.may_sample(n):
            return None
        beta = self._cfg.beta(self.steps)
        leaves, weight, peak = self._priorities.draw(self._rng.random(n), beta, self._size)
        slot = leaves // self._layout.starts
        self.pace.draw(n)
        return Sample(keys=leaves + self._key_offset[slot], weight=torch.from_numpy(weight).to(self._device),
                      rows=self._gatherer.windows(slot, leaves - slot * self._layout.starts), peak=peak)

    def update(self, keys: np.ndarray, priority: np.ndarray) -> None:
        """Give sampled keys [B] their new priorities [B]; keys of chunks that are gone are ignored."""
        keys, priority = np.asarray(keys, np.int64), np.asarray(priority)
        if keys.shape != priority.shape:
            raise ValueError(f"{keys.shape} keys came with {priority.shape} priorities")
        live = (keys >= self._first * self._layout.starts) & (keys < self._next * self._layout.starts)
        if not live.all():
            keys, priority = keys[live], priority[live]
        self._priorities.update(keys % (self._slots * self._layout.starts), priority)

    def metrics(self) -> dict[str, float]:
        steps = max(1, (self._next - self._first) * self._layout.chunk_steps)
        figures = {"replay/size": self._size, "replay/bytes": self.nbytes, "replay/bytes_per_step": self.nbytes / steps,
                   "replay/samples_per_insert": self.pace.ratio, "replay/clamped_priorities": self._priorities.clamped}
        if self._cfg.alpha > 0:
            figures["replay/beta"] = self._cfg.beta(self.steps)
        return {name: float(value) for name, value in figures.items()}

    @property
    def nbytes(self) -> int:
        """Everything counted: small columns and tree at full capacity, and the compressed blocks held."""
        return self._fixed + self._blob_bytes

    def state_dict(self) -> dict[str, Any]:
        """All but the chunks, which `segments` gives: counters, generator, and the leaves of live chunks."""
        live = [self._leaves(serial % self._slots) for serial in range(self._first, self._next)]
        leaves = self._priorities.tree.get(np.concatenate(live)) if live else np.zeros(0)
        return {"first": self._first, "next": self._next, "rng": self._rng.bit_generator.state, "leaves": leaves,
                "pace": self.pace.state_dict(), "priorities": self._priorities.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over counters, generator and priorities; `load_segments` must follow.

        Slots follow from serials, so another capacity may load it; a smaller one keeps the newest chunks.
        """
        starts = self._layout.starts
        live = int(state["next"]) - int(state["first"])
        leaves = np.asarray(state["leaves"], np.float64)
        if live < 0 or leaves.shape != (live * starts,) or not (np.isfinite(leaves) & (leaves >= 0)).all():
            raise ValueError(f"saved replay: {leaves.shape} leaves do not belong to {live} chunks of {starts} starts")
        self._clear()
        self._next = int(state["next"])
        self._first = max(int(state["first"]), self._next - self._slots)
        everything = np.zeros((self._slots, starts))
        for serial, values in zip(range(self._first, self._next),
                                  leaves.reshape(live, starts)[live - (self._next - self._first):], strict=True):
            everything[serial % self._slots] = values
        self._priorities.tree.fill(everything.reshape(-1))
        self._priorities.load_state_dict(state["priorities"])
        self._sizes[:] = np.count_nonzero(everything, axis=1)
        self._size = int(self._sizes.sum())
        self.pace.load_state_dict(state["pace"])
        self._rng.bit_generator.state = state["rng"]

    def segments(self) -> list[Segment]:
        """The live chunks in immutable pieces; read them before the replay changes again."""
        return split(self._first, self._next, self._packed, lambda serial: int(self._prints[serial % self._slots]))

    def load_segments(self, pieces: Iterable[tuple[str, Source]]) -> None:
        """Take back the chunks that `segments` gave; pieces of evicted chunks are skipped, missing ones refused."""
        missing = set(range(self._first, self._next))
        for serial, packed in read(pieces, self._layout):
            if serial not in missing:
                continue
            if not np.array_equal(packed.valid, self._priorities.tree.get(self._leaves(serial % self._slots)) > 0):
                raise ValueError(f"saved replay: chunk {serial} is not the one that its priorities belong to")
            self._store(serial, packed)
            missing.remove(serial)
        if missing:
            raise ValueError(f"saved replay: {len(missing)} chunks are missing, the first is {min(missing)}")

    def check_valid(self) -> None:
        """Assert what always holds; for tests."""
        tree, live = self._priorities.tree, self._next - self._first
        assert 0 <= live <= self._slots
        assert np.isclose(tree.total, tree.leaves.sum(), rtol=1e-12)
        occupied = np.zeros(self._slots, bool)
        occupied[[serial % self._slots for serial in range(self._first, self._next)]] = True
        leaves = tree.leaves.reshape(self._slots, -1)
        assert not leaves[~occupied].any()
        assert np.array_equal(np.count_nonzero(leaves, axis=1), self._sizes)
        assert self._size == self._sizes.sum()
        held = [data for column in self._data.values() for data in column if data]
        assert self._blob_bytes == sum(map(len, held))
        assert all(bool(data) == flag for column in self._data.values()
                   for data, flag in zip(column, occupied, strict=True))
        assert self._cfg.max_bytes is None or live <= 1 or self.nbytes <= self._cfg.max_bytes

    def _make_room(self, packed: Packed) -> None:
        """Evict the oldest chunks until a slot is free and the bytes fit."""
        if self._next - self._first == self._slots:
            self._evict()
        if self._cfg.max_bytes is not None:
            needed = sum(len(blocks.data) for blocks in packed.blocked.values())
            while self._first < self._next and self.nbytes + needed > self._cfg.max_bytes:
                self._evict()

    def _evict(self) -> None:
        slot = self._first % self._slots
        leaves = self._leaves(slot)
        self._priorities.tree.set(leaves, np.zeros(len(leaves)))
        self._count(slot, 0)
        for column in self._data.values():
            self._blob_bytes -= len(column[slot])
            column[slot] = b""
        self._first += 1

    def _clear(self) -> None:
        while self._first < self._next:
            self._evict()

    def _store(self, serial: int, packed: Packed) -> None:
        slot = serial % self._slots
        for name, values in packed.dense.items():
            (self._states[name] if name in self._states else self._dense[name])[slot] = values
        for name, blocks in packed.blocked.items():
            self._data[name][slot] = blocks.data
            self._ends[name][slot] = blocks.ends
            self._blob_bytes += len(blocks.data)
        self._key_offset[slot] = (serial - slot) * self._layout.starts
        self._prints[slot] = zlib.crc32(packed.to_bytes())

    def _count(self, slot: int, valid: int) -> None:
        self._size += valid - int(self._sizes[slot])
        self._sizes[slot] = valid

    def _leaves(self, slot: int) -> np.ndarray:
        return slot * self._layout.starts + np.arange(self._layout.starts)

    def _blocks(self, name: str, slot: int) -> Blocks:
        return Blocks(self._data[name][slot], self._ends[name][slot])

    def _packed(self, serial: int) -> Packed:
        if not self._first <= serial < self._next:
            raise RuntimeError(f"chunk {serial} was evicted before it was saved")
        slot = serial % self._slots
        dense = {column.name: self._dense[column.name][slot] for column in self._layout.dense}
        return Packed(dense | {name: states[slot] for name, states in self._states.items()},
                      {name: self._blocks(name, slot) for name in self._data},
                      self._priorities.tree.get(self._leaves(slot)) > 0)
