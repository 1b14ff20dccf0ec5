"""Client of a parameter-server shard: retries, shared memory within a host, gRPC or Ray calls."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import torch

from qfleet.core.devices import is_on_host
from qfleet.core.errors import ProcessFault
from qfleet.sync.ps_shard import Push, PushPullResult, PushResult, WeightSnapshot
from qfleet.transport.address import Address
from qfleet.transport.grpc_channel import (
    CALL_S,
    OPTIONS,
    PROTOCOL,
    SLOWEST_BYTES_PER_S,
    fatal_error,
    summarize_error,
    unknown_token,
)
from qfleet.transport.security import client_metadata
from qfleet.transport.shard_pb2 import (
    BFLOAT16,
    FLOAT32,
    CopyRequest,
    LookReply,
    MeetReply,
    MeetRequest,
    State,
)
from qfleet.transport.shard_service import (
    CHALLENGE,
    METHODS,
    SERVICE,
    VERDICT_NAMES,
    pack_pushed_buffers,
    pack_shard,
    to_bytes,
    to_tensor,
    unpack_buffers,
    unpack_shard,
)
from qfleet.transport.shared_memory import OwnedSharedBuffer

log = logging.getLogger(__name__)

RETRY_S = 0.1
POLL_S = 0.5


class GrpcShardChannel:
    """gRPC channel to a shard on this host."""

    def __init__(self, address: Address, token: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(str(address), OPTIONS)
        metadata = client_metadata(token, CHALLENGE, CHALLENGE)
        self.methods: Mapping[str, RpcMethod] = {
            name: GrpcMethod(self._channel.unary_unary(f"/{SERVICE}/{name}"), metadata) for name in METHODS}

    def close(self) -> None:
        self._channel.close()


class RpcMethod(Protocol):
    """One RPC from bytes to bytes: blocking, or as a future with `result(timeout)`. Failures are `grpc.RpcError`."""

    def __call__(self, request: bytes, timeout: float) -> bytes: ...
    def future(self, request: bytes, timeout: float) -> Any: ...


@dataclass(frozen=True)
class GrpcMethod:
    """`RpcMethod` of a gRPC channel."""

    method: Any
    metadata: Any

    def __call__(self, request: bytes, timeout: float) -> bytes:
        data: bytes = self.method(request, timeout=timeout, metadata=self.metadata)
        return data

    def future(self, request: bytes, timeout: float) -> Any:
        return self.method.future(request, timeout=timeout, metadata=self.metadata)


class ShardChannel(Protocol):
    """Transport to a shard. `methods` take the bytes of a request and a timeout, as gRPC's do."""

    @property
    def address(self) -> object: ...
    @property
    def methods(self) -> Mapping[str, RpcMethod]: ...
    def close(self) -> None: ...


