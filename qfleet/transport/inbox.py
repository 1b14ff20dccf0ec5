"""Queue of received messages, and their validation before the main thread uses them."""

from __future__ import annotations

import re
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qfleet.core.episode import Episode
from qfleet.core.evaluation import Score
from qfleet.replay.codec import PackedChunk
from qfleet.replay.layout import Layout
from qfleet.transport.fleet_pb2 import ExchangeRequest, Figure, Judgement, Parcel, Part
from qfleet.transport.weight_codec import unpack_weights

MAX_STEPS = 1 << 31
MAX_MEMBER_STATE_BYTES = 1 << 20
MAX_QUEUED_BYTES = 1 << 30
_TAG = re.compile(r"[A-Za-z0-9_.:/-]{1,100}")


class Inbox:
    """Queue of messages in order of arrival, with at most `per_sender` of each sender so that none starves the others.

    A sender with `steps` environment steps in the queue has to wait as well: queued experience ages. All messages of
    joined members have at most `max_bytes` together, whatever their number, though one is always accepted; the run's
    own processes do not wait for them. Any thread offers, only the main thread takes out.
    """

    def __init__(self, per_sender: int, steps: int = 1 << 62, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.per_sender, self.steps, self.max_bytes = max(1, per_sender), max(1, steps), max_bytes
        self._lock = threading.Lock()
        self._messages: deque[tuple[ExchangeRequest, int]] = deque()  # with the bytes that count towards max_bytes
        self._bytes = 0
        self._waiting: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()

    def offer(self, message: ExchangeRequest, joined: bool = False) -> bool:
        """Enqueue a message; False if its sender has no room. `joined`: not one of the run's own processes."""
        size = message.ByteSize() if joined else 0
        with self._lock:
            if not self._room(message.index) or (size and self._bytes and self._bytes + size > self.max_bytes):
                return False
            self._bytes += size
            self._waiting[message.index] += 1
            self._steps[message.index] += message.steps
            self._messages.append((message, size))
            return True

    def room(self, index: int, joined: bool = False) -> bool:
        with self._lock:
            return self._room(index) and not (joined and self._bytes >= self.max_bytes)

    def _room(self, index: int) -> bool:
        return self._waiting[index] < self.per_sender and self._steps[index] < self.steps

    def peek(self) -> ExchangeRequest | None:
        with self._lock:
            return self._messages[0][0] if self._messages else None

    def pop(self) -> ExchangeRequest | None:
        with self._lock:
            if not self._messages:
                return None
            message, size = self._messages.popleft()
            self._bytes -= size
            self._waiting[message.index] -= 1
            self._steps[message.index] -= message.steps
            if not self._waiting[message.index]:
                del self._waiting[message.index], self._steps[message.index]
            return message

    def __len__(self) -> int:
        return len(self._messages)


@dataclass(frozen=True)
class DecodedMessage:
    """A parsed and validated message.

    `chunks` are packed chunks with the priorities [S] of their window starts, or None; `metrics` maps tag to (sum,
    count).
    """

    steps: int
    version: int
    chunks: list[tuple[PackedChunk, np.ndarray | None]]
    episodes: list[Episode]
    metrics: dict[str, tuple[float, int]]
    counters: dict[str, int]
    evaluations: list[tuple[Score, dict[str, torch.Tensor]]]
    checkpoint_part: Part | None
    member_state: bytes


def decode_message(message: ExchangeRequest, layout: Layout) -> DecodedMessage:
    """Decode a message of this layout; ValueError for anything malformed, out of range or not finite."""
    if message.steps > MAX_STEPS:
        raise ValueError(f"{message.steps} steps in one message")
    tags = [*(metric.tag for metric in message.figures), *(counter.tag for counter in message.counters)]
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise ValueError(f"{tag[:100]!r} is not a tag")
        if "/" not in tag:
            raise ValueError(f"{tag!r} is a clock of the run, not a metric")
    for metric in message.figures:
        if not metric.count or not np.isfinite(metric.sum):
            raise ValueError(f"metric {metric.tag}: {metric.sum} in {metric.count} measurements")
    for episode in message.episodes:
        if not np.isfinite(episode.ret) or episode.length > MAX_STEPS:
            raise ValueError(f"an episode of return {episode.ret} and length {episode.length}")
    return DecodedMessage(
        steps=message.steps, version=message.version,
        chunks=[_chunk(parcel, layout) for parcel in message.parcels],
        episodes=[Episode(episode.ret, episode.length, episode.lane, message.index, _info(episode.info))
                  for episode in message.episodes],
        metrics={metric.tag: (metric.sum, metric.count) for metric in message.figures},
        counters={counter.tag: counter.by for counter in message.counters},
        evaluations=[_evaluation(evaluation) for evaluation in message.judgements],
        checkpoint_part=_checkpoint_part(message.part) if message.HasField("part") else None,
        member_state=_member_state(message.memory))


def _chunk(parcel: Parcel, layout: Layout) -> tuple[PackedChunk, np.ndarray | None]:
    packed = PackedChunk.from_bytes(parcel.chunk, layout)
    for name, values in packed.dense.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"column {name} of a chunk is not finite")
    _require_actions(packed, layout)
    if not parcel.priority:
        return packed, None
    if len(parcel.priority) != 4 * layout.starts:
        raise ValueError(f"{len(parcel.priority)} bytes of priorities for {layout.starts} window starts")
    # Not checked for being finite: the replay clamps and counts invalid priorities.
    return packed, np.frombuffer(parcel.priority, "<f4").astype(np.float32)


def _info(values: Sequence[Figure]) -> dict[str, float]:
    """Metrics from `info` by name, of an episode or an evaluation."""
    for value in values:
        if not _TAG.fullmatch(value.tag) or not np.isfinite(value.sum):
            raise ValueError(f"info metric {value.tag[:100]!r}: {value.sum}")
    return {value.tag: value.sum for value in values}


def _member_state(state: bytes) -> bytes:
    """Opaque here; only read by the next process with the same index."""
    if len(state) > MAX_MEMBER_STATE_BYTES:
        raise ValueError(f"{len(state)} bytes of member state, above {MAX_MEMBER_STATE_BYTES}")
    return state


def _require_actions(packed: PackedChunk, layout: Layout) -> None:
    action = packed.dense.get("action")  # large continuous actions are compressed, like observations
    if action is None or not action.size:
        return
    low, high = (0, layout.spec.num_actions - 1) if layout.spec.box is None else (-1, 1)
    if (action < low).any() or (action > high).any():
        raise ValueError(f"actions {action.min()} to {action.max()} of a chunk, outside {low} to {high}")


def _checkpoint_part(part: Part) -> Part:
    """Check the segment names, which become file names. The state is parsed by the coordinator."""
    if invalid := [name for name in part.segments if not re.fullmatch(r"[a-z0-9-]{1,100}", name)]:
        raise ValueError(f"{invalid[0][:100]!r} is not the name of a segment")
    return part


def _evaluation(evaluation: Judgement) -> tuple[Score, dict[str, torch.Tensor]]:
    returns: list[Any] = list(evaluation.returns)
    if not returns or len(returns) != len(evaluation.lengths) or not np.isfinite(returns).all():
        raise ValueError(f"an evaluation of {len(returns)} returns and {len(evaluation.lengths)} lengths")
    seconds = evaluation.seconds if np.isfinite(evaluation.seconds) and evaluation.seconds > 0 else None
    score = Score(returns, [int(length) for length in evaluation.lengths], evaluation.version, seconds,
                  _info(evaluation.info))
    return score, unpack_weights(evaluation.weights)
