"""Buffer of outgoing messages: filled by the main thread, emptied by the connection's thread."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

import torch

from qfleet.core.episode import Episode
from qfleet.core.errors import UserError
from qfleet.core.evaluation import Score
from qfleet.transport.fleet_pb2 import ExchangeRequest, Figure, Judgement, Part
from qfleet.transport.weight_codec import pack_weights

MAX_CHUNKS = 64
MAX_BYTES = 8 << 20
"""A message is full at `MAX_CHUNKS` chunks or `MAX_BYTES` bytes of them; the next chunk has to wait."""


class Outbox:
    """Collects everything between two messages. Implements `Metrics` for the roles of a process.

    The contents of one message take effect together: the steps, and the chunks and episodes that they produced.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.total_steps = 0
        self.limit_bytes = MAX_BYTES
        self._max_message_bytes = 2 * MAX_BYTES
        self._max_unconfirmed_steps = 1 << 62
        self._evaluations: deque[Judgement] = deque()
        self._milliseconds: dict[str, float] = defaultdict(float)
        self._in_flight_steps = 0
        self._clear()

    def _clear(self) -> None:
        self._message = ExchangeRequest()
        self._metrics: dict[str, tuple[float, int]] = {}
        self._counters: Counter[str] = Counter()
        self._bytes = 0
        self._empty = True

    def limit(self, max_message_bytes: int) -> None:
        """Apply the receiver's largest message size."""
        self._max_message_bytes = max_message_bytes
        self.limit_bytes = min(MAX_BYTES, max_message_bytes // 4)

    def limit_unconfirmed(self, steps: int) -> None:
        """Let the next chunk wait while this many steps are unconfirmed."""
        self._max_unconfirmed_steps = steps

    @property
    def unconfirmed_steps(self) -> int:
        """Steps that the receiver has not confirmed."""
        return self._message.steps + self._in_flight_steps

    @property
    def full(self) -> bool:
        return (self._bytes >= self.limit_bytes or len(self._message.parcels) >= MAX_CHUNKS
                or self.unconfirmed_steps >= self._max_unconfirmed_steps)

    @property
    def should_send_soon(self) -> bool:
        """True if an eighth of the allowed unconfirmed steps has been collected."""
        return 8 * self._message.steps >= self._max_unconfirmed_steps

    @property
    def empty(self) -> bool:
        return self._empty

    def count_steps(self, steps: int) -> None:
        with self.changed:
            before = not self.should_send_soon
            self._message.steps += steps
            self.total_steps += steps
            self._mark_changed()
            if before and self.should_send_soon:
                self.changed.notify_all()

    def add_chunk(self, chunk: bytes, priority: bytes) -> None:
        if len(chunk) + len(priority) > self._max_message_bytes // 2:
            raise UserError(f"a chunk of {len(chunk) / 2**20:.1f} MB is too large for messages of "
                            f"{self._max_message_bytes / 2**20:.0f} MB: lower replay.chunk_steps or raise "
                            "fleet.max_message_mb")
        with self.changed:
            self._message.parcels.add(chunk=chunk, priority=priority)
            self._bytes += len(chunk) + len(priority)
            self._mark_changed()

    def write(self, values: Mapping[str, float]) -> None:
        with self.changed:
            for tag, value in values.items():
                total, count = self._metrics.get(tag, (0.0, 0))
                self._metrics[tag] = (total + value, count + 1)
            self._mark_changed()

    def count(self, name: str, by: int = 1) -> None:
        with self.changed:
            self._counters[name] += by
            self._mark_changed()

    def episode(self, episode: Episode) -> None:
        with self.changed:
            self._message.episodes.add(lane=episode.lane, ret=episode.reward, length=episode.length,
                                       info=_figures(episode.info))
            self._mark_changed()

    def add_evaluation(self, score: Score, state: Mapping[str, torch.Tensor]) -> None:
        weights = pack_weights(state)
        if len(weights) > self._max_message_bytes - (1 << 16):
            raise UserError(f"weights of {len(weights) / 2**20:.0f} MB do not fit into a message: raise "
                            "fleet.max_message_mb")
        with self.changed:
            self._evaluations.append(Judgement(returns=score.returns, lengths=score.lengths, version=score.version,
                                              weights=weights, seconds=score.seconds or 0.0,
                                              info=_figures(score.info)))
            self._mark_changed()

    def set_checkpoint_part(self, save: int, state: bytes, segments: Sequence[str]) -> None:
        """Add this process's part of a checkpoint; it takes effect together with everything reported before."""
        if len(state) > self._max_message_bytes // 2:
            raise UserError(f"a learner's part of a checkpoint takes {len(state) / 2**20:.0f} MB, too much for a "
                            "message: raise fleet.max_message_mb")
        with self.changed:
            self._message.part.CopyFrom(Part(save=save, state=state, segments=segments))
            self._mark_changed()

    def set_member_state(self, state: bytes) -> None:
        """Set the state that the next process with this index receives.

        Takes effect with everything reported before.
        """
        with self.changed:
            self._message.memory = state
            self._mark_changed()

    def add(self, tag: str, total: float, count: int) -> None:
        """Add `count` measurements with the sum `total`."""
        with self.changed:
            before, number = self._metrics.get(tag, (0.0, 0))
            self._metrics[tag] = (before + total, number + count)
            self._mark_changed()

    def add_time(self, tag: str, seconds: float) -> None:
        """Count time in whole milliseconds; like `count_transport`, no reason to send a message."""
        with self.changed:
            self._milliseconds[tag] += 1000 * seconds

    def count_transport(self, tag: str, by: int) -> None:
        """Count a transport event; no reason to send a message."""
        with self.changed:
            self._counters[tag] += by

    def take_message(self) -> ExchangeRequest:
        """Return everything collected so far as one message. Evaluations, which are large, go one at a time."""
        with self.changed:
            message = self._message
            for tag, elapsed in self._milliseconds.items():
                whole = int(elapsed)
                self._counters[tag] += whole
                self._milliseconds[tag] = elapsed - whole
            for tag, (total, count) in self._metrics.items():
                message.figures.add(tag=tag, sum=total, count=count)
            for tag, by in self._counters.items():
                if by:
                    message.counters.add(tag=tag, by=by)
            if self._evaluations:
                message.judgements.append(self._evaluations.popleft())
            self._in_flight_steps = message.steps
            self._clear()
            self._empty = not self._evaluations
            return message

    def mark_delivered(self) -> None:
        """Note that the message taken last was confirmed."""
        with self.changed:
            self._in_flight_steps = 0

    def _mark_changed(self) -> None:
        if self._empty:
            self._empty = False
            self.changed.notify_all()
        elif self.full:
            self.changed.notify_all()


def _figures(info: Mapping[str, float]) -> list[Figure]:
    return [Figure(tag=name, sum=value, count=1) for name, value in info.items()]


class Stopwatch:
    """Adds the time between `begin` and `end` to a counter of milliseconds."""

    def __init__(self, outbox: Outbox, tag: str) -> None:
        self._outbox, self._tag = outbox, tag
        self._since: float | None = None

    def begin(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def end(self) -> None:
        if self._since is not None:
            self._outbox.add_time(self._tag, time.monotonic() - self._since)
            self._since = None