class RemoteShard:
    """Implements `ShardClient`. Calls to a shard that does not answer are repeated until `patience_s` has passed.

    If `share` is set, a worker that pushes to a shard on this host does so through a shared buffer, which the next
    call overwrites. A repeated call sends its tensors instead, and the next push uses a new buffer: the shard may
    still be reading the old one. `wait` is called while waiting; it may raise to give up.
    """

    def __init__(self, channel: ShardChannel, patience_s: float, wait: Callable[[float], object] = time.sleep,
                 share: bool = True) -> None:
        self.address, self.patience_s, self.wait = channel.address, patience_s, wait
        self._channel, self._methods = channel, channel.methods
        self._buffer: OwnedSharedBuffer | None = None
        self._sharing = share and isinstance(channel.address, Address) and bool(channel.address.path)

    def push_pull(self, worker: str, push: Push | None, pull: bool) -> Callable[[], PushPullResult]:
        fields = {} if push is None else _push_fields(push)

        def request(**tensors: Any) -> bytes:
            return MeetRequest(protocol=PROTOCOL, worker=worker, pull=pull, **fields, **tensors).SerializeToString()

        def with_tensors() -> bytes:
            return request() if push is None else request(gradient=to_bytes(push.gradient))

        buffer = self._buffer_for(push)
        if buffer is not None and push is not None:
            buffer.gradient(push.gradient.dtype).copy_(push.gradient)
        data = with_tensors() if buffer is None else request(board=buffer.ticket)

        def without_buffer() -> bytes:
            nonlocal buffer, data
            if buffer is not None:
                self._drop_buffer()
                buffer, data = None, with_tensors()
            return data

        finish = self._call("Meet", data, without_buffer)

        def finish_push_pull() -> PushPullResult:
            reply = MeetReply.FromString(finish())
            answer = None if push is None else PushResult(VERDICT_NAMES[reply.verdict], reply.version, reply.staleness)
            snapshot = None
            if pull:
                weights = to_tensor(reply.weights, torch.float32) if buffer is None else buffer.weights
                snapshot = WeightSnapshot(reply.epoch, reply.version, weights, unpack_buffers(reply.buffers))
            if push is not None and snapshot is not None and snapshot.weights.shape != push.gradient.shape:
                raise ProcessFault(f"{self.address} has {len(snapshot.weights)} weights, not {len(push.gradient)}")
            return answer, snapshot

        return finish_push_pull

    def status(self, timeout_s: float = 1.0) -> LookReply | None:
        """Status of the shard; None if it does not answer."""
        try:
            data = self._methods["Look"](b"", timeout=timeout_s)
        except grpc.RpcError:
            return None
        return LookReply.FromString(data)

    def copy(self) -> dict[str, Any]:
        return unpack_shard(State.FromString(self._call("Copy", CopyRequest().SerializeToString())()))

    def shut_down(self) -> None:
        """Tell the shard that it will not be called again.

        Failure is ignored: the supervisor stops the shard as well.
        """
        with suppress(grpc.RpcError):
            self._methods["Dismiss"](b"", timeout=1.0)

    def load(self, state: Mapping[str, Any]) -> None:
        self._call("Load", pack_shard(state).SerializeToString())()

    def close(self) -> None:
        self._drop_buffer()
        self._channel.close()

    def _buffer_for(self, push: Push | None) -> OwnedSharedBuffer | None:
        if push is not None and self._buffer is not None and self._buffer.length != len(push.gradient):
            self._drop_buffer()
        if push is not None and self._buffer is None and self._sharing and len(push.gradient):
            try:
                self._buffer = OwnedSharedBuffer(len(push.gradient), not is_on_host(push.gradient))
            except OSError as error:
                self._disable_sharing(str(error))
        return self._buffer

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None

    def _disable_sharing(self, why: str) -> None:
        self._sharing = False
        log.info("no shared memory with %s, sending gradients and weights instead: %s", self.address, why)

    def _call(self, name: str, request: bytes, again: Callable[[], bytes] | None = None) -> Callable[[], bytes]:
        """Start a call; the returned function waits for its reply. A repetition sends `again()` if that is given."""
        def send(data: bytes) -> Any:
            return self._methods[name].future(data, timeout=CALL_S + len(data) / SLOWEST_BYTES_PER_S)

        first = send(request)

        def finish() -> bytes:
            since, call = time.monotonic(), first
            while True:
                try:
                    data: bytes = call.result(timeout=POLL_S)
                    return data
                except grpc.FutureTimeoutError:
                    self.wait(0.0)
                    continue
                except grpc.RpcError as error:
                    self._raise_if_fatal(error, time.monotonic() - since)
                self.wait(RETRY_S * random.uniform(0.5, 1.0))
                call = send(again() if again else request)

        return finish

    def _raise_if_fatal(self, error: grpc.RpcError, waited_s: float) -> None:
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            raise ProcessFault(error.details()) from None
        if error.code() == grpc.StatusCode.NOT_FOUND and self._sharing:
            self._disable_sharing(error.details())
            return
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise unknown_token(self.address) from None
        if (fatal := fatal_error(error, self.address)) is not None:
            raise fatal from None
        if waited_s > self.patience_s:
            why = summarize_error(error)
            raise ProcessFault(f"no answer from the shard at {self.address} for {waited_s:.0f} s ({why})") from None


def _push_fields(push: Push) -> dict[str, Any]:
    """Fields of a request that pushes a gradient, without the gradient itself."""
    half = push.gradient.dtype == torch.bfloat16
    return {"sequence": push.sequence, "epoch": push.epoch, "version": push.version, "norm": push.norm,
            "numbers": BFLOAT16 if half else FLOAT32, "buffers": pack_pushed_buffers(push)}
