"""The service that a cell offers its fleet. RPC threads only enqueue, or answer from facts that do not change."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message import DecodeError, Message

import qfleet
from qfleet.runtime.wire.address import Address, socket_address
from qfleet.runtime.wire.channel import PROTOCOL, SERVICE
from qfleet.runtime.wire.config import FleetConfig
from qfleet.runtime.wire.desk import Desk
from qfleet.runtime.wire.fleet_pb2 import (
    STOP,
    TAKEN,
    WAIT,
    ExchangeReply,
    ExchangeRequest,
    FetchReply,
    FetchRequest,
    HelloRequest,
    Member,
    PulseReply,
    PulseRequest,
    Welcome,
)
from qfleet.runtime.wire.inbox import Inbox
from qfleet.runtime.wire.registry import Registry
from qfleet.runtime.wire.security import knows, server_credentials
from qfleet.types import UserError

log = logging.getLogger(__name__)

WORKERS = 16
MOST_CALLS = 256
"""Calls under way at once; whoever comes on top of them is sent away and asks again."""

OPTIONS = (
    ("grpc.so_reuseport", 0),  # two fleets at one port would share its visitors
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server_handshake_timeout_ms", 10_000),  # for connections that say nothing
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class Refusal(Exception):
    """A call that is answered with a status instead of a reply."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Answers:
    """What each call is answered; runs in RPC threads."""

    def __init__(self, desk: Desk, registry: Registry, inbox: Inbox, max_message_bytes: int) -> None:
        self.desk, self.registry, self.inbox, self.max_message_bytes = desk, registry, inbox, max_message_bytes

    def hello(self, request: HelloRequest) -> bytes:
        check_peer(request)
        index, incarnation = self.registry.hello(request.name, request.role, request.host, request.pid,
                                                 request.session)
        desk, facts = self.desk, self.desk.facts
        return Welcome(
            index=index, incarnation=incarnation, epoch=desk.epoch, config_yaml=desk.config_yaml,
            spec_json=desk.spec_json, actors=desk.actors, steps=facts.steps, updates=facts.updates,
            version=desk.bundle.version, max_message_bytes=self.max_message_bytes,
            elsewhere=facts.elsewhere(index), memory=self.registry.memory(index)).SerializeToString()

    def exchange(self, request: ExchangeRequest) -> bytes:
        if request.epoch != self.desk.epoch:
            raise Refusal(grpc.StatusCode.ABORTED, "another learner greeted you: say hello again")
        standing = self.registry.heard(request.index, request.incarnation, request.total_steps, request.version)
        if standing == "unknown":
            raise Refusal(grpc.StatusCode.ABORTED, "your place is no longer yours: say hello again")
        if standing == "superseded":
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION,
                          "a newer process has taken the place of this one, which has to leave")
        # First the facts, then the version: whoever hears that it is final must hear the version of the final weights.
        verdict, facts = self._verdict(request), self.desk.facts
        if request.leaving:
            self.registry.left(request.index, request.incarnation)
        return ExchangeReply(verdict=verdict, version=self.desk.bundle.version, steps=facts.steps,
                             updates=facts.updates, final=facts.final, elsewhere=facts.elsewhere(request.index),
                             save=facts.save, saved=facts.saved.get(request.index, 0)).SerializeToString()

    def _verdict(self, request: ExchangeRequest) -> Any:
        facts = self.desk.facts
        if facts.stopped:
            return STOP
        if facts.final and request.index >= 0:
            return WAIT  # nothing is learnt any more: actors shall leave their cores to whoever judges the last weights
        took = self.inbox.offer(request) if request.sequence else self.inbox.room(request.index)
        return TAKEN if took else WAIT

    def fetch(self, request: FetchRequest) -> bytes:
        bundle = self.desk.bundle
        if bundle.version <= request.newer_than:
            return FetchReply(version=bundle.version).SerializeToString()
        reply = bundle.reply()
        if len(reply) > self.max_message_bytes:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION,
                          f"the weights take {len(reply) / 2**20:.0f} MB, above fleet.max_message_mb="
                          f"{self.max_message_bytes >> 20}: raise it")
        return reply

    def pulse(self, request: PulseRequest) -> bytes:
        now, facts = time.monotonic(), self.desk.facts
        members = [Member(name=m.name, role=m.role, host=m.host, pid=m.pid, index=m.index, incarnation=m.incarnation,
                          silent_s=now - m.heard, steps=m.steps, version=m.version, restarts=m.incarnation - 1)
                   for m in self.registry.members()]
        return PulseReply(steps=facts.steps, updates=facts.updates, version=self.desk.bundle.version,
                          phase=facts.phase, idle_s=now - facts.told_at, members=members,
                          epoch=self.desk.epoch).SerializeToString()


