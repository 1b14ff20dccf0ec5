"""Where a process of a run reaches its learner or coordinator, and the credentials that it needs there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from qfleet.accel.threads import usable_cores
from qfleet.core.errors import UserError
from qfleet.process.heartbeat import Heartbeat, HeartbeatSender
from qfleet.transport.address import Address, parse_address
from qfleet.transport.client import FleetConnection
from qfleet.transport.grpc_channel import GrpcChannel
from qfleet.transport.security import ChannelCredentials, channel_credentials, read_token


class Endpoint(Protocol):
    """Address and credentials of the learner, for gRPC or Ray. `heartbeat` connects to the process's supervisor."""

    @property
    def address(self) -> str: ...
    @property
    def patience_s(self) -> float: ...
    @property
    def trusted(self) -> bool: ...
    @property
    def cores(self) -> int: ...
    def heartbeat(self) -> Heartbeat | None: ...
    def connect(self, role: str) -> FleetConnection: ...
    def at_port(self, port: int) -> Endpoint: ...


@dataclass(frozen=True)
class GrpcEndpoint:
    """Endpoint reached by gRPC: address, member name, token file and TLS files."""

    address: str
    name: str
    token_file: str
    patience_s: float = 600.0
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    siblings: int = 1  # actors that share this host's cores
    trust: bool = False
    claim_file: str | None = None  # of a joining member: the secret that its name is derived from

    def credentials(self) -> ChannelCredentials | None:
        if self.tls_ca is not None:
            return channel_credentials(self.tls_ca, self.tls_cert, self.tls_key)
        if self.tls_cert is not None or self.tls_key is not None:
            raise UserError("--tls-cert and --tls-key without --tls-ca: the connection would not be secure; give the "
                            "CA that signed the fleet's certificate, or leave them out")
        return None

    @property
    def trusted(self) -> bool:
        """True if the received config may name modules to import.

        The server has always proved that it knows the token before its config is read. On this host that is enough;
        over the network any member that knows the token could answer in the learner's place, unless TLS authenticates
        it.
        """
        address = parse_address(self.address)
        return self.trust or self.tls_ca is not None or bool(address.path) or address.is_loopback

    @property
    def cores(self) -> int:
        """CPU cores of this host for each of its actors."""
        return max(1, usable_cores() // self.siblings)

    def heartbeat(self) -> Heartbeat | None:
        return HeartbeatSender.from_env()

    def connect(self, role: str) -> FleetConnection:
        channel = GrpcChannel(parse_address(self.address), read_token(self.token_file), self.credentials())
        claim = "" if self.claim_file is None else read_token(self.claim_file)
        return FleetConnection(channel, self.name, role, self.patience_s, claim)

    def at_port(self, port: int) -> GrpcEndpoint:
        """Endpoint of another learner of the run on the same host."""
        return replace(self, address=str(Address(parse_address(self.address).host, port)))

    def to_argv(self) -> list[str]:
        """Command-line arguments that describe this endpoint."""
        given = {"--token-file": self.token_file, "--patience": f"{self.patience_s:g}", "--tls-ca": self.tls_ca,
                 "--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--siblings": str(self.siblings),
                 "--claim-file": self.claim_file}
        args = [self.address, self.name, *(arg for key, value in given.items() if value for arg in (key, value))]
        return [*args, "--trust"] if self.trust else args
