"""What a process has to tell its fleet and has not sent yet. Filled by the main thread, emptied by the link's."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

import torch

from qfleet.core.errors import UserError
from qfleet.core.evaluation import Score
from qfleet.transport.fleet_pb2 import ExchangeRequest, Judgement, Part
from qfleet.transport.weight_codec import pack_weights

MAX_CHUNKS = 64
MAX_BYTES = 8 << 20
"""A message is full at so many chunks, or bytes of them, and the next chunk has to wait."""


class Outbox:
    """Gathers everything between two messages. To the roles of a process it is their `Metrics`.

    Parts of one message take effect together: the steps, and the chunks and episodes that came of them.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.total_steps = 0
        self.limit_bytes = MAX_BYTES
        self._most_bytes = 2 * MAX_BYTES
        self.most_steps = 1 << 62  # not confirmed yet: who is further ahead waits before the next chunk
        self._judgements: deque[Judgement] = deque()
        self._spent: dict[str, float] = defaultdict(float)
        self._underway = 0
        self._clear()

    def _clear(self) -> None:
        self._message = ExchangeRequest()
        self._figures: dict[str, tuple[float, int]] = {}
        self._counters: Counter[str] = Counter()
        self._bytes = 0
        self._empty = True

    def limit(self, max_message_bytes: int) -> None:
        """Obey the largest message that the other side takes."""
        self._most_bytes = max_message_bytes
        self.limit_bytes = min(MAX_BYTES, max_message_bytes // 4)

    @property
    def unconfirmed_steps(self) -> int:
        """Steps that the other side has not confirmed."""
        return self._message.steps + self._underway

    @property
    def full(self) -> bool:
        return (self._bytes >= self.limit_bytes or len(self._message.parcels) >= MAX_CHUNKS
                or self.unconfirmed_steps >= self.most_steps)

    @property
    def should_send_soon(self) -> bool:
        """Whether the news should not wait long: an eighth of what may be on its way has been gathered."""
        return 8 * self._message.steps >= self.most_steps

    @property
    def empty(self) -> bool:
        return self._empty

    def count_steps(self, steps: int) -> None:
        with self.changed:
            calm = not self.should_send_soon
            self._message.steps += steps
            self.total_steps += steps
            self._touched()
            if calm and self.should_send_soon:
                self.changed.notify_all()

    def add_chunk(self, chunk: bytes, priority: bytes) -> None:
        if len(chunk) + len(priority) > self._most_bytes // 2:
            raise UserError(f"a chunk of {len(chunk) / 2**20:.1f} MB is too large for messages of "
                            f"{self._most_bytes / 2**20:.0f} MB: lower replay.chunk_steps or raise "
                            "fleet.max_message_mb")
        with self.changed:
            self._message.parcels.add(chunk=chunk, priority=priority)
            self._bytes += len(chunk) + len(priority)
            self._touched()

    def write(self, values: Mapping[str, float]) -> None:
        with self.changed:
            for tag, value in values.items():
                total, count = self._figures.get(tag, (0.0, 0))
                self._figures[tag] = (total + value, count + 1)
            self._touched()

    def count(self, name: str, by: int = 1) -> None:
        with self.changed:
            self._counters[name] += by
            self._touched()

    def episode(self, lane: int, ret: float, length: int) -> None:
        with self.changed:
            self._message.episodes.add(lane=lane, ret=ret, length=length)
            self._touched()

    def add_evaluation(self, score: Score, state: Mapping[str, torch.Tensor]) -> None:
        weights = pack_weights(state)
        if len(weights) > self._most_bytes - (1 << 16):
            raise UserError(f"weights of {len(weights) / 2**20:.0f} MB do not fit into a message: raise "
                            "fleet.max_message_mb")
        with self.changed:
            self._judgements.append(Judgement(returns=score.returns, lengths=score.lengths, version=score.version,
                                              weights=weights, seconds=score.seconds or 0.0))
            self._touched()

    def set_checkpoint_part(self, save: int, state: bytes, segments: Sequence[str]) -> None:
        """What this process adds to a checkpoint; it belongs to all that was told before."""
        if len(state) > self._most_bytes // 2:
            raise UserError(f"a cell's part of a checkpoint takes {len(state) / 2**20:.0f} MB, too much for a message: "
                            "raise fleet.max_message_mb")
        with self.changed:
            self._message.part.CopyFrom(Part(save=save, state=state, segments=segments))
            self._touched()

    def set_member_state(self, state: bytes) -> None:
        """What this process has to be told if it is started again; it belongs to all that was told before."""
        with self.changed:
            self._message.memory = state
            self._touched()

    def add(self, tag: str, total: float, count: int) -> None:
        """`count` measurements at once."""
        with self.changed:
            before, number = self._figures.get(tag, (0.0, 0))
            self._figures[tag] = (before + total, number + count)
            self._touched()

    def add_time(self, tag: str, seconds: float) -> None:
        """Count time in whole milliseconds; like `note`, no reason to send a message."""
        with self.changed:
            self._spent[tag] += 1000 * seconds

    def count_transport(self, tag: str, by: int) -> None:
        """Count something about the wire itself."""
        with self.changed:
            self._counters[tag] += by

    def take_message(self) -> ExchangeRequest:
        """Everything gathered so far as one message; judgements, which are large, one at a time."""
        with self.changed:
            message = self._message
            for tag, spent in self._spent.items():
                whole = int(spent)
                self._counters[tag] += whole
                self._spent[tag] = spent - whole
            for tag, (total, count) in self._figures.items():
                message.figures.add(tag=tag, sum=total, count=count)
            for tag, by in self._counters.items():
                if by:
                    message.counters.add(tag=tag, by=by)
            if self._judgements:
                message.judgements.append(self._judgements.popleft())
            self._underway = message.steps
            self._clear()
            self._empty = not self._judgements
            return message

    def mark_delivered(self) -> None:
        """The message that was sealed last has arrived."""
        with self.changed:
            self._underway = 0

    def _touched(self) -> None:
        if self._empty:
            self._empty = False
            self.changed.notify_all()
        elif self.full:
            self.changed.notify_all()


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