def check_peer(request: HelloRequest) -> None:
    """Refuse whoever would misunderstand us, naming both sides and the remedy."""
    mine, theirs = f"qfleet {qfleet.__version__}", f"qfleet {request.version}"
    if request.protocol != PROTOCOL:
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION,
                      f"{request.name} speaks protocol {request.protocol} ({theirs}), this fleet protocol {PROTOCOL} "
                      f"({mine}): install the same version of qfleet on both hosts")
    if request.version != qfleet.__version__:
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION,
                      f"{request.name} runs {theirs}, this fleet {mine}: install the same version on both hosts")
    if not request.name or not request.session or len(request.name) > 200 or len(request.session) > 64:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "a name and a session are needed")
    for what, told, here in (("torch", request.torch, torch.__version__),
                             ("Python", request.python, platform.python_version())):
        # Numbers on the wire mean the same in all of them, so a difference is worth a line and no refusal.
        if told.split("+")[0] != here.split("+")[0]:
            log.info("%s on %s runs %s %s, and %s is used here", request.name, request.host, what, told, here)


class Doorkeeper(grpc.ServerInterceptor):
    """Lets nobody in without a token. A call is turned away before its message is read: it holds up no thread."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tuple(tokens)
        # Of streaming calls the handler is run at once, and not when the message has come, which may be never.
        self._denied = grpc.stream_unary_rpc_method_handler(_deny)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        return continuation(details) if knows(self._tokens, details.invocation_metadata) else self._denied


def _deny(messages: Any, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
    return b""


def method(kind: type[Message], answer: Callable[[Any], bytes]) -> grpc.RpcMethodHandler:
    """Parses by itself: gRPC would log a traceback for every message that is none."""

    def serve(data: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return answer(kind.FromString(data))
        except DecodeError:
            refused = Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"these bytes are no {kind.DESCRIPTOR.name}")
        except Refusal as error:
            refused = error
        except Exception as error:
            log.exception("a call could not be answered")
            refused = Refusal(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        context.abort(refused.code, refused.text)
        return b""

    return grpc.unary_unary_rpc_method_handler(serve)


class Server:
    """Listens at a unix socket and, if the config says so, at a TCP port. `port` is the one that was bound."""

    def __init__(self, desk: Desk, registry: Registry, inbox: Inbox, cfg: FleetConfig, socket: Path,
                 tokens: Sequence[str]) -> None:
        if not tokens:
            raise ValueError("a server without tokens would let nobody in")
        answers = Answers(desk, registry, inbox, cfg.max_message_bytes)
        self._socket, self.port = socket, None if cfg.address is None else cfg.address.port
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="wire")
        limits = (("grpc.max_receive_message_length", cfg.max_message_bytes),
                  ("grpc.max_send_message_length", cfg.max_message_bytes))
        self._server = grpc.server(self._pool, interceptors=(Doorkeeper(tokens),), options=OPTIONS + limits,
                                   maximum_concurrent_rpcs=MOST_CALLS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {
            "Hello": method(HelloRequest, answers.hello), "Exchange": method(ExchangeRequest, answers.exchange),
            "Fetch": method(FetchRequest, answers.fetch), "Pulse": method(PulseRequest, answers.pulse)}),))
        try:
            self._bind(socket_address(socket), None)
            if cfg.address is not None:
                secure = cfg.tls_cert is not None and cfg.tls_key is not None
                tls = server_credentials(cfg.tls_cert or "", cfg.tls_key or "", cfg.tls_ca) if secure else None
                self.port = self._bind(cfg.address, tls)
        except BaseException:
            self.close(0)
            raise

    def start(self) -> None:
        self._server.start()

    def _bind(self, address: Address, tls: grpc.ServerCredentials | None) -> int:
        try:
            port: int = (self._server.add_insecure_port(str(address)) if tls is None
                         else self._server.add_secure_port(str(address), tls))
        except RuntimeError:
            port = 0
        if port:
            return port
        if address.path:
            raise UserError(f"the socket {address} cannot be opened: does its folder exist, and is it ours?")
        raise UserError(f"cannot listen at {address}: the port is in use, or the address is not one of this machine; "
                        "choose another with fleet.listen")

    def close(self, grace_s: float) -> None:
        """No new calls; those under way have `grace_s` seconds. Nothing is left behind."""
        self._server.stop(grace_s).wait(grace_s + 5)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.unlink(missing_ok=True)
