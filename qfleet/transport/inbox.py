"""What has arrived and waits for the main thread, and how it is read there before anything of it is believed."""

from __future__ import annotations

import re
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qfleet.core.evaluation import Score
from qfleet.replay.codec import PackedChunk
from qfleet.replay.layout import Layout
from qfleet.transport.fleet_pb2 import ExchangeRequest, Judgement, Parcel, Part
from qfleet.transport.weight_codec import unpack_weights

MAX_STEPS = 1 << 31
MAX_MEMBER_STATE_BYTES = 1 << 20
MAX_QUEUED_BYTES = 1 << 30
_TAG = re.compile(r"[A-Za-z0-9_.:/-]{1,100}")


class Inbox:
    """Messages in the order of their arrival; of each sender at most `per_sender`, so that nobody crowds others out.

    A sender of whom `steps` environment steps wait has to wait, too: what lies here for long was played by old weights.
    All messages of members that joined have at most `most_bytes` together, whatever their number; one may always come.
    The run's own processes do not wait for them. Any thread offers, the main thread alone takes out.
    """

    def __init__(self, per_sender: int, steps: int = 1 << 62, most_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.per_sender, self.steps, self.most_bytes = max(1, per_sender), max(1, steps), most_bytes
        self._lock = threading.Lock()
        self._messages: deque[tuple[ExchangeRequest, int]] = deque()  # with the bytes that count
        self._bytes = 0
        self._waiting: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()

    def offer(self, message: ExchangeRequest, joined: bool = False) -> bool:
        """Take a message in, if there is room for one more of its sender's; `joined`: it is no process of the run's."""
        size = message.ByteSize() if joined else 0
        with self._lock:
            if not self._room(message.index) or (size and self._bytes and self._bytes + size > self.most_bytes):
                return False
            self._bytes += size
            self._waiting[message.index] += 1
            self._steps[message.index] += message.steps
            self._messages.append((message, size))
            return True

    def room(self, index: int, joined: bool = False) -> bool:
        with self._lock:
            return self._room(index) and not (joined and self._bytes >= self.most_bytes)

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
    """A message that was read and found sound.

    `parcels` are packed chunks with the priorities [S] of their starts, or None; `figures` tag -> (sum, count).
    """

    steps: int
    version: int
    chunks: list[tuple[PackedChunk, np.ndarray | None]]
    episodes: list[tuple[int, float, int]]
    metrics: dict[str, tuple[float, int]]
    counters: dict[str, int]
    evaluations: list[tuple[Score, dict[str, torch.Tensor]]]
    checkpoint_part: Part | None
    member_state: bytes


def decode_message(message: ExchangeRequest, layout: Layout) -> DecodedMessage:
    """Read a message of this layout; whatever is malformed, out of range or not finite raises ValueError."""
    if message.steps > MAX_STEPS:
        raise ValueError(f"{message.steps} steps in one message")
    tags = [*(figure.tag for figure in message.figures), *(counter.tag for counter in message.counters)]
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise ValueError(f"{tag[:100]!r} is not a tag")
        if "/" not in tag:
            raise ValueError(f"{tag!r} is a clock of the run's, and no figure")
    for figure in message.figures:
        if not figure.count or not np.isfinite(figure.sum):
            raise ValueError(f"figure {figure.tag}: {figure.sum} in {figure.count} measurements")
    for episode in message.episodes:
        if not np.isfinite(episode.ret) or episode.length > MAX_STEPS:
            raise ValueError(f"an episode of return {episode.ret} and length {episode.length}")
    return DecodedMessage(
        steps=message.steps, version=message.version,
        chunks=[_chunk(parcel, layout) for parcel in message.parcels],
        episodes=[(episode.lane, episode.ret, episode.length) for episode in message.episodes],
        metrics={figure.tag: (figure.sum, figure.count) for figure in message.figures},
        counters={counter.tag: counter.by for counter in message.counters},
        evaluations=[_evaluation(judgement) for judgement in message.judgements],
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
    # Not checked for being finite: the replay clamps and counts whatever is not a priority.
    return packed, np.frombuffer(parcel.priority, "<f4").astype(np.float32)


def _member_state(memory: bytes) -> bytes:
    """It is read by nobody but whoever has that place next."""
    if len(memory) > MAX_MEMBER_STATE_BYTES:
        raise ValueError(f"{len(memory)} bytes to be remembered, above {MAX_MEMBER_STATE_BYTES}")
    return memory


def _require_actions(packed: PackedChunk, layout: Layout) -> None:
    action = packed.dense.get("action")  # a box of many numbers lies compressed, as observations do
    if action is None or not action.size:
        return
    low, high = (0, layout.spec.num_actions - 1) if layout.spec.box is None else (-1, 1)
    if (action < low).any() or (action > high).any():
        raise ValueError(f"actions {action.min()} to {action.max()} of a chunk, where {low} to {high} exist")


def _checkpoint_part(part: Part) -> Part:
    """Its state is read by whoever saves it; names become names of files."""
    if wrong := [name for name in part.segments if not re.fullmatch(r"[a-z0-9-]{1,100}", name)]:
        raise ValueError(f"{wrong[0][:100]!r} is not the name of a segment")
    return part


def _evaluation(judgement: Judgement) -> tuple[Score, dict[str, torch.Tensor]]:
    returns: list[Any] = list(judgement.returns)
    if not returns or len(returns) != len(judgement.lengths) or not np.isfinite(returns).all():
        raise ValueError(f"an evaluation of {len(returns)} returns and {len(judgement.lengths)} lengths")
    seconds = judgement.seconds if np.isfinite(judgement.seconds) and judgement.seconds > 0 else None
    score = Score(returns, [int(length) for length in judgement.lengths], judgement.version, seconds)
    return score, unpack_weights(judgement.weights)
