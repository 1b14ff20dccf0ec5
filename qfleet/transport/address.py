"""Network addresses of a fleet: HOST:PORT, or a unix socket on the same machine."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from qfleet.core.errors import UserError

UNIX = "unix:"
MAX_SOCKET_BYTES = 107
"""Longest path of a unix socket that the kernel accepts, bytes."""

_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Address:
    """Host and port, or the path of a unix socket. `str` returns the text that `parse_address` and gRPC read."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it. `localhost` is the only host name that counts as such."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_wildcard(self) -> bool:
        """True if it means all addresses of this machine: valid to listen on, not to connect to."""
        return self.host in ("0.0.0.0", "::")


def parse_address(text: str, any_port: bool = False) -> Address:
    """Parse `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`. UserError if invalid. `any_port` allows 0, any free port."""
    if text.startswith(UNIX):
        return socket_address(Path(text[len(UNIX):]))
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host:
        raise UserError(f"{text!r} is not an address: HOST:PORT is needed, for example 127.0.0.1:4440")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not (0 if any_port else 1) <= int(port) <= 65535:
        raise UserError(f"{text!r} is not an address: its port {port!r} is not a number from {0 if any_port else 1} "
                        "to 65535")
    return Address(_host(host, text), int(port))


def socket_address(path: Path) -> Address:
    """Address of a unix socket; its path must be absolute and short enough for the kernel."""
    if not path.is_absolute() or "\0" in str(path):
        raise UserError(f"unix socket {str(path)!r}: an absolute path is needed")
    if len(str(path).encode()) > MAX_SOCKET_BYTES:
        raise UserError(f"unix socket {path} has a path of {len(str(path).encode())} bytes, above the limit of "
                        f"{MAX_SOCKET_BYTES}: point TMPDIR at a folder with a shorter path")
    return Address(path=str(path))


def require_free(address: Address) -> None:
    """UserError unless this process could listen there; checked before a process is started for it."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, socket_name = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: ports in TIME_WAIT count as free
            probe.bind(socket_name)
            probe.listen()
    except OSError as error:
        raise UserError(f"cannot listen at {address} ({error.strerror}): the port is in use, or the address does not "
                        "belong to this machine; choose another with fleet.listen") from None


def _host(host: str, text: str) -> str:
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    try:
        version = ipaddress.ip_address(bare).version
    except ValueError:
        # Digits and dots alone are a mistyped IP address, never a host name.
        if bracketed or not _NAME.fullmatch(bare) or re.fullmatch(r"[0-9.]+", bare):
            raise UserError(f"{text!r} is not an address: {host!r} is neither a host name nor an IP address") from None
        return bare
    if (version == 6) != bracketed:
        raise UserError(f"{text!r} is not an address: an IPv6 address is written in brackets, [::1]:4440")
    return bare
