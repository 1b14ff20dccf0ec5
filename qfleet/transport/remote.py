"""Proxies of a remote replay and of remote weights, for the roles of a member process."""

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
"""Seconds that an evaluator waits for the newest weights before it continues without them."""


class RemoteReplay:
    """Packs chunks in the caller's thread and queues them. `add` returns None if the queue is full: retry later."""

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
        for name, values in chunk.columns.items():  # the learner would reject it every time
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
    """Weights prefetched in the background once the last ones were taken: for an actor, which asks at every step."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._ready: tuple[int, State] | None = None
        self._accept_any = False
        self._call: Any = None
        self._not_before = 0.0
        self.version = -1

    def fetch(self, newer_than: int) -> tuple[int, State] | None:
        with self._lock:
            ready = self._ready
            # A resumed learner may be behind the version it published before; its weights are authoritative.
            if ready is None or (ready[0] <= newer_than and not self._accept_any):
                return None
            self._ready, self._accept_any, self.version = None, False, ready[0]
        self._wake()
        return ready

    def rewind(self) -> None:
        """Accept any version next: another learner process has taken over."""
        with self._lock:
            self._ready, self._accept_any, self.version = None, True, -1
            call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def poll(self, channel: Channel, newest: int) -> None:
        """Take in a finished fetch and start the next one; for the connection's thread.

        UserError if retrying cannot help.
        """
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            self._store(call, channel)
        with self._lock:
            idle = self._ready is None and self._call is None and newest > self.version
        if idle and time.monotonic() >= self._not_before:
            self._call = channel.fetch(self.version)
            self._call.add_done_callback(lambda _: self._wake())

    def _store(self, call: Any, channel: Channel) -> None:
        try:
            fetched = read_fetched(call.result())
            ready = None if fetched is None else (fetched[0], unpack_weights(fetched[1]))
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
            if isinstance(error, grpc.RpcError) and (fatal := fatal_error(error, channel.address)) is not None:
                raise fatal from None
            self._not_before = time.monotonic() + RETRY_S
            return
        with self._lock:
            self._ready = ready

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()


class NewestWeights:
    """Weights fetched on request while the caller waits: for an evaluator, which asks rarely and for the newest."""

    def __init__(self, channel: Channel, is_over: Callable[[], bool]) -> None:
        self._channel, self._is_over = channel, is_over
        self._accept_any = False
        self.version = -1

    def rewind(self) -> None:
        self._accept_any = True

    def fetch(self, newer_than: int) -> tuple[int, State] | None:
        deadline = time.monotonic() + NEWEST_S
        while not self._is_over():
            try:
                accept_any, self._accept_any = self._accept_any, False
                call = self._channel.fetch(-1 if accept_any else newer_than)
                while not call.done() and not self._is_over():
                    time.sleep(POLL_S)
                if not call.done():
                    call.cancel()
                    return None
                fetched = read_fetched(call.result())
            except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
                fatal = fatal_error(error, self._channel.address) if isinstance(error, grpc.RpcError) else None
                if fatal is not None:
                    raise fatal from None
                self._accept_any |= accept_any
                if time.monotonic() > deadline:
                    log.warning("no weights from %s: %s", self._channel.address,
                                summarize_error(error) if isinstance(error, grpc.RpcError) else error)
                    return None
                time.sleep(RETRY_S)
                continue
            if fetched is None:
                return None
            self.version = fetched[0]
            return fetched[0], unpack_weights(fetched[1])
        return None
