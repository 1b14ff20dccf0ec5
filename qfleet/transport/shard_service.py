"""A shard of a parameter server over the wire: the service around it, and the shard as others see it.

Gradients and weights are plain numbers whose count must be right. They travel, or, within a host, lie on a `board` that
both sides see. A shard's whole state travels as safetensors.
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

from qfleet.sync.ps_shard import Push, PushRejected, Shard
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
"""Shards are called through sockets in a private folder, where nothing has to be proved: credentials never change."""

MAX_CONNECTIONS = 1024
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
                 buffers=pack_buffers(state["buffers"]))


def pack_buffers(buffers: Mapping[str, torch.Tensor]) -> bytes:
    return pack_weights(buffers) if buffers else b""


def unpack_buffers(data: bytes) -> dict[str, torch.Tensor]:
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
            "refused": message.refused, "sequences": dict(message.sequences),
            "buffers": unpack_buffers(message.buffers)}


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
                                         request.norm, gradient, unpack_buffers(request.buffers)))
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
            reply.buffers = b"" if request.sequence else pack_buffers(shown.buffers)
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










