"""Config section `fleet`."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from qfleet.config import Config, Count, Positive, PositiveCount
from qfleet.core.errors import UserError
from qfleet.transport.address import Address, parse_address


class FleetConfig(Config):
    """The fleet section: network address, security and supervision of the processes of a run."""

    listen: str | None = Field(
        None, description="ADDR:PORT where actors on other hosts can join, for example 0.0.0.0:4440; null = this host "
                          "only")
    advertise: str | None = Field(
        None, description="HOST:PORT by which other hosts reach this one; null = host name and port of fleet.listen")
    token_file: str | None = Field(
        None, description="file with the secret token of the fleet, needed to join; readable by its owner only")
    tls_cert: str | None = Field(None, description="TLS certificate of the fleet, a PEM file; hosts then join over TLS")
    tls_key: str | None = Field(None, description="private key of fleet.tls_cert, a PEM file")
    tls_ca: str | None = Field(
        None, description="CA certificate, a PEM file; joining hosts must then present a certificate signed by it")
    local_actors: bool = Field(
        True, description="start actors on this host; false = only actors that join from other hosts")
    heartbeat_timeout_s: Positive = Field(
        30.0, description="restart a process that sends no heartbeat for this long, seconds")
    actor_restarts: Count = Field(
        5, description="restarts in a row of one actor or evaluator before the run fails; with sync=server also of a "
                       "learner or shard")
    learner_restarts: Count = Field(
        0, description="restarts of a learner that died, in total, each from the newest checkpoint; with sync=server "
                       "of the coordinator")
    reconnect_timeout_s: Positive = Field(
        600.0, description="seconds that an actor waits for a learner that does not answer before it exits")
    inbox_messages: PositiveCount = Field(
        4, description="messages of one actor queued at the learner; beyond that the actor waits")
    max_members: PositiveCount = Field(1024, description="maximum number of actors joined from other hosts at a time")
    max_message_mb: PositiveCount = Field(
        256, le=1024, description="largest message, megabytes; raise it if the network's weights, one message, do not "
                                  "fit")

    @field_validator("listen", "advertise")
    @classmethod
    def _address(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        try:
            address = parse_address(value, any_port=info.field_name == "listen")
        except UserError as error:
            raise ValueError(str(error)) from None
        if address.path:
            raise ValueError(f"{value!r} is a unix socket, which other hosts cannot reach: ADDR:PORT is needed")
        return value

    def inactive(self) -> dict[str, str]:
        if self.listen is None:
            why = "without fleet.listen, since no other host can join"
            return dict.fromkeys(["advertise", "token_file", "tls_cert", "tls_key", "tls_ca", "max_members"], why)
        if self.tls_cert is None and self.tls_key is None:
            return {"tls_ca": "client certificates need TLS, which fleet.tls_cert turns on"}
        return {}

    def problems(self) -> list[str]:
        """Contradictions between settings: one sentence each, with the value and the remedy."""
        found = []
        address = self.address
        if address is None and not self.local_actors:
            found.append("fleet.local_actors=false without fleet.listen: the run would have no actors; set "
                         "fleet.listen, 0.0.0.0:4440 for instance, so that actors can join")
        if address is not None and not address.is_loopback and self.token_file is None:
            found.append(f"fleet.listen={self.listen} can be reached from other machines and needs fleet.token_file: "
                         "a file with a secret token, `(umask 077; openssl rand -hex 32 > FILE)`; or listen at "
                         f"127.0.0.1:{address.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            found.append(f"fleet.{given} without fleet.{missing}: TLS needs both files")
        return found

    def at_port(self, port: int | None) -> FleetConfig:
        """Copy that listens at another port, if it listens at all."""
        if self.address is None or port is None:
            return self
        return self.model_copy(update={"listen": str(Address(self.address.host, port))})

    def with_offset(self, offset: int) -> FleetConfig:
        """Config of another learner of the run: its port is higher by `offset`, unless any free port will do."""
        if self.address is None or not offset or not self.address.port:
            return self
        return self.model_copy(update={"listen": str(Address(self.address.host, self.address.port + offset))})

    @property
    def address(self) -> Address | None:
        return None if self.listen is None else parse_address(self.listen, any_port=True)

    @property
    def lasting(self) -> bool:
        """True if joined actors can reconnect to a resumed run: it has the same port and the same token."""
        return self.address is not None and self.address.port != 0 and self.token_file is not None

    @property
    def max_message_bytes(self) -> int:
        return self.max_message_mb << 20
