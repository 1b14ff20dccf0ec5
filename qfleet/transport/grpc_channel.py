"""gRPC client channel: RPC methods, deadlines, server authentication, and classification of errors."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import grpc
from google.protobuf.message import DecodeError

from qfleet.core.errors import UserError
from qfleet.transport.address import Address
from qfleet.transport.fleet_pb2 import (
    ExchangeReply,
    FetchReply,
    FetchRequest,
    HelloRequest,
    ProveReply,
    PulseReply,
    Welcome,
)
from qfleet.transport.security import (
    NONCE,
    PROOF,
    client_metadata,
    constant_time_equal,
    derive_key,
    fresh_nonce,
    metadata_value,
    sign,
)

PROTOCOL = 3
"""Protocol version, raised whenever the meaning of a message changes; both sides must have the same."""

SERVICE = "qfleet.wire.v1.Fleet"
PROVE = "Prove"
CALL_S = 10.0
FETCH_S = 120.0
SLOWEST_BYTES_PER_S = 100_000
MAX_BYTES = 1 << 30

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
    ("grpc.enable_http_proxy", 0),  # hosts of a fleet share a network
    ("grpc.use_local_subchannel_pool", 1),
    # A silently broken connection is dropped after 15 s and retried every 2 s. TCP alone would double its pauses
    # during a partition, and notice the end of the partition equally late.
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
    "is not in peer certificate": "its certificate is for another host name: connect to that name, or make a "
                                  "certificate for this one",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: leave the tls_ca file out, or start the fleet with fleet.tls_cert",
}


class Channel(Protocol):
    """Transport to a learner, by gRPC or Ray. Failed or rejected calls raise `grpc.RpcError`."""

    @property
    def address(self) -> object: ...
    def hello(self, request: HelloRequest) -> Welcome: ...
    def exchange(self, request: bytes, timeout_s: float = CALL_S) -> ExchangeReply: ...
    def fetch(self, newer_than: int) -> Any: ...
    def close(self) -> None: ...


class ServerProof(NamedTuple):
    """Result of one authentication: both nonces, and the metadata for further calls."""

    nonce: str
    challenge: str
    metadata: tuple[tuple[str, str], ...]


class Credential:
    """Client side of the mutual authentication: the server proves first that it knows the token; see security.py."""

    def __init__(self, channel: grpc.Channel, token: str, address: Address) -> None:
        self.proof: ServerProof | None = None
        self._ask = channel.unary_unary(f"/{SERVICE}/{PROVE}")
        self._token, self._address = token, address

    def prove(self) -> ServerProof:
        """Request the proof; UserError if it is wrong. No secret has been sent by then."""
        nonce = fresh_nonce()
        try:
            reply = ProveReply.FromString(self._ask(b"", timeout=CALL_S, metadata=((NONCE, nonce),)))
        except DecodeError:
            raise self._not_a_fleet("its answer cannot be read") from None
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise self._not_a_fleet(error.details() or "no details") from None
            raise
        expected = sign(derive_key(self._token), "server", nonce, reply.challenge)
        if not any([constant_time_equal(proof, expected) for proof in reply.proofs]):
            raise unknown_token(self._address)
        self.proof = ServerProof(nonce, reply.challenge, client_metadata(self._token, nonce, reply.challenge))
        return self.proof

    def require_signed(self, proof: ServerProof, request: bytes, reply: bytes, call: Any) -> None:
        """UserError unless the reply was signed with the token, for this request."""
        signature = metadata_value(call.trailing_metadata() or (), PROOF)
        expected = sign(derive_key(self._token), "answer", proof.nonce, proof.challenge, request, reply)
        if not constant_time_equal(signature, expected):
            raise UserError(f"the answer of the fleet at {self._address} was changed in transit, or made by a process "
                            "that does not know this token: check what listens at that address")

    def _not_a_fleet(self, details: str) -> UserError:
        return UserError(f"{self._address} does not answer as a qfleet fleet of this version ({details})")


class GrpcChannel:
    """gRPC channel to a learner. Failures are `grpc.RpcError`; UserError if the server does not know the token."""

    def __init__(self, address: Address, token: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.address = address
        target = str(address)
        self._channel = (grpc.insecure_channel(target, OPTIONS) if credentials is None
                         else grpc.secure_channel(target, credentials, OPTIONS))
        self._credential = Credential(self._channel, token, address)
        self._hello = self._method("Hello")
        self._exchange = self._method("Exchange")
        self._fetch = self._method("Fetch")
        self._pulse = self._method("Pulse")

    def _method(self, name: str) -> Any:
        """RPC from bytes to bytes: a message that is resent is not serialised again."""
        return self._channel.unary_unary(f"/{SERVICE}/{name}")

    def _call(self, method: Any, request: bytes, timeout_s: float) -> tuple[bytes, Any, ServerProof]:
        """Reply, gRPC's call object, and the proof that was used. A restarted server has to prove again."""
        if (proof := self._credential.proof) is not None:
            try:
                return *method.with_call(request, timeout=timeout_s, metadata=proof.metadata), proof
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                    raise
        proof = self._credential.prove()
        return *method.with_call(request, timeout=timeout_s, metadata=proof.metadata), proof

    def hello(self, request: HelloRequest) -> Welcome:
        data = request.SerializeToString()
        reply, call, proof = self._call(self._hello, data, CALL_S)
        self._credential.require_signed(proof, data, reply, call)
        return Welcome.FromString(reply)

    def exchange(self, request: bytes, timeout_s: float = CALL_S) -> ExchangeReply:
        """Send one message. The deadline grows with its size, for slow connections."""
        timeout_s += len(request) / SLOWEST_BYTES_PER_S
        return ExchangeReply.FromString(self._call(self._exchange, request, timeout_s)[0])

    def fetch(self, newer_than: int) -> Any:
        """Future of the bytes of a FetchReply; does not block."""
        proof = self._credential.proof or self._credential.prove()  # renewed by the next other call
        request = FetchRequest(newer_than=newer_than).SerializeToString()
        return self._fetch.future(request, timeout=FETCH_S, metadata=proof.metadata)

    def pulse(self, timeout_s: float = CALL_S) -> PulseReply:
        """Status of the fleet, for monitoring."""
        return PulseReply.FromString(self._call(self._pulse, b"", timeout_s)[0])

    def close(self) -> None:
        self._channel.close()


