"""A shard of a parameter server over the wire: the service around it, and the shard as others see it.

Gradients and weights are plain numbers whose count must be right. They travel, or, within a host, lie on a `board` that
both sides see. A shard's whole state travels as safetensors.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import torch
from google.protobuf.message import Message

from qfleet.core.errors import ProcessFault
from qfleet.sync.ps_shard import Push, PushPullResult, PushRejected, PushResult, Shard, WeightSnapshot
from qfleet.transport.address import Address, socket_address
from qfleet.transport.fleet_server import WORKERS, AuthInterceptor, CallRejected, make_server, rpc_handler
from qfleet.transport.grpc_channel import (
    CALL_S,
    OPTIONS,
    PROTOCOL,
    SLOWEST_BYTES_PER_S,
    fatal_error,
    summarize_error,
    unknown_token,
)
from qfleet.transport.security import Keyring, client_metadata
from qfleet.transport.shard_pb2 import (
    ANEW,
    APPLIED,
    BFLOAT16,
    FLOAT32,
    NONE,
    REPEATED,
    STALE,
    CopyRequest,
    DismissReply,
    DismissRequest,
    LoadReply,
    LookReply,
    LookRequest,
    MeetReply,
    MeetRequest,
    State,
)
from qfleet.transport.shared_memory import OwnedSharedBuffer, SharedBuffer, SharedBufferCache
from qfleet.transport.weight_codec import pack_weights, unpack_weights

log = logging.getLogger(__name__)

SERVICE = "qfleet.shard.v1.Shard"
METHODS = ("Meet", "Look", "Copy", "Load", "Dismiss")
CHALLENGE = ""
"""Shards are called through sockets in a private folder, where nothing has to be proved: credentials never change."""

MAX_CONNECTIONS = 1024
RETRY_S = 0.1
GLANCE_S = 0.5
VERDICTS = {"applied": APPLIED, "stale": STALE, "repeated": REPEATED, "anew": ANEW}
WORDS: dict[Any, Any] = {number: word for word, number in VERDICTS.items()}


def to_bytes(numbers: torch.Tensor) -> bytes:
    """Little-endian, float32 or bfloat16."""
    plain = numbers.detach().cpu().contiguous()
    return (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy().tobytes()


def to_tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no numbers of {dtype.itemsize} bytes each")
    kind = "<i2" if dtype == torch.bfloat16 else "<f4"
    return torch.from_numpy(np.frombuffer(data, kind).copy()).view(dtype)


def pack_shard(state: Mapping[str, Any]) -> State:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return State(version=state["version"], tensors=pack_weights(tensors), staleness=state["staleness"],
                 stale=state["stale"], refused=state["refused"], sequences=state["sequences"],
                 buffers=_packed(state["buffers"]))


def _packed(buffers: Mapping[str, torch.Tensor]) -> bytes:
    return pack_weights(buffers) if buffers else b""


def _unpacked(data: bytes) -> dict[str, torch.Tensor]:
    return unpack_weights(data) if data else {}


def unpack_shard(message: State) -> dict[str, Any]:
    """A shard's state; ValueError unless it is whole, finite and of one length."""
    tensors = unpack_weights(message.tensors)
    vectors = {name: value for name, value in tensors.items() if name != "steps"}
    if not {"weights", "mean", "square"} <= vectors.keys() <= {"weights", "mean", "square", "compensation"}:
        raise ValueError(f"a shard's state has {sorted(tensors)}")
    if "steps" not in tensors or tensors["steps"].shape != ():
        raise ValueError("a shard's state has no count of its steps")
    for name, value in vectors.items():
        if value.shape != vectors["weights"].shape or value.ndim != 1 or value.dtype != torch.float32:
            raise ValueError(f"{name} of a shard is {value.dtype} {tuple(value.shape)}")
        if not torch.isfinite(value).all():
            raise ValueError(f"{name} of a shard: not finite")
    return {**tensors, "version": message.version, "staleness": dict(message.staleness), "stale": message.stale,
            "refused": message.refused, "sequences": dict(message.sequences), "buffers": _unpacked(message.buffers)}


