"""RPC service of a parameter-server shard.

Gradients and weights are plain arrays whose length must match. They are sent, or, within a host, shared through a
`SharedBuffer`. A shard's whole state is sent as safetensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from google.protobuf.message import Message

from qfleet.core.agent import ROW_MOMENTS
from qfleet.sync.ps_shard import Push, PushRejected, Shard, divided_entries, is_shard_state
from qfleet.transport.address import socket_address
from qfleet.transport.fleet_server import WORKERS, AuthInterceptor, CallRejected, make_server, rpc_handler
from qfleet.transport.grpc_channel import (
    PROTOCOL,
)
from qfleet.transport.security import Keyring
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
from qfleet.transport.shared_memory import SharedBuffer, SharedBufferCache
from qfleet.transport.weight_codec import pack_weights, unpack_weights

log = logging.getLogger(__name__)

SERVICE = "qfleet.shard.v1.Shard"
METHODS = ("Meet", "Look", "Copy", "Load", "Dismiss")
CHALLENGE = ""
"""Fixed challenge: shards are called through sockets in a private folder, so the server proves nothing."""

NEW_ROWS = "new_rows"
"""Name of `Push.rows` in a message."""

MAX_CONNECTIONS = 1024
VERDICTS = {"applied": APPLIED, "stale": STALE, "repeated": REPEATED, "anew": ANEW}
VERDICT_NAMES: dict[Any, Any] = {number: name for name, number in VERDICTS.items()}


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Little-endian bytes of a float32 or bfloat16 tensor."""
    host = tensor.detach().cpu().contiguous()
    return (host.view(torch.int16) if host.dtype == torch.bfloat16 else host).numpy().tobytes()


def to_tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not a multiple of {dtype.itemsize} bytes")
    kind = "<i2" if dtype == torch.bfloat16 else "<f4"
    return torch.from_numpy(np.frombuffer(data, kind).copy()).view(dtype)


def pack_shard(state: Mapping[str, Any]) -> State:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return State(version=state["version"], tensors=pack_weights(tensors), staleness=state["staleness"],
                 stale=state["stale"], refused=state["refused"], sequences=state["sequences"],
                 buffers=pack_buffers(state["buffers"]))


def pack_buffers(buffers: Mapping[str, torch.Tensor]) -> bytes:
    return pack_weights(buffers) if buffers else b""


def pack_pushed_buffers(push: Push) -> bytes:
    """The buffers of a push; its moments of new rows are one of them."""
    return pack_buffers({**push.buffers, **({} if push.rows is None else {NEW_ROWS: push.rows})})


def unpack_buffers(data: bytes) -> dict[str, torch.Tensor]:
    return unpack_weights(data) if data else {}


def unpack_shard(message: State) -> dict[str, Any]:
    """State of a shard; ValueError unless it is complete, finite and of consistent length."""
    tensors = unpack_weights(message.tensors)
    vectors = divided_entries(tensors)
    if not is_shard_state(vectors):
        raise ValueError(f"a shard's state has {sorted(tensors)}")
    if "steps" not in tensors or tensors["steps"].shape != ():
        raise ValueError("a shard's state has no step count")
    if "count" in tensors and (tensors["count"].shape, tensors["count"].dtype) != ((), torch.int64):
        raise ValueError("the count of a shard is not an integer")
    for name, value in vectors.items():
        floats = value.dtype in (torch.float32, torch.float64)
        if value.shape != vectors["weights"].shape or value.ndim != 1 or not floats:
            raise ValueError(f"{name} of a shard is {value.dtype} {tuple(value.shape)}")
        if not torch.isfinite(value).all():
            raise ValueError(f"{name} of a shard: not finite")
    return {**tensors, "version": message.version, "staleness": dict(message.staleness), "stale": message.stale,
            "refused": message.refused, "sequences": dict(message.sequences),
            "buffers": unpack_buffers(message.buffers)}