def probe_error(address: Address, token: str, credentials: grpc.ChannelCredentials | None = None) -> str | None:
    """Reason that no fleet answers there, or None if one does. UserError if retrying cannot help."""
    channel = GrpcChannel(address, token, credentials)
    try:
        channel.pulse()
    except grpc.RpcError as error:
        if (fatal := fatal_error(error, address)) is not None:
            raise fatal from None
        return summarize_error(error)
    finally:
        channel.close()
    return None


def read_fetched(data: bytes) -> tuple[int, bytes] | None:
    """Version and safetensors bytes of a fetch; None if there was nothing newer."""
    reply = FetchReply.FromString(data)
    return (reply.version, reply.weights) if reply.weights else None


def fatal_error(error: grpc.RpcError, address: object) -> UserError | None:
    """UserError for a failed call if retrying cannot help; None if it may."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return UserError(details)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return UserError(f"the fleet at {address} refused a message as too large ({details}): raise "
                         "fleet.max_message_mb there, or lower replay.chunk_steps")
    if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT):
        return UserError(f"{address} does not answer as a qfleet fleet of this version ({details})")
    for words, reason in _TLS_TROUBLE.items():
        if words in details:
            return UserError(f"no secure connection to {address}: {reason}")
    return None


def unknown_token(address: object) -> UserError:
    return UserError(f"the fleet at {address} does not know this token: give the token file of that fleet")


def summarize_error(error: grpc.RpcError) -> str:
    """One-line summary of a failed call: gRPC's own texts are long."""
    return f"{error.code().name}: {(error.details() or 'no details').splitlines()[0][:200]}"
