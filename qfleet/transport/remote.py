"""Replay and weights of another process, as the roles of this one see them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import torch

from qfleet.core.errors import BadOutput
from qfleet.core.replay import Chunk
from qfleet.replay.codec import Codec
from qfleet.replay.layout import Layout
from qfleet.transport.grpc_channel import Channel, fatal_error, read_fetched, summarize_error
from qfleet.transport.outbox import Outbox, Stopwatch
from qfleet.transport.weight_codec import unpack_weights

log = logging.getLogger(__name__)

State = dict[str, torch.Tensor]
RETRY_S = 1.0
POLL_S = 0.005
NEWEST_S = 60.0
"""How long an evaluator waits for the newest weights before it goes on without."""


class RemoteReplay:
    """Packs chunks in the caller's thread and queues them; `None` from `add` means that the queue is full: wait."""

    def __init__(self, outbox: Outbox, layout: Layout) -> None:
        self._outbox, self._codec, self._starts = outbox, Codec(layout), layout.starts
        self._encoding, self._stalled = Stopwatch(outbox, "wire/encode_ms"), Stopwatch(outbox, "wire/stall_ms")
        self._added = 0

    def add(self, chunk: Chunk, priority: np.ndarray | None = None) -> int | None:
        if self._outbox.full:
            self._stalled.begin()
            return None
        self._stalled.end()
        self._encoding.begin()
        for name, values in chunk.columns.items():  # the other side would refuse it, again and again
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise BadOutput(f"{name} is too large for {values.dtype}, or not a number: check what the environment "
                                "gives, or wrap it (env.wrappers)")
        data = self._codec.pack(chunk).to_bytes()
        if priority is not None and priority.shape != (self._starts,):
            raise ValueError(f"{priority.shape} priorities for {self._starts} window starts")
        self._outbox.add_chunk(data, b"" if priority is None else priority.astype("<f4").tobytes())
        self._encoding.end()
        self._added += 1
        return self._added - 1


class RemoteClock:
    """The run's step clock in an actor process: the last value received, plus the steps that were taken here since."""

    def __init__(self, outbox: Outbox, steps: Callable[[], int]) -> None:
        self._outbox, self._steps = outbox, steps

    @property
    def steps(self) -> int:
        return self._steps()

    def count_steps(self, steps: int) -> None:
        self._outbox.count_steps(steps)


class RemoteWeights:
    """Fetched in the background as soon as those before were taken: for an actor, who asks at every step."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._held: tuple[int, State] | None = None
        self._anew = False
        self._call: Any = None
        self._not_before = 0.0
        self.version = -1

    def fetch(self, newer_than: int) -> tuple[int, State] | None:
        with self._lock:
            held = self._held
            # A learner that was resumed may be behind what it published in its former life: its word holds.
            if held is None or (held[0] <= newer_than and not self._anew):
                return None
            self._held, self._anew, self.version = None, False, held[0]
        self._wake()
        return held

    def rewind(self) -> None:
        """Another learner has taken over: whatever it has is news."""
        with self._lock:
            self._held, self._anew, self.version = None, True, -1
            call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def poll(self, caller: Channel, newest: int) -> None:
        """Take in what has arrived, and ask for what is newer; for the link's thread. UserError if that is no use."""
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            self._arrived(call, caller)
        with self._lock:
            idle = self._held is None and self._call is None and newest > self.version
        if idle and time.monotonic() >= self._not_before:
            self._call = caller.fetch(self.version)
            self._call.add_done_callback(lambda _: self._wake())

    def _arrived(self, call: Any, caller: Channel) -> None:
        try:
            news = read_fetched(call.result())
            held = None if news is None else (news[0], unpack_weights(news[1]))
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
            if isinstance(error, grpc.RpcError) and (fatal := fatal_error(error, caller.address)) is not None:
                raise fatal from None
            self._not_before = time.monotonic() + RETRY_S
            return
        with self._lock:
            self._held = held

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()


class NewestWeights:
    """Fetched when they are asked for, while the caller waits: for an evaluator, who asks rarely, for the newest."""

    def __init__(self, caller: Channel, over: Callable[[], bool]) -> None:
        self._caller, self._over = caller, over
        self._anew = False
        self.version = -1

    def rewind(self) -> None:
        self._anew = True

    def fetch(self, newer_than: int) -> tuple[int, State] | None:
        deadline = time.monotonic() + NEWEST_S
        while not self._over():
            try:
                anew, self._anew = self._anew, False
                call = self._caller.fetch(-1 if anew else newer_than)
                while not call.done() and not self._over():
                    time.sleep(POLL_S)
                if not call.done():
                    call.cancel()
                    return None
                news = read_fetched(call.result())
            except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
                if isinstance(error, grpc.RpcError) and (fatal := fatal_error(error, self._caller.address)) is not None:
                    raise fatal from None
                self._anew |= anew
                if time.monotonic() > deadline:
                    log.warning("no weights from %s: %s", self._caller.address,
                                summarize_error(error) if isinstance(error, grpc.RpcError) else error)
                    return None
                time.sleep(RETRY_S)
                continue
            if news is None:
                return None
            self.version = news[0]
            return news[0], unpack_weights(news[1])
        return None
