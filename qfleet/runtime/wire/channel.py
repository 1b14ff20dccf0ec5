"""The calls of the wire, from the side that dials: methods, deadlines, and what a failure means."""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from qfleet.runtime.wire.address import Address
from qfleet.runtime.wire.fleet_pb2 import ExchangeReply, FetchReply, FetchRequest, HelloRequest, PulseReply, Welcome
from qfleet.runtime.wire.security import bearer
from qfleet.types import UserError

PROTOCOL = 2
"""Raised whenever a message changes its meaning; both sides must say the same."""

SERVICE = "qfleet.wire.v1.Fleet"
CALL_S = 10.0
FETCH_S = 120.0
SLOWEST_BYTES_PER_S = 100_000
MOST_BYTES = 1 << 30

OPTIONS = (
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.enable_http_proxy", 0),  # a fleet's hosts are neighbours
    ("grpc.use_local_subchannel_pool", 1),
    # A line that went dead without a word is given up after 15 s and dialled anew every 2 s. TCP alone would double
    # its pauses while a partition lasts, and notice the end of it as late again.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_TLS_TROUBLE = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate was not signed by the authority given: check the tls_ca file",
    "is not in peer certificate": "its certificate was made for another host name: dial that name, or make a "
                                  "certificate for this one",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: leave the tls_ca file out, or start the fleet with fleet.tls_cert",
}


class Carrier(Protocol):
    """Whoever brings messages to a fleet. What cannot be delivered, or is refused, is a `grpc.RpcError`."""

    @property
    def address(self) -> object: ...
    def hello(self, request: HelloRequest) -> Welcome: ...
    def exchange(self, request: bytes, timeout_s: float = CALL_S) -> ExchangeReply: ...
    def fetch(self, newer_than: int) -> Any: ...
    def close(self) -> None: ...


class Caller:
    """One channel to a fleet. Every call carries the token; failures are `grpc.RpcError`."""

    def __init__(self, address: Address, token: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.address = address
        self._metadata = bearer(token)
        target = str(address)
        self._channel = (grpc.insecure_channel(target, OPTIONS) if credentials is None
                         else grpc.secure_channel(target, credentials, OPTIONS))
        self._hello = self._method("Hello")
        self._exchange = self._method("Exchange")
        self._fetch = self._method("Fetch")
        self._pulse = self._method("Pulse")

    def _method(self, name: str) -> Any:
        """Bytes in, bytes out: a message that is sent again is not serialised again."""
        return self._channel.unary_unary(f"/{SERVICE}/{name}")

    def hello(self, request: HelloRequest) -> Welcome:
        return Welcome.FromString(self._hello(request.SerializeToString(), timeout=CALL_S, metadata=self._metadata))

    def exchange(self, request: bytes, timeout_s: float = CALL_S) -> ExchangeReply:
        """A large message over a slow line gets the time that it needs."""
        timeout_s += len(request) / SLOWEST_BYTES_PER_S
        return ExchangeReply.FromString(self._exchange(request, timeout=timeout_s, metadata=self._metadata))

    def fetch(self, newer_than: int) -> Any:
        """A future of the bytes of a FetchReply: the caller goes on meanwhile."""
        request = FetchRequest(newer_than=newer_than).SerializeToString()
        return self._fetch.future(request, timeout=FETCH_S, metadata=self._metadata)

    def pulse(self, timeout_s: float = CALL_S) -> PulseReply:
        """How the fleet is, for whoever looks on."""
        return PulseReply.FromString(self._pulse(b"", timeout=timeout_s, metadata=self._metadata))

    def close(self) -> None:
        self._channel.close()


def silence(address: Address, token: str, credentials: grpc.ChannelCredentials | None = None) -> str | None:
    """Why no fleet answers there, None if one does that knows this token; UserError if somebody does who never will."""
    caller = Caller(address, token, credentials)
    try:
        caller.pulse()
    except grpc.RpcError as error:
        if (fatal := refusal(error, address)) is not None:
            raise fatal from None
        return briefly(error)
    finally:
        caller.close()
    return None


def read_fetched(data: bytes) -> tuple[int, bytes] | None:
    """Version and safetensors bytes of a fetch; None if there was nothing newer."""
    reply = FetchReply.FromString(data)
    return (reply.version, reply.weights) if reply.weights else None


def refusal(error: grpc.RpcError, address: object) -> UserError | None:
    """What a failed call says if asking again is no use; None for whatever may pass."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return UserError(details)
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return UserError(f"the fleet at {address} does not know this token: give the token file of that fleet")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return UserError(f"the fleet at {address} refused a message as too large ({details}): raise "
                         "fleet.max_message_mb there, or lower replay.chunk_steps")
    if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT):
        return UserError(f"whoever listens at {address} is no fleet of this version of qfleet ({details})")
    for sign, reason in _TLS_TROUBLE.items():
        if sign in details:
            return UserError(f"no secure connection to {address}: {reason}")
    return None


def briefly(error: grpc.RpcError) -> str:
    """A failed call in one line: gRPC's own texts are long."""
    return f"{error.code().name}: {(error.details() or 'no details').splitlines()[0][:200]}"