class ShardService:
    """Answers for a shard, which `build` makes of a state. Nothing is answered before there is one.

    `loaded` hears of every state that was given. `leaving`: nobody will call again; `called_at`: when somebody did.
    """

    def __init__(self, build: Callable[[Mapping[str, Any]], Shard], loaded: Callable[[State], object]) -> None:
        self.build, self.loaded, self.shared_buffers = build, loaded, SharedBufferCache()
        self.shard: Shard | None = None
        self.leaving, self.called_at = False, time.monotonic()
        self.methods: dict[str, tuple[type[Message], Callable[[Any], bytes]]] = {
            "Meet": (MeetRequest, self.push_pull), "Look": (LookRequest, self.status), "Copy": (CopyRequest, self.copy),
            "Load": (State, self.load), "Dismiss": (DismissRequest, self.shut_down)}

    def push_pull(self, request: MeetRequest) -> bytes:
        shard = self._present()
        if request.protocol != PROTOCOL:
            raise CallRejected(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{request.worker} speaks protocol {request.protocol}, this shard {PROTOCOL}: install the "
                "same version of qfleet",
            )
        answer, board = None, self._shared_buffer(request, shard)
        if request.sequence:
            dtype = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}.get(request.numbers)
            try:
                if dtype is None:
                    raise ValueError(f"numbers of kind {request.numbers} are not known")
                gradient = to_tensor(request.gradient, dtype) if board is None else board.gradient(dtype)
                answer = shard.push(Push(request.worker, request.sequence, request.epoch, request.version,
                                         request.norm, gradient, _unpacked(request.buffers)))
            except ValueError as error:
                whose = "" if isinstance(error, PushRejected) else f"a gradient of {request.worker}: "
                raise CallRejected(grpc.StatusCode.INVALID_ARGUMENT, f"{whose}{error}") from None
        reply = MeetReply(verdict=NONE if answer is None else VERDICTS[answer.verdict], epoch=shard.epoch,
                          version=shard.version if answer is None else answer.version,
                          staleness=0 if answer is None else answer.staleness)
        if request.pull:
            shown = shard.pull(request.worker)
            reply.version, reply.epoch = shown.version, shown.epoch
            if board is None:
                reply.weights = to_bytes(shown.weights)
            else:
                board.weights.copy_(shown.weights)
            reply.buffers = b"" if request.sequence else _packed(shown.buffers)
        return reply.SerializeToString()

    def _shared_buffer(self, request: MeetRequest, shard: Shard) -> SharedBuffer | None:
        if not request.HasField("board"):
            return None
        try:
            return self.shared_buffers.find(request.board, len(shard.weights))
        except (OSError, ValueError) as error:
            raise CallRejected(grpc.StatusCode.NOT_FOUND, f"{request.worker} has no board here: {error}") from None

    def status(self, request: LookRequest) -> bytes:
        shard = self._present()
        return LookReply(version=shard.version, staleness=dict(shard.staleness), stale=shard.stale,
                         refused=shard.refused).SerializeToString()

    def copy(self, request: CopyRequest) -> bytes:
        return pack_shard(self._present().state_dict()).SerializeToString()

    def shut_down(self, request: DismissRequest) -> bytes:
        self.leaving = True
        return DismissReply().SerializeToString()

    def load(self, request: State) -> bytes:
        try:
            shard = self.build(unpack_shard(request))
        except ValueError as error:
            raise CallRejected(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        self.loaded(request)
        self.shard = shard
        return LoadReply(epoch=shard.epoch).SerializeToString()

    def _present(self) -> Shard:
        self.called_at = time.monotonic()
        if self.shard is None:
            raise CallRejected(grpc.StatusCode.UNAVAILABLE, "this shard has not been given its weights yet")
        return self.shard


class ShardServer:
    """Brings the calls of other processes of this host to a service."""

    def __init__(self, service: ShardService, socket: Path, token: str, max_message_bytes: int) -> None:
        self._socket = socket
        # A thread begins with as many threads for its arithmetic as there are cores.
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="shard", initializer=torch.set_num_threads,
                                        initargs=(1,))
        self._server = make_server(
            self._pool, AuthInterceptor(Keyring([token], CHALLENGE)), max_message_bytes, MAX_CONNECTIONS, SERVICE,
            {name: rpc_handler(kind, answer) for name, (kind, answer) in service.methods.items()})
        socket.unlink(missing_ok=True)  # of one that was killed
        self._server.add_insecure_port(str(socket_address(socket)))

    def __enter__(self) -> ShardServer:
        self._server.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._server.stop(0.5).wait(5)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.unlink(missing_ok=True)


