"""Common part of all replay stores: serials, keys, FIFO eviction, rate limiting and checkpoints."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from qfleet.core.clock import RunClock
from qfleet.core.replay import Chunk, Sample, Segment
from qfleet.replay.codec import Codec, PackedChunk
from qfleet.replay.config import ReplayConfig
from qfleet.replay.layout import Layout
from qfleet.replay.memory_plan import slot_count
from qfleet.replay.priorities import PriorityIndex, importance_exponent
from qfleet.replay.rate_limiter import RateLimiter
from qfleet.replay.segments import SegmentSource, read_segments, split_segments

log = logging.getLogger(__name__)


class StoredChunk(Protocol):
    """A chunk in the form that a store keeps."""

    @property
    def valid(self) -> np.ndarray: ...

    @property
    def last(self) -> np.ndarray: ...


StoredT = TypeVar("StoredT", bound=StoredChunk)

GROWTH_MARGIN = 1.1
"""A store grows to this multiple of the slots that the capacity needs, estimated from the chunks it holds."""


class ReplayStore(ABC, Generic[StoredT]):
    """Base of replay stores: serials, keys, eviction, rate limiting and checkpoints.

    A subclass stores chunks and samples windows. It implements `_sample`, `nbytes`, `_from_chunk`, `_from_packed`,
    `_put`, `_drop`, `_pack`, `_fits`, `_random_state` and `_restore_random`, and perhaps `_resize`.

    Chunks are numbered by an increasing serial. Chunk `serial` is stored in slot `serial % slots`; the live chunks are
    `first <= serial < next`. A key is `serial * S + start`; once its chunk is evicted it is stale and ignored.

    The oldest chunks are evicted when the stored steps would exceed the capacity. There is one slot per full chunk of
    the capacity; if episodes are shorter than chunks, a store that implements `_resize` adds slots, and others evict.
    """

    def __init__(self, layout: Layout, cfg: ReplayConfig, priority_index: PriorityIndex,
                 clock: RunClock | None) -> None:
        """Create an empty store.

        Args:
            layout: Columns, rows and starts of a chunk.
            cfg: The replay section of the configuration.
            priority_index: Priorities of all starts.
            clock: Steps of the run; None = a new clock.
        """
        self._layout, self._cfg, self._priority_index = layout, cfg, priority_index
        self._slots = slot_count(layout, cfg)
        self._valid_counts = np.zeros(self._slots, np.int64)
        self._key_offset = np.zeros(self._slots, np.int64)
        self._checksums = np.zeros(self._slots, np.uint32)
        self._lengths = np.zeros(self._slots, np.int64)  # steps per chunk
        self._codec = Codec(layout)
        self.clock = RunClock() if clock is None else clock
        self.rate_limiter = RateLimiter(cfg.samples_per_insert, cfg.min_steps, clock=self.clock)
        self._first = self._next = 0
        self._size = self._steps = 0  # valid starts, environment steps
        self._warned = False
        self._dropped = 0  # chunks that did not decode

    @abstractmethod
    def _sample(self, n: int) -> Sample:
        """Sample n windows of a store that is not empty, stratified by priority."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory in use."""

    @abstractmethod
    def _from_chunk(self, chunk: Chunk) -> StoredT:
        """Convert a chunk to the stored form."""

    @abstractmethod
    def _from_packed(self, packed: PackedChunk) -> StoredT:
        """Convert a packed chunk to the stored form; raise ValueError if it does not decode."""

    @abstractmethod
    def _put(self, slot: int, stored: StoredT) -> int:
        """Store a chunk in a slot; return a checksum that identifies its contents."""

    @abstractmethod
    def _drop(self, slot: int) -> None:
        """Free the memory of a slot."""

    @abstractmethod
    def _pack(self, slot: int, valid: np.ndarray) -> PackedChunk:
        """Pack the chunk in a slot for a checkpoint; `valid` [S] are its valid starts."""

    @abstractmethod
    def _fits(self, stored: StoredT) -> bool:
        """True if storing another chunk does not exceed the memory limit."""

    @abstractmethod
    def _random_state(self) -> Any: ...

    @abstractmethod
    def _restore_random(self, state: Any) -> None: ...

    def _resize(self, slots: int) -> bool:
        """Change the number of slots and move live chunks to their new slots; return False if that is impossible."""
        return slots == self._slots

    @property
    def layout(self) -> Layout:
        return self._layout

    def priority_of(self, leaves: np.ndarray) -> np.ndarray | None:
        """Convert saved leaves [S] to priorities [S]; None for uniform sampling."""
        return leaves ** (1 / self._cfg.alpha) if self._cfg.alpha > 0 else None

    def add(self, chunk: Chunk, priority: np.ndarray | None = None) -> int | None:
        """Store a chunk with the priorities [S] of its starts (None: the largest seen).

        Returns its serial, or None if the rate limiter does not allow it yet.
        """
        if not self.rate_limiter.may_insert():
            return None
        return self._insert(self._from_chunk(chunk), priority)

    def add_packed(self, packed: PackedChunk, priority: np.ndarray | None = None) -> int | None:
        """Store a chunk that another process packed, regardless of the rate limiter; return its serial.

        A chunk that does not decode is dropped and counted; the result is None.
        """
        stored = self._decode_or_drop(packed)
        return None if stored is None else self._insert(stored, priority)

    def sample(self, n: int) -> Sample | None:
        """Sample n windows, stratified by priority; None if the store is empty or the rate limiter refuses."""
        return self._sample(n) if self.claim(n) else None

    def peek(self, n: int) -> Sample | None:
        """Sample n windows without an effect on later samples and on the rate limiter; None if the store is empty."""
        if self._size == 0:
            return None
        random_state = self._random_state()
        try:
            return self._sample(n)
        finally:
            self._restore_random(random_state)

    def claim(self, n: int) -> bool:
        """Count n samples if the store is not empty and the rate limiter allows them; return False otherwise."""
        if self._size == 0 or not self.rate_limiter.may_sample(n):
            return False
        self.rate_limiter.count_samples(n)
        return True

    def update(self, keys: np.ndarray, priority: np.ndarray) -> None:
        """Set new priorities [B] of sampled keys [B]; keys of evicted chunks are ignored."""
        keys, priority = np.asarray(keys, np.int64), np.asarray(priority)
        if keys.shape != priority.shape:
            raise ValueError(f"keys of shape {keys.shape} need priorities of the same shape, not {priority.shape}")
        if self._cfg.alpha == 0:
            return  # uniform sampling ignores priorities
        live = (keys >= self._first * self._layout.starts) & (keys < self._next * self._layout.starts)
        if not live.all():
            keys, priority = keys[live], priority[live]
        self._priority_index.update(keys % (self._slots * self._layout.starts), priority)

    def metrics(self) -> dict[str, float]:
        clamped = self._priority_index.state_dict()["clamped"]
        metrics = {"replay/size": self._size, "replay/steps": self._steps, "replay/bytes": self.nbytes,
                   "replay/bytes_per_step": self.nbytes / max(1, self._steps),
                   "replay/samples_per_insert": self.rate_limiter.ratio, "replay/clamped_priorities": clamped}
        if self._cfg.alpha > 0:
            metrics["replay/beta"] = importance_exponent(self._cfg, self.clock.steps)
        if self._dropped:
            metrics["replay/dropped_chunks"] = self._dropped
        return {name: float(value) for name, value in metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """State without the chunks, which `segments` returns: counters, generator, and leaves of live chunks."""
        live = [self._leaves(serial % self._slots) for serial in range(self._first, self._next)]
        leaves = self._priority_index.get(np.concatenate(live)) if live else np.zeros(0)
        lengths = self._lengths[np.arange(self._first, self._next) % self._slots]
        return {
            "first": self._first, "next": self._next, "rng": self._random_state(), "leaves": leaves,
            "lengths": lengths, "slots": self._slots, "capacity": self._cfg.capacity,
            "pace": self.rate_limiter.state_dict(), "priorities": self._priority_index.state_dict(),
            "dropped": self._dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore counters, generator and priorities; call `load_segments` next.

        The capacity may differ, since slots follow from serials; a smaller one keeps the newest chunks. With the same
        capacity the number of slots is restored, since sampling depends on the order of chunks. The state may come from
        another kind of store; its generator is ignored then.
        """
        starts = self._layout.starts
        live = int(state["next"]) - int(state["first"])
        leaves = np.asarray(state["leaves"], np.float64)
        if live < 0 or leaves.shape != (live * starts,) or not (np.isfinite(leaves) & (leaves >= 0)).all():
            raise ValueError(f"saved replay: leaves {leaves.shape} do not match {live} chunks of {starts} starts")
        while self._first < self._next:
            self._evict()
        self._next = self._first = int(state["next"])
        self._first -= self._prepare_slots(state, live)
        all_leaves = np.zeros((self._slots, starts))
        for serial, values in zip(range(self._first, self._next),
                                  leaves.reshape(live, starts)[live - (self._next - self._first):], strict=True):
            all_leaves[serial % self._slots] = values
        self._priority_index.fill(all_leaves.reshape(-1))
        self._priority_index.load_state_dict(state["priorities"])
        self._valid_counts[:] = np.count_nonzero(all_leaves, axis=1)
        self._size = int(self._valid_counts.sum())
        self.rate_limiter.load_state_dict(state["pace"])
        self._dropped = int(state.get("dropped", 0))
        if type(state["rng"]) is type(self._random_state()):
            self._restore_random(state["rng"])

    def segments(self) -> list[Segment]:
        """Live chunks as immutable segments; read them before the replay changes."""
        return split_segments(
            self._first, self._next, self._packed, lambda serial: int(self._checksums[serial % self._slots])
        )

    def load_segments(self, segments: Iterable[tuple[str, SegmentSource]]) -> None:
        """Restore the chunks from `segments`; evicted chunks are skipped, missing ones raise ValueError.

        A chunk that does not decode is replaced by a blank chunk, from which nothing is sampled.
        """
        missing = set(range(self._first, self._next))
        for serial, packed in read_segments(segments, self._layout):
            if serial not in missing:
                continue
            if not np.array_equal(packed.valid, self._priority_index.get(self._leaves(serial % self._slots)) > 0):
                raise ValueError(f"saved replay: chunk {serial} does not match its saved priorities")
            stored = self._decode_or_drop(packed)
            if stored is None:
                self._clear(serial % self._slots)
                stored = self._from_chunk(self._layout.blank())
            self._place(serial, stored)
            missing.remove(serial)
        if missing:
            raise ValueError(f"saved replay: {len(missing)} chunks are missing, the first is {min(missing)}")

    def check_valid(self) -> None:
        """Assert the invariants of the store; for tests."""
        live = self._next - self._first
        assert 0 <= live <= self._slots
        leaves = self._priority_index.get(np.arange(self._slots * self._layout.starts)).reshape(self._slots, -1)
        assert np.isclose(self._priority_index.total(), leaves.sum(), rtol=1e-12)
        assert not leaves[~self._occupied()].any()
        assert np.array_equal(np.count_nonzero(leaves, axis=1), self._valid_counts)
        assert self._size == self._valid_counts.sum()
        assert not self._lengths[~self._occupied()].any()
        assert self._steps == self._lengths.sum() <= self._cfg.capacity
        assert self._cfg.max_bytes is None or live <= 1 or self.nbytes <= self._cfg.max_bytes

    def _occupied(self) -> np.ndarray:
        occupied = np.zeros(self._slots, bool)
        occupied[[serial % self._slots for serial in range(self._first, self._next)]] = True
        return occupied

    def _insert(self, stored: StoredT, priority: np.ndarray | None) -> int:
        """Store a chunk as the newest one, evicting or adding slots as needed; return its serial."""
        empty = self._size == 0
        steps = self._layout.steps_of(stored.last)
        while self._first < self._next and self._steps + steps > self._cfg.capacity:
            self._evict()
        if self._next - self._first == self._slots and not self._grow():
            self._evict()
        while self._first < self._next and not self._fits(stored):
            self._evict()
        serial = self._next
        self._next += 1
        self._place(serial, stored)
        slot = serial % self._slots
        self._priority_index.write(self._leaves(slot), priority, stored.valid)
        self._set_valid_count(slot, int(stored.valid.sum()))
        if empty and self._size:
            self.rate_limiter.start_counting()
        return serial

    def _grow(self) -> bool:
        """Add slots, for when all are occupied by fewer steps than the capacity; return False if that is impossible."""
        target = int(GROWTH_MARGIN * self._slots * self._cfg.capacity / self._steps)
        target = min(self._cfg.capacity, max(self._slots + 1, target))
        while target > self._slots:
            if self._resize(target):
                return True
            target = (target + self._slots) // 2
        if not self._warned:
            log.warning("replay.capacity=%d, but the replay holds only about %d steps: episodes end before chunks "
                        "of replay.chunk_steps=%d are full, and there is no memory for more chunks; lower "
                        "chunk_steps, raise replay.capacity or replay.max_bytes, or use replay.store=host",
                        self._cfg.capacity, self._steps, self._layout.chunk_steps)
            self._warned = True
        return False

    def _prepare_slots(self, state: Mapping[str, Any], live: int) -> int:
        """Provide slots for `live` saved chunks; return how many of the newest ones fit."""
        steps, max_slots = self._layout.chunk_steps, max(self._cfg.capacity, self._slots)
        lengths = np.asarray(state.get("lengths", np.full(live, steps)), np.int64)
        slots = int(state.get("slots", 0)) if state.get("capacity") == self._cfg.capacity else 0
        if lengths.shape != (live,) or not ((lengths > 0) & (lengths <= steps)).all() or not 0 <= slots <= max_slots:
            raise ValueError(f"saved replay: {slots} slots and lengths {lengths.shape} do not match {live} chunks")
        kept = int(np.count_nonzero(np.cumsum(lengths[::-1]) <= self._cfg.capacity))
        if not self._resize(max(slots, kept, slot_count(self._layout, self._cfg))):
            kept = min(kept, self._slots)
        for serial, length in zip(range(self._next - kept, self._next), lengths[live - kept:].tolist(), strict=True):
            self._set_steps(serial % self._slots, length)
        return kept

    def _move_common(self, slots: int) -> tuple[np.ndarray, np.ndarray]:
        """Change the number of slots of the common arrays; return old and new slots of the live chunks."""
        live = np.arange(self._first, self._next)
        before, after = live % self._slots, live % slots
        self._valid_counts, self._checksums, self._lengths = (
            move_slots(values, before, after, slots) for values in (self._valid_counts, self._checksums, self._lengths))
        self._key_offset = np.zeros(slots, np.int64)
        self._key_offset[after] = (live - after) * self._layout.starts
        self._slots = slots
        return before, after

    def _evict(self) -> None:
        """Remove the oldest chunk."""
        slot = self._first % self._slots
        self._clear(slot)
        self._set_steps(slot, 0)
        self._drop(slot)
        self._first += 1

    def _clear(self, slot: int) -> None:
        """Set the priorities of a slot to zero, so that nothing is sampled from it."""
        leaves = self._leaves(slot)
        self._priority_index.set(leaves, np.zeros(len(leaves)))
        self._set_valid_count(slot, 0)

    def _decode_or_drop(self, packed: PackedChunk) -> StoredT | None:
        """Convert a packed chunk to the stored form; drop and count it, and return None, if it does not decode.

        Without this check, sampling would fail later.
        """
        try:
            return self._from_packed(packed)
        except ValueError as error:
            self._dropped += 1
            if self._dropped & (self._dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                log.warning("dropped a chunk that does not decode (%d so far): %s", self._dropped, error)
            return None

    def _place(self, serial: int, stored: StoredT) -> None:
        slot = serial % self._slots
        self._checksums[slot] = self._put(slot, stored)
        self._set_steps(slot, self._layout.steps_of(stored.last))
        self._key_offset[slot] = (serial - slot) * self._layout.starts

    def _set_valid_count(self, slot: int, valid: int) -> None:
        self._size += valid - int(self._valid_counts[slot])
        self._valid_counts[slot] = valid

    def _set_steps(self, slot: int, steps: int) -> None:
        self._steps += steps - int(self._lengths[slot])
        self._lengths[slot] = steps

    def _leaves(self, slot: int) -> np.ndarray:
        return slot * self._layout.starts + np.arange(self._layout.starts)

    def _packed(self, serial: int) -> PackedChunk:
        if not self._first <= serial < self._next:
            raise RuntimeError(f"chunk {serial} was evicted before it was saved")
        slot = serial % self._slots
        return self._pack(slot, self._priority_index.get(self._leaves(slot)) > 0)


def move_slots(values: np.ndarray, before: np.ndarray, after: np.ndarray, slots: int) -> np.ndarray:
    """Array [slots, ...] with the values of slots `before` at slots `after`, and zeros elsewhere."""
    moved = np.zeros((slots, *values.shape[1:]), values.dtype)
    for at in range(0, len(before), 256):  # indexing all at once would copy them twice
        moved[after[at:at + 256]] = values[before[at:at + 256]]
    return moved
