"""What all replays have in common, wherever their chunks rest: serials, eviction, pace, keys, and what is saved."""

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
from qfleet.replay.rate_limiter import RateLimiter
from qfleet.replay.segments import SegmentSource, read_segments, split_segments

log = logging.getLogger(__name__)


class StoredChunk(Protocol):
    """A chunk as a store keeps it."""

    @property
    def valid(self) -> np.ndarray: ...

    @property
    def last(self) -> np.ndarray: ...


class PriorityIndex(Protocol):
    """Which start is drawn how often: a number for each leaf, 0 for what must not be drawn."""

    def write(self, leaves: np.ndarray, priority: np.ndarray | None, valid: np.ndarray) -> None: ...
    def update(self, leaves: np.ndarray, priority: np.ndarray) -> None: ...
    def get(self, leaves: np.ndarray) -> np.ndarray: ...
    def set(self, leaves: np.ndarray, values: np.ndarray) -> None: ...
    def fill(self, values: np.ndarray) -> None: ...
    def total(self) -> float: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


H = TypeVar("H", bound=StoredChunk)

MARGIN = 1.1
"""Room for this many times the chunks that the capacity takes, going by those that are held, when room is made."""


class ReplayStore(ABC, Generic[H]):
    """Implements `types.Replay`, but for where chunks rest and how they are drawn.

    Chunks are numbered by a serial that only grows; chunk `serial` rests in slot `serial % slots`, and the live ones
    are `first <= serial < next`. A key is `serial * S + start`: once its chunk is evicted it is stale and ignored.

    The oldest chunks are evicted when the steps held would exceed the capacity. There are slots for as many full
    chunks; where episodes are shorter than chunks, a store that can `_resize` makes more, and any other one evicts.
    """

    def __init__(self, layout: Layout, cfg: ReplayConfig, shares: PriorityIndex, clock: RunClock | None) -> None:
        self._layout, self._cfg, self._priority_index = layout, cfg, shares
        self._slots = slot_count(layout, cfg)
        self._sizes = np.zeros(self._slots, np.int64)
        self._key_offset = np.zeros(self._slots, np.int64)
        self._prints = np.zeros(self._slots, np.uint32)
        self._lengths = np.zeros(self._slots, np.int64)  # of chunks, in steps
        self._codec = Codec(layout)
        self.clock = RunClock() if clock is None else clock
        self.rate_limiter = RateLimiter(cfg.samples_per_insert, cfg.min_steps, clock=self.clock)
        self._first = self._next = 0
        self._size = self._held = 0  # windows, steps
        self._warned = False
        self._dropped = 0  # chunks that did not decode

    @abstractmethod
    def sample(self, n: int) -> Sample | None:
        """Draw n windows, each from its own n-th of the total priority; None = wait."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """All memory that is taken."""

    @abstractmethod
    def _from_chunk(self, chunk: Chunk) -> H: ...

    @abstractmethod
    def _from_packed(self, packed: PackedChunk) -> H:
        """ValueError if it does not decode."""

    @abstractmethod
    def _put(self, slot: int, held: H) -> int:
        """Let a chunk rest in a slot; a checksum of its contents."""

    @abstractmethod
    def _drop(self, slot: int) -> None:
        """Forget what rests in a slot."""

    @abstractmethod
    def _pack(self, slot: int, valid: np.ndarray) -> PackedChunk:
        """What rests in a slot, as it is saved."""

    @abstractmethod
    def _fits(self, held: H) -> bool:
        """Whether the bytes of another chunk fit beside those that are held."""

    @abstractmethod
    def _random_state(self) -> Any: ...

    @abstractmethod
    def _restore_random(self, state: Any) -> None: ...

    def _resize(self, slots: int) -> bool:
        """Have so many slots, if that is possible; whether it was. What is held stays, in the slots of its serials."""
        return slots == self._slots

    @property
    def layout(self) -> Layout:
        return self._layout

    def priority_of(self, leaves: np.ndarray) -> np.ndarray | None:
        """The priorities [S] behind saved leaves [S]."""
        return leaves ** (1 / self._cfg.alpha) if self._cfg.alpha > 0 else None

    def add(self, chunk: Chunk, priority: np.ndarray | None = None) -> int | None:
        """Store a chunk with the priorities [S] of its starts (None: the largest seen); its serial, or None = wait."""
        if not self.rate_limiter.may_insert():
            return None
        return self._take(self._from_chunk(chunk), priority)

    def add_packed(self, packed: PackedChunk, priority: np.ndarray | None = None) -> int | None:
        """Store a chunk that was packed elsewhere, whatever the pace; its serial. One that does not decode is dropped
        and counted: None."""
        held = self._decoded(packed)
        return None if held is None else self._take(held, priority)

    def claim(self, n: int) -> bool:
        """Whether n windows may be drawn now; then they count as drawn."""
        if self._size == 0 or not self.rate_limiter.may_sample(n):
            return False
        self.rate_limiter.count_samples(n)
        return True

    def update(self, keys: np.ndarray, priority: np.ndarray) -> None:
        """Give sampled keys [B] their new priorities [B]; keys of chunks that are gone are ignored."""
        keys, priority = np.asarray(keys, np.int64), np.asarray(priority)
        if keys.shape != priority.shape:
            raise ValueError(f"{keys.shape} keys came with {priority.shape} priorities")
        if self._cfg.alpha == 0:
            return  # all are drawn alike, whatever is thought of them
        live = (keys >= self._first * self._layout.starts) & (keys < self._next * self._layout.starts)
        if not live.all():
            keys, priority = keys[live], priority[live]
        self._priority_index.update(keys % (self._slots * self._layout.starts), priority)

    def metrics(self) -> dict[str, float]:
        clamped = self._priority_index.state_dict()["clamped"]
        figures = {"replay/size": self._size, "replay/steps": self._held, "replay/bytes": self.nbytes,
                   "replay/bytes_per_step": self.nbytes / max(1, self._held),
                   "replay/samples_per_insert": self.rate_limiter.ratio, "replay/clamped_priorities": clamped}
        if self._cfg.alpha > 0:
            figures["replay/beta"] = self._cfg.beta(self.clock.steps)
        if self._dropped:
            figures["replay/dropped_chunks"] = self._dropped
        return {name: float(value) for name, value in figures.items()}

    def state_dict(self) -> dict[str, Any]:
        """All but the chunks, which `segments` gives: counters, generator, and the leaves of live chunks."""
        live = [self._leaves(serial % self._slots) for serial in range(self._first, self._next)]
        leaves = self._priority_index.get(np.concatenate(live)) if live else np.zeros(0)
        lengths = self._lengths[np.arange(self._first, self._next) % self._slots]
        return {
            "first": self._first, "next": self._next, "rng": self._random_state(), "leaves": leaves,
            "lengths": lengths, "slots": self._slots, "capacity": self._cfg.capacity,
            "pace": self.rate_limiter.state_dict(), "priorities": self._priority_index.state_dict(),
            "dropped": self._dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over counters, generator and priorities; `load_segments` must follow.

        Slots follow from serials, so another capacity may load it; a smaller one keeps the newest chunks. A store of
        another kind may have saved it: then the generator is our own. With the same capacity there are as many slots as
        before, since draws depend on the order of chunks.
        """
        starts = self._layout.starts
        live = int(state["next"]) - int(state["first"])
        leaves = np.asarray(state["leaves"], np.float64)
        if live < 0 or leaves.shape != (live * starts,) or not (np.isfinite(leaves) & (leaves >= 0)).all():
            raise ValueError(f"saved replay: {leaves.shape} leaves do not belong to {live} chunks of {starts} starts")
        while self._first < self._next:
            self._evict()
        self._next = self._first = int(state["next"])
        self._first -= self._make_room(state, live)
        everything = np.zeros((self._slots, starts))
        for serial, values in zip(range(self._first, self._next),
                                  leaves.reshape(live, starts)[live - (self._next - self._first):], strict=True):
            everything[serial % self._slots] = values
        self._priority_index.fill(everything.reshape(-1))
        self._priority_index.load_state_dict(state["priorities"])
        self._sizes[:] = np.count_nonzero(everything, axis=1)
        self._size = int(self._sizes.sum())
        self.rate_limiter.load_state_dict(state["pace"])
        self._dropped = int(state.get("dropped", 0))
        if type(state["rng"]) is type(self._random_state()):
            self._restore_random(state["rng"])

    def segments(self) -> list[Segment]:
        """The live chunks in immutable pieces; read them before the replay changes again."""
        return split_segments(
            self._first, self._next, self._saved, lambda serial: int(self._prints[serial % self._slots])
        )

    def load_segments(self, pieces: Iterable[tuple[str, SegmentSource]]) -> None:
        """Take back the chunks that `segments` gave; pieces of evicted chunks are skipped, missing ones refused. In the
        place of a chunk that does not decode there is an empty one, of which nothing is drawn."""
        missing = set(range(self._first, self._next))
        for serial, packed in read_segments(pieces, self._layout):
            if serial not in missing:
                continue
            if not np.array_equal(packed.valid, self._priority_index.get(self._leaves(serial % self._slots)) > 0):
                raise ValueError(f"saved replay: chunk {serial} is not the one that its priorities belong to")
            held = self._decoded(packed)
            if held is None:
                self._clear(serial % self._slots)
                held = self._from_chunk(self._layout.blank())
            self._place(serial, held)
            missing.remove(serial)
        if missing:
            raise ValueError(f"saved replay: {len(missing)} chunks are missing, the first is {min(missing)}")

    def check_valid(self) -> None:
        """Assert what always holds; for tests."""
        live = self._next - self._first
        assert 0 <= live <= self._slots
        leaves = self._priority_index.get(np.arange(self._slots * self._layout.starts)).reshape(self._slots, -1)
        assert np.isclose(self._priority_index.total(), leaves.sum(), rtol=1e-12)
        assert not leaves[~self._occupied()].any()
        assert np.array_equal(np.count_nonzero(leaves, axis=1), self._sizes)
        assert self._size == self._sizes.sum()
        assert not self._lengths[~self._occupied()].any()
        assert self._held == self._lengths.sum() <= self._cfg.capacity
        assert self._cfg.max_bytes is None or live <= 1 or self.nbytes <= self._cfg.max_bytes

    def _occupied(self) -> np.ndarray:
        occupied = np.zeros(self._slots, bool)
        occupied[[serial % self._slots for serial in range(self._first, self._next)]] = True
        return occupied

    def _take(self, held: H, priority: np.ndarray | None) -> int:
        empty = self._size == 0
        steps = self._layout.steps_of(held.last)
        while self._first < self._next and self._held + steps > self._cfg.capacity:
            self._evict()
        if self._next - self._first == self._slots and not self._grow():
            self._evict()
        while self._first < self._next and not self._fits(held):
            self._evict()
        serial = self._next
        self._next += 1
        self._place(serial, held)
        slot = serial % self._slots
        self._priority_index.write(self._leaves(slot), priority, held.valid)
        self._count(slot, int(held.valid.sum()))
        if empty and self._size:
            self.rate_limiter.start_counting()
        return serial

    def _grow(self) -> bool:
        """Every slot is taken, by fewer steps than the capacity: whether there are more slots now."""
        wanted = int(MARGIN * self._slots * self._cfg.capacity / self._held)
        wanted = min(self._cfg.capacity, max(self._slots + 1, wanted))
        while wanted > self._slots:
            if self._resize(wanted):
                return True
            wanted = (wanted + self._slots) // 2
        if not self._warned:
            log.warning("replay.capacity=%d, but no more than about %d steps are held: episodes end before their "
                        "chunks of replay.chunk_steps=%d are full, and there is no room for more chunks; lower "
                        "chunk_steps, raise replay.capacity or replay.max_bytes, or use replay.store=host",
                        self._cfg.capacity, self._held, self._layout.chunk_steps)
            self._warned = True
        return False

    def _make_room(self, state: Mapping[str, Any], live: int) -> int:
        """Before so many saved chunks are taken over: make slots for them; how many of the newest can be kept."""
        steps, most = self._layout.chunk_steps, max(self._cfg.capacity, self._slots)
        lengths = np.asarray(state.get("lengths", np.full(live, steps)), np.int64)
        before = int(state.get("slots", 0)) if state.get("capacity") == self._cfg.capacity else 0
        if lengths.shape != (live,) or not ((lengths > 0) & (lengths <= steps)).all() or not 0 <= before <= most:
            raise ValueError(f"saved replay: {before} slots and {lengths.shape} lengths do not belong to {live} chunks")
        kept = int(np.count_nonzero(np.cumsum(lengths[::-1]) <= self._cfg.capacity))
        if not self._resize(max(before, kept, slot_count(self._layout, self._cfg))):
            kept = min(kept, self._slots)
        for serial, length in zip(range(self._next - kept, self._next), lengths[live - kept:].tolist(), strict=True):
            self._measure(serial % self._slots, length)
        return kept

    def _move(self, slots: int) -> tuple[np.ndarray, np.ndarray]:
        """Count on so many slots from now on; the slots of live chunks before and after."""
        live = np.arange(self._first, self._next)
        before, after = live % self._slots, live % slots
        self._sizes, self._prints, self._lengths = (
            move_slots(values, before, after, slots) for values in (self._sizes, self._prints, self._lengths))
        self._key_offset = np.zeros(slots, np.int64)
        self._key_offset[after] = (live - after) * self._layout.starts
        self._slots = slots
        return before, after

    def _evict(self) -> None:
        slot = self._first % self._slots
        self._clear(slot)
        self._measure(slot, 0)
        self._drop(slot)
        self._first += 1

    def _clear(self, slot: int) -> None:
        """Let nothing be drawn from a slot."""
        leaves = self._leaves(slot)
        self._priority_index.set(leaves, np.zeros(len(leaves)))
        self._count(slot, 0)

    def _decoded(self, packed: PackedChunk) -> H | None:
        """A chunk from elsewhere; None if it does not decode, which would otherwise be found out when it is drawn."""
        try:
            return self._from_packed(packed)
        except ValueError as error:
            self._dropped += 1
            if self._dropped & (self._dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                log.warning("a chunk that does not decode was dropped (%d so far): %s", self._dropped, error)
            return None

    def _place(self, serial: int, held: H) -> None:
        slot = serial % self._slots
        self._prints[slot] = self._put(slot, held)
        self._measure(slot, self._layout.steps_of(held.last))
        self._key_offset[slot] = (serial - slot) * self._layout.starts

    def _count(self, slot: int, valid: int) -> None:
        self._size += valid - int(self._sizes[slot])
        self._sizes[slot] = valid

    def _measure(self, slot: int, steps: int) -> None:
        self._held += steps - int(self._lengths[slot])
        self._lengths[slot] = steps

    def _leaves(self, slot: int) -> np.ndarray:
        return slot * self._layout.starts + np.arange(self._layout.starts)

    def _saved(self, serial: int) -> PackedChunk:
        if not self._first <= serial < self._next:
            raise RuntimeError(f"chunk {serial} was evicted before it was saved")
        slot = serial % self._slots
        return self._pack(slot, self._priority_index.get(self._leaves(slot)) > 0)


def move_slots(values: np.ndarray, before: np.ndarray, after: np.ndarray, slots: int) -> np.ndarray:
    """Values of `slots` slots, [slots, ...]: those of the slots `before`, now in the slots `after`, and zeros."""
    room = np.zeros((slots, *values.shape[1:]), values.dtype)
    for at in range(0, len(before), 256):  # by index all at once, they would be copied twice
        room[after[at:at + 256]] = values[before[at:at + 256]]
    return room