class GrpcShardChannel:
    """How a shard of this host is called: `methods` take the bytes of a request and a timeout, as gRPC's do."""

    def __init__(self, address: Address, token: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(str(address), OPTIONS)
        metadata = client_metadata(token, CHALLENGE, CHALLENGE)
        self.methods: Mapping[str, RpcMethod] = {
            name: GrpcMethod(self._channel.unary_unary(f"/{SERVICE}/{name}"), metadata) for name in METHODS}

    def close(self) -> None:
        self._channel.close()


class RpcMethod(Protocol):
    """A call by name: at once, or as a future with `result(timeout)`. Failures are `grpc.RpcError`."""

    def __call__(self, request: bytes, timeout: float) -> bytes: ...
    def future(self, request: bytes, timeout: float) -> Any: ...


@dataclass(frozen=True)
class GrpcMethod:
    """A `Method` of gRPC's."""

    method: Any
    metadata: Any

    def __call__(self, request: bytes, timeout: float) -> bytes:
        data: bytes = self.method(request, timeout=timeout, metadata=self.metadata)
        return data

    def future(self, request: bytes, timeout: float) -> Any:
        return self.method.future(request, timeout=timeout, metadata=self.metadata)


class ShardChannel(Protocol):
    """What carries calls to a shard."""

    @property
    def address(self) -> object: ...
    @property
    def methods(self) -> Mapping[str, RpcMethod]: ...
    def close(self) -> None: ...


class RemoteShard:
    """Implements `Shelf`. A shard that does not answer is asked again, the same thing, until patience ends.

    To a shard of this host a worker that pushes has a board, which the next call writes to, if it shall `share`. What
    is asked again travels, and the next push has another board: somebody may still be busy with the old one.
    `wait` is called while there is nothing to do but wait; it may raise to end the waiting.
    """

    def __init__(self, line: ShardChannel, patience_s: float, wait: Callable[[float], object] = time.sleep,
                 share: bool = True) -> None:
        self.address, self.patience_s, self.wait = line.address, patience_s, wait
        self._channel, self._methods = line, line.methods
        self._buffer: OwnedSharedBuffer | None = None
        self._shares = share and isinstance(line.address, Address) and bool(line.address.path)

    def push_pull(self, worker: str, push: Push | None, pull: bool) -> Callable[[], PushPullResult]:
        request = MeetRequest(protocol=PROTOCOL, worker=worker, pull=pull)
        if push is not None:
            half = push.gradient.dtype == torch.bfloat16
            request.sequence, request.epoch, request.version = push.sequence, push.epoch, push.version
            request.norm, request.numbers = push.norm, BFLOAT16 if half else FLOAT32
            request.buffers = _packed(push.buffers)
        board = self._buffer_for(push)
        if board is not None:
            request.board.CopyFrom(board.ticket)
            if push is not None:
                board.gradient(push.gradient.dtype).copy_(push.gradient)
        elif push is not None:
            request.gradient = to_bytes(push.gradient)

        def without_board() -> bytes:
            nonlocal board
            if board is not None:
                self._drop_buffer()
                board = None
                request.ClearField("board")
                if push is not None:
                    request.gradient = to_bytes(push.gradient)
            return request.SerializeToString()

        finish = self._call("Meet", request.SerializeToString(), without_board)

        def met() -> PushPullResult:
            reply = MeetReply.FromString(finish())
            answer = None if push is None else PushResult(WORDS[reply.verdict], reply.version, reply.staleness)
            shown = None
            if pull:
                weights = to_tensor(reply.weights, torch.float32) if board is None else board.weights
                shown = WeightSnapshot(reply.epoch, reply.version, weights, _unpacked(reply.buffers))
            if push is not None and shown is not None and shown.weights.shape != push.gradient.shape:
                raise ProcessFault(f"{self.address} has {len(shown.weights)} weights, not {len(push.gradient)}")
            return answer, shown

        return met

    def status(self, timeout_s: float = 1.0) -> LookReply | None:
        """How the shard is; None if it does not answer."""
        try:
            data = self._methods["Look"](b"", timeout=timeout_s)
        except grpc.RpcError:
            return None
        return LookReply.FromString(data)

    def copy(self) -> dict[str, Any]:
        return unpack_shard(State.FromString(self._call("Copy", CopyRequest().SerializeToString())()))

    def shut_down(self) -> None:
        """Nobody will ask again. Who does not hear it is told by others."""
        with suppress(grpc.RpcError):
            self._methods["Dismiss"](b"", timeout=1.0)

    def load(self, state: Mapping[str, Any]) -> None:
        self._call("Load", pack_shard(state).SerializeToString())()

    def close(self) -> None:
        self._drop_buffer()
        self._channel.close()

    def _buffer_for(self, push: Push | None) -> OwnedSharedBuffer | None:
        if push is not None and self._buffer is not None and self._buffer.numbers != len(push.gradient):
            self._drop_buffer()
        if push is not None and self._buffer is None and self._shares and len(push.gradient):
            try:
                self._buffer = OwnedSharedBuffer(len(push.gradient), push.gradient.is_cuda)
            except OSError as error:
                self._disable_sharing(str(error))
        return self._buffer

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None

    def _disable_sharing(self, why: str) -> None:
        self._shares = False
        log.info("gradients and weights are sent to %s, and not shared with it: %s", self.address, why)

    def _call(self, name: str, request: bytes, again: Callable[[], bytes] | None = None) -> Callable[[], bytes]:
        """Begin a call; what is returned waits for its answer. What is asked `again` may be worded otherwise."""
        def dialled(data: bytes) -> Any:
            return self._methods[name].future(data, timeout=CALL_S + len(data) / SLOWEST_BYTES_PER_S)

        begun = dialled(request)

        def finish() -> bytes:
            since, call = time.monotonic(), begun
            while True:
                try:
                    data: bytes = call.result(timeout=GLANCE_S)
                    return data
                except grpc.FutureTimeoutError:
                    self.wait(0.0)
                    continue
                except grpc.RpcError as error:
                    self._missed(error, time.monotonic() - since)
                self.wait(RETRY_S * random.uniform(0.5, 1.0))
                call = dialled(again() if again else request)

        return finish

    def _missed(self, error: grpc.RpcError, waited_s: float) -> None:
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            raise ProcessFault(error.details()) from None
        if error.code() == grpc.StatusCode.NOT_FOUND and self._shares:
            self._disable_sharing(error.details())
            return
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise unknown_token(self.address) from None
        if (fatal := fatal_error(error, self.address)) is not None:
            raise fatal from None
        if waited_s > self.patience_s:
            why = summarize_error(error)
            raise ProcessFault(f"the shard at {self.address} has not answered for {waited_s:.0f} s ({why})") from None
