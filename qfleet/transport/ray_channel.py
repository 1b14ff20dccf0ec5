"""Transport by Ray calls: bytes through Ray's object store, and errors as gRPC status codes.

    member: RayChannel.exchange ─▶ RayHost.call ─▶ RayCallHandler.answer ─▶ FleetService ─▶ Inbox     a Ray thread
            RayChannel.fetch    ─▶ RayHost.call ─▶ reference to the weights ─▶ object store of the member's node

Large weights are put into the store once for each version that is fetched; nodes fetch them from each other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from qfleet.transport.fleet_pb2 import (
    ExchangeReply,
    ExchangeRequest,
    FetchRequest,
    HelloRequest,
    PulseReply,
    PulseRequest,
    Welcome,
)
from qfleet.transport.fleet_server import CallRejected, FleetService
from qfleet.transport.grpc_channel import CALL_S, SLOWEST_BYTES_PER_S
from qfleet.transport.ray_host import RayHost
from qfleet.transport.shard_service import METHODS

MethodTable = Mapping[str, tuple[type[Message], Callable[[Any], bytes]]]
POLL_S = 0.5
INLINE_BYTES = 64 << 10
"""Smaller replies travel with the call, which is faster than the store."""


class RayCallError(grpc.RpcError):
    """A call that Ray lost, or that was rejected by the receiver."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self._code, self._text = code, text

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text


class RayChannel:
    """`Channel` to a learner in a Ray actor."""

    def __init__(self, handle: Any, address: str) -> None:
        self.address = address
        self._handle = handle
        self._closed = False

    def hello(self, request: HelloRequest) -> Welcome:
        return Welcome.FromString(self._call("hello", request.SerializeToString(), CALL_S))

    def exchange(self, request: bytes, timeout_s: float = CALL_S) -> ExchangeReply:
        return ExchangeReply.FromString(
            self._call("exchange", request, timeout_s + len(request) / SLOWEST_BYTES_PER_S))

    def pulse(self, timeout_s: float = CALL_S) -> PulseReply:
        return PulseReply.FromString(self._call("pulse", b"", timeout_s))

    def fetch(self, newer_than: int) -> Any:
        """Future of the bytes of a FetchReply; does not block."""
        future: Future[bytes] = Future()

        def arrived(call: Future[Any]) -> None:
            try:
                answer = _unwrap(call.result())
            except Exception as error:  # Ray raises many types for a lost call or a dead owner
                _resolve(future.set_exception, error if isinstance(error, grpc.RpcError) else _unavailable(error))
                return
            if isinstance(answer, list):
                answer[0].future().add_done_callback(arrived)
            else:
                _resolve(future.set_result, answer)

        try:
            ref = self._handle.call.remote("fetch", FetchRequest(newer_than=newer_than).SerializeToString())
            ref.future().add_done_callback(arrived)
        except Exception as error:
            _resolve(future.set_exception, _unavailable(error))
        return future

    def close(self) -> None:
        """Stop waiting for a pending call."""
        self._closed = True

    def _call(self, method: str, data: bytes, timeout_s: float) -> bytes:
        import ray

        deadline = time.monotonic() + timeout_s
        try:
            ref = self._handle.call.remote(method, data)
            while not ray.wait([ref], timeout=max(0.0, min(POLL_S, deadline - time.monotonic())))[0]:
                if self._closed:
                    raise RayCallError(grpc.StatusCode.CANCELLED, "the channel was closed")
                if time.monotonic() >= deadline:
                    raise RayCallError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s:g} s")
            answer: bytes = _unwrap(ray.get(ref))
        except (ray.exceptions.RayError, OSError, ValueError) as error:
            raise _unavailable(error) from None
        return answer


def _unwrap(answer: Any) -> Any:
    if isinstance(answer, tuple):
        raise RayCallError(grpc.StatusCode[answer[0]], answer[1])
    return answer


def _unavailable(error: Exception) -> RayCallError:
    return RayCallError(grpc.StatusCode.UNAVAILABLE, f"{type(error).__name__}: {str(error).strip() or 'no details'}")


def _resolve(set_value: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # the future was cancelled
        set_value(value)


@dataclass(frozen=True)
class RayMethod:
    """`RpcMethod` of a shard in a Ray actor."""

    handle: Any
    name: str

    def __call__(self, request: bytes, timeout: float) -> bytes:
        return self.future(request, timeout).result(timeout)

    def future(self, request: bytes, timeout: float) -> RayCallFuture:
        return RayCallFuture(self.handle.call.remote(self.name, request), timeout)


class RayCallFuture:
    """Future of a pending Ray call."""

    def __init__(self, ref: Any, timeout_s: float) -> None:
        self._ref, self._deadline = ref, time.monotonic() + timeout_s

    def result(self, timeout: float) -> bytes:
        """Reply of the call; grpc.FutureTimeoutError if it has not arrived in time."""
        import ray

        try:
            if not ray.wait([self._ref], timeout=timeout)[0]:
                if time.monotonic() >= self._deadline:
                    raise RayCallError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
                raise grpc.FutureTimeoutError
            data: bytes = _unwrap(ray.get(self._ref))
        except (ray.exceptions.RayError, OSError, ValueError) as error:
            raise _unavailable(error) from None
        return data


class RayShardChannel:
    """`ShardChannel` to a shard in a Ray actor."""

    def __init__(self, handle: Any, address: str) -> None:
        self.address = address
        self.methods = {name: RayMethod(handle, name) for name in METHODS}

    def close(self) -> None: ...


class RayCallHandler:
    """Dispatches the calls that reach a host, as a gRPC server would; runs in Ray's threads."""

    def __init__(self, methods: MethodTable) -> None:
        self._methods = methods
        self._lock = threading.Lock()
        self._stored_reply: tuple[bytes, Any] = (b"", None)

    def answer(self, method: str, data: bytes) -> Any:
        """Reply bytes; for large weights a list with an object reference; on failure a status name and a text."""
        kind, respond = self._methods[method]
        try:
            reply = respond(kind.FromString(data))
        except DecodeError:
            return "INVALID_ARGUMENT", f"the request is not a valid {kind.DESCRIPTOR.name}"
        except CallRejected as error:
            return error.code.name, error.text
        return [self._stored(reply)] if method == "fetch" and len(reply) >= INLINE_BYTES else reply

    def _stored(self, reply: bytes) -> Any:
        """Object reference of these bytes; `PublishedWeights.reply` returns the same object for a version."""
        import ray

        with self._lock:
            if self._stored_reply[0] is not reply:
                self._stored_reply = (reply, ray.put(reply))
            return self._stored_reply[1]


def fleet_methods(service: FleetService) -> MethodTable:
    return {"hello": (HelloRequest, service.hello), "exchange": (ExchangeRequest, service.exchange),
            "fetch": (FetchRequest, service.fetch), "pulse": (PulseRequest, service.pulse)}


@contextmanager
def serve_calls(host: RayHost, methods: MethodTable) -> Iterator[None]:
    """While inside, calls to the host are dispatched to `methods`."""
    with host.answering(RayCallHandler(methods)):
        yield