class ShardService:
    """RPC methods of a shard, which `build` makes from a state. Calls are rejected until a state was loaded.

    `loaded` is called with every loaded state. `leaving`: the shard was shut down; `called_at`: time of the last call.
    """

    def __init__(self, build: Callable[[Mapping[str, Any]], Shard], loaded: Callable[[State], object]) -> None:
        self.build, self.loaded, self.shared_buffers = build, loaded, SharedBufferCache()
        self.shard: Shard | None = None
        self.leaving, self.called_at = False, time.monotonic()
        self.methods: dict[str, tuple[type[Message], Callable[[Any], bytes]]] = {
            "Meet": (MeetRequest, self.push_pull), "Look": (LookRequest, self.status), "Copy": (CopyRequest, self.copy),
            "Load": (State, self.load), "Dismiss": (DismissRequest, self.shut_down)}

    def push_pull(self, request: MeetRequest) -> bytes:
        shard = self._require_shard()
        if request.protocol != PROTOCOL:
            raise CallRejected(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{request.worker} speaks protocol {request.protocol}, this shard {PROTOCOL}: install the "
                "same version of qfleet",
            )
        answer, buffer = None, self._shared_buffer(request, shard)
        if request.sequence:
            dtype = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}.get(request.numbers)
            try:
                if dtype is None:
                    raise ValueError(f"dtype {request.numbers} is unknown")
                gradient = to_tensor(request.gradient, dtype) if buffer is None else buffer.gradient(dtype)
                buffers = unpack_buffers(request.buffers)
                rows = buffers.pop(NEW_ROWS, None)
                answer = shard.push(Push(request.worker, request.sequence, request.epoch, request.version,
                                         request.norm, gradient, buffers, rows))
            except ValueError as error:
                prefix = "" if isinstance(error, PushRejected) else f"a gradient of {request.worker}: "
                raise CallRejected(grpc.StatusCode.INVALID_ARGUMENT, f"{prefix}{error}") from None
        verdict, staleness = (NONE, 0) if answer is None else (VERDICTS[answer.verdict], answer.staleness)
        if not request.pull:
            version = shard.version if answer is None else answer.version
            return MeetReply(verdict=verdict, epoch=shard.epoch, version=version,
                             staleness=staleness).SerializeToString()
        snapshot = shard.pull(request.worker)
        weights = b""
        if buffer is None:
            weights = to_bytes(snapshot.weights)
        else:
            buffer.weights.copy_(snapshot.weights)
        wanted = ROW_MOMENTS if request.sequence else tuple(snapshot.buffers)
        statistics = pack_buffers({name: snapshot.buffers[name] for name in wanted if name in snapshot.buffers})
        return MeetReply(verdict=verdict, epoch=snapshot.epoch, version=snapshot.version, staleness=staleness,
                         weights=weights, buffers=statistics).SerializeToString()

    def _shared_buffer(self, request: MeetRequest, shard: Shard) -> SharedBuffer | None:
        if not request.HasField("board"):
            return None
        try:
            return self.shared_buffers.find(request.board, len(shard.weights))
        except (OSError, ValueError) as error:
            text = f"{request.worker} has no shared buffer here: {error}"
            raise CallRejected(grpc.StatusCode.NOT_FOUND, text) from None

    def status(self, request: LookRequest) -> bytes:
        shard = self._require_shard()
        return LookReply(version=shard.version, staleness=dict(shard.staleness), stale=shard.stale,
                         refused=shard.refused).SerializeToString()

    def copy(self, request: CopyRequest) -> bytes:
        return pack_shard(self._require_shard().state_dict()).SerializeToString()

    def shut_down(self, request: DismissRequest) -> bytes:
        self.leaving = True
        return DismissReply().SerializeToString()

    def restore(self, state: State) -> None:
        """Continue from a snapshot."""
        self.shard = self.build(unpack_shard(state))

    def load(self, request: State) -> bytes:
        try:
            shard = self.build(unpack_shard(request))
        except ValueError as error:
            raise CallRejected(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        self.loaded(request)
        self.shard = shard
        return LoadReply(epoch=shard.epoch).SerializeToString()

    def _require_shard(self) -> Shard:
        self.called_at = time.monotonic()
        if self.shard is None:
            raise CallRejected(grpc.StatusCode.UNAVAILABLE, "this shard has not received its weights yet")
        return self.shard


class ShardServer:
    """gRPC server of a shard, on a unix socket."""

    def __init__(self, service: ShardService, socket: Path, token: str, max_message_bytes: int) -> None:
        self._socket = socket
        # By default each thread would use as many torch threads as there are cores.
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="shard", initializer=torch.set_num_threads,
                                        initargs=(1,))
        self._server = make_server(
            self._pool, AuthInterceptor(Keyring([token], CHALLENGE)), max_message_bytes, MAX_CONNECTIONS, SERVICE,
            {name: rpc_handler(kind, answer) for name, (kind, answer) in service.methods.items()})
        socket.unlink(missing_ok=True)  # left by a process that was killed
        self._server.add_insecure_port(str(socket_address(socket)))

    def __enter__(self) -> ShardServer:
        self._server.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._server.stop(0.5).wait(5)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.unlink(missing_ok=True)
