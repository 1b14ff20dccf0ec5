"""gRPC server of the learner process. RPC threads only enqueue messages, or reply from immutable published state."""

from __future__ import annotations

import logging
import platform
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message import DecodeError, Message

import qfleet
from qfleet.core.errors import UserError
from qfleet.transport.address import Address, socket_address
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.fleet_pb2 import (
    STOP,
    TAKEN,
    WAIT,
    ExchangeReply,
    ExchangeRequest,
    FetchReply,
    FetchRequest,
    HelloRequest,
    Member,
    ProveReply,
    PulseReply,
    PulseRequest,
    Welcome,
)
from qfleet.transport.grpc_channel import PROTOCOL, PROVE, SERVICE
from qfleet.transport.inbox import Inbox
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import ACTOR, ROLES, FleetFull, Registry
from qfleet.transport.security import PROOF, Keyring, may_claim, server_credentials

log = logging.getLogger(__name__)

WORKERS = 16
MAX_CALLS = 256
"""Concurrent calls; further ones are rejected and retried by the client."""

OTHER_CONNECTIONS = 64
"""Connections beyond those of members: for monitoring, and for clients that are about to be rejected."""

OPTIONS = (
    ("grpc.so_reuseport", 0),  # two fleets at one port would share its connections
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server_handshake_timeout_ms", 10_000),  # for connections that send nothing
    ("grpc.max_connection_idle_ms", 20_000),  # for connections without calls: a member makes one every second
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


_NAME = re.compile(r"[A-Za-z0-9._-]{1,150}(/[0-9]{1,6})?")
_SESSION = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"[!-~]{0,253}")


class CallRejected(Exception):
    """A call that is answered with an error status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


Redirect = Callable[[str], int | None]
"""Port of the learner that a joining member of this name belongs to: 0 = this one, None = it is not known yet."""


class FleetService:
    """Implementation of the RPC methods; runs in RPC threads. `redirect` divides joining members among learners."""

    def __init__(self, published: PublishedState, registry: Registry, inbox: Inbox, max_message_bytes: int,
                 redirect: Redirect = lambda name: 0) -> None:
        self.published, self.registry, self.inbox = published, registry, inbox
        self.max_message_bytes, self.redirect = max_message_bytes, redirect

    def hello(self, request: HelloRequest, own: bool = True) -> bytes:
        """Register a process. `own`: the run started it, it did not join."""
        check_peer(request)
        if not own:
            check_joiner(request)
            port = 0 if request.again else self.redirect(request.name)
            if port is None:
                raise CallRejected(grpc.StatusCode.UNAVAILABLE, "the learner of this actor is starting")
            if port:
                return Welcome(redirect_port=port).SerializeToString()
        try:
            index, incarnation = self.registry.hello(request.name, request.role, request.host, request.pid,
                                                     request.session, own)
        except FleetFull as error:
            raise CallRejected(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        published, status = self.published, self.published.status
        return Welcome(
            index=index, incarnation=incarnation, epoch=published.epoch, config_yaml=published.config_yaml,
            spec_json=published.spec_json, actors=published.actors, steps=status.steps, updates=status.updates,
            version=published.weights.version, max_message_bytes=self.max_message_bytes,
            elsewhere=status.remote_steps(index), memory=self.registry.member_state(index)).SerializeToString()

    def exchange(self, request: ExchangeRequest) -> bytes:
        if request.epoch != self.published.epoch:
            raise CallRejected(grpc.StatusCode.ABORTED, "the learner was restarted: send hello again")
        known = self.registry.owns_session(request.index, request.incarnation, request.session)
        session_status = (
            self.registry.record_heartbeat(request.index, request.incarnation, request.total_steps, request.version)
            if known
            else "unknown"
        )
        if session_status == "unknown":
            raise CallRejected(grpc.StatusCode.ABORTED, "this member is no longer registered: send hello again")
        if session_status == "superseded":
            raise CallRejected(grpc.StatusCode.ALREADY_EXISTS,
                               "a newer process has replaced this one, which has to exit")
        verdict, status = self._verdict(request), self.published.status
        if request.leaving:
            self.registry.deregister(request.index, request.incarnation)
        return ExchangeReply(verdict=verdict, version=self.published.weights.version, steps=status.steps,
                             updates=status.updates, wanted=status.wanted_version,
                             elsewhere=status.remote_steps(request.index), save=status.save,
                             saved=status.saved.get(request.index, 0)).SerializeToString()

    def _verdict(self, request: ExchangeRequest) -> Any:
        status = self.published.status
        if status.stopped:
            return STOP
        if status.final and request.index >= 0:
            return WAIT  # training is over: actors pause, which leaves their cores to the final evaluation
        joined = self.registry.joined(request.index, request.incarnation)
        accepted = self.inbox.offer(request, joined) if request.sequence else self.inbox.room(request.index, joined)
        return TAKEN if accepted else WAIT

    def fetch(self, request: FetchRequest) -> bytes:
        weights = self.published.weights
        if weights.version <= request.newer_than:
            return FetchReply(version=weights.version).SerializeToString()
        reply = weights.reply()
        if len(reply) > self.max_message_bytes:
            raise CallRejected(grpc.StatusCode.FAILED_PRECONDITION,
                               f"the weights take {len(reply) / 2**20:.0f} MB, above fleet.max_message_mb="
                               f"{self.max_message_bytes >> 20}: raise it")
        return reply

    def pulse(self, request: PulseRequest) -> bytes:
        now, status = time.monotonic(), self.published.status
        members = [Member(name=m.name, role=m.role, host=m.host, pid=m.pid, index=m.index, incarnation=m.incarnation,
                          silent_s=now - m.heard, steps=m.steps, version=m.version, restarts=m.incarnation - 1)
                   for m in self.registry.members()]
        return PulseReply(steps=status.steps, updates=status.updates, version=self.published.weights.version,
                          phase=status.phase, idle_s=now - status.updated_at, members=members,
                          epoch=self.published.epoch).SerializeToString()


def check_peer(request: HelloRequest) -> None:
    """Reject a process with an incompatible version, naming both versions and the remedy."""
    own_version, peer_version = f"qfleet {qfleet.__version__}", f"qfleet {request.version}"
    if request.protocol != PROTOCOL:
        raise CallRejected(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{request.name} speaks protocol {request.protocol} ({peer_version}), this fleet protocol {PROTOCOL} "
            f"({own_version}): install the same version of qfleet on both hosts",
        )
    if request.version != qfleet.__version__:
        raise CallRejected(grpc.StatusCode.FAILED_PRECONDITION,
                           f"{request.name} runs {peer_version}, this fleet {own_version}: install the same version "
                           "on both hosts")
    given = {"name": (_NAME, request.name), "session": (_SESSION, request.session), "host": (_HOST, request.host)}
    if wrong := [what for what, (pattern, text) in given.items() if not pattern.fullmatch(text)]:
        raise CallRejected(grpc.StatusCode.INVALID_ARGUMENT, f"a valid {' and '.join(wrong)} is needed")
    if request.role not in ROLES:
        raise CallRejected(grpc.StatusCode.INVALID_ARGUMENT, f"a role of {', '.join(ROLES)} is needed")
    for what, theirs, here in (("torch", request.torch, torch.__version__),
                             ("Python", request.python, platform.python_version())):
        # The message format does not depend on these versions, so a difference is logged and accepted.
        if theirs.split("+")[0] != here.split("+")[0]:
            log.info("%s on %s runs %s %s, the learner runs %s", request.name, request.host, what, theirs, here)


def check_joiner(request: HelloRequest) -> None:
    """Reject a joining process that is not an actor, or uses a name that is not its own."""
    if request.role != ACTOR:
        raise CallRejected(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"only processes that the run itself starts can be its {request.role}: members that join are actors")
    if not may_claim(request.name, request.claim):
        raise CallRejected(grpc.StatusCode.FAILED_PRECONDITION,
                           f"the name {request.name} is not valid for this process; `qfleet join` generates one")


class AuthInterceptor(grpc.ServerInterceptor):
    """Rejects calls without valid credentials before their message is read, so that they occupy no thread.

    The one exception is the call by which the server proves that it knows the token; its message is never read.
    """

    def __init__(self, keys: Keyring, prove: str | None = None) -> None:
        self._keys, self._prove = keys, prove
        # The handler of a streaming call runs at once, not when the message has arrived, which may be never.
        self._denied = grpc.stream_unary_rpc_method_handler(_deny)
        self._proved = grpc.stream_unary_rpc_method_handler(self._answer)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        if details.method == self._prove:
            return self._proved
        return (
            continuation(details) if self._keys.token_index(details.invocation_metadata) is not None else self._denied
        )

    def _answer(self, messages: Any, context: grpc.ServicerContext) -> bytes:
        proofs = self._keys.proofs(context.invocation_metadata())
        return ProveReply(challenge=self._keys.challenge, proofs=proofs).SerializeToString()


def _deny(messages: Any, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "credentials are missing or wrong")
    return b""


def rpc_handler(kind: type[Message], answer: Callable[[Any], bytes]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(lambda data, context: _served(kind, answer, data, context))


def hello_handler(service: FleetService, keys: Keyring) -> grpc.RpcMethodHandler:
    """Handler of Hello: the reply depends on the token that the caller knows, and is signed with it."""

    def serve(data: bytes, context: grpc.ServicerContext) -> bytes:
        metadata = context.invocation_metadata()
        own = keys.token_index(metadata) == 0
        reply = _served(HelloRequest, lambda request: service.hello(request, own), data, context)
        context.set_trailing_metadata(((PROOF, keys.sign_reply(metadata, data, reply)),))
        return reply

    return grpc.unary_unary_rpc_method_handler(serve)


def _served(kind: type[Message], answer: Callable[[Any], bytes], data: bytes, context: grpc.ServicerContext) -> bytes:
    """Parse the request and reply. Parsing here avoids gRPC's logged traceback for every malformed message."""
    try:
        return answer(kind.FromString(data))
    except DecodeError:
        refused = CallRejected(grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a valid {kind.DESCRIPTOR.name}")
    except CallRejected as error:
        refused = error
    except Exception as error:
        log.exception("an RPC failed")
        refused = CallRejected(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
    context.abort(refused.code, refused.text)
    return b""


def connection_limit(most: int) -> int:
    """Most connections of a port: `most`, but never more than half of this process's file descriptors.

    The soft limit is raised to the hard one. The other half is for files, so that checkpoints can always be written.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # "unlimited" may be more than the system grants
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // 2))


def make_server(
    pool: ThreadPoolExecutor, interceptor: AuthInterceptor, max_message_bytes: int, connections: int, service: str,
    methods: Mapping[str, grpc.RpcMethodHandler]) -> grpc.Server:
    """gRPC server of one service, with limits that protect its process."""
    limits = (("grpc.max_receive_message_length", max_message_bytes),
              ("grpc.max_send_message_length", max_message_bytes),
              ("grpc.max_allowed_incoming_connections", connection_limit(connections)))
    server = grpc.server(pool, interceptors=(interceptor,), options=OPTIONS + limits, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    return server


class FleetServer:
    """Listens on a unix socket and, if configured, on a TCP port. `port` is the bound port.

    The first token is that of the run's own processes, further ones are for members that join.
    """

    def __init__(self, published: PublishedState, registry: Registry, inbox: Inbox, cfg: FleetConfig, socket: Path,
                 tokens: Sequence[str], redirect: Redirect = lambda name: 0) -> None:
        keys = Keyring(tokens)
        service = FleetService(published, registry, inbox, cfg.max_message_bytes, redirect)
        self._socket, self.port = socket, None if cfg.address is None else cfg.address.port
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="wire")
        self._server = make_server(
            self._pool, AuthInterceptor(keys, f"/{SERVICE}/{PROVE}"), cfg.max_message_bytes,
            cfg.max_members + OTHER_CONNECTIONS, SERVICE, {
                "Hello": hello_handler(service, keys), "Exchange": rpc_handler(ExchangeRequest, service.exchange),
                "Fetch": rpc_handler(FetchRequest, service.fetch), "Pulse": rpc_handler(PulseRequest, service.pulse)})
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
            raise UserError(f"the socket {address} cannot be opened: check that its folder exists and is writable")
        raise UserError(f"cannot listen at {address}: the port is in use, or the address does not belong to this "
                        "machine; choose another with fleet.listen")

    def close(self, grace_s: float) -> None:
        """Stop: no new calls, `grace_s` seconds for pending ones. Removes the socket."""
        self._server.stop(grace_s).wait(grace_s + 5)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.unlink(missing_ok=True)
