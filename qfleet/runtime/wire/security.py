"""Who may talk to a fleet: a token from a file that only its owner can read, and TLS by certificate files."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import ssl
import stat
from collections.abc import Iterable
from pathlib import Path

import grpc

from qfleet.types import UserError

ChannelCredentials = grpc.ChannelCredentials
AUTHORIZATION = "authorization"
_TOKEN = re.compile(r"[!-~]+")


def fresh_token() -> str:
    return secrets.token_hex(32)


def read_token(path: str | Path) -> str:
    """The token in a file. A file that others can read, or that holds none, is refused with the remedy."""
    path = Path(path)
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise UserError(f"token file {path} is not a plain file")
            token = file.read(4096).strip()
    except FileNotFoundError:
        raise UserError(f"token file {path} does not exist: make one with "
                        f"`(umask 077; openssl rand -hex 32 > {path})`, and give the same to every host") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"token file {path} cannot be read: {error}") from None
    if mode & 0o077:
        raise UserError(f"token file {path} can be read by others (mode {mode & 0o777:04o}): `chmod 600 {path}`, "
                        "and make a new token if it may have been seen")
    if not token:
        raise UserError(f"token file {path} is empty: `openssl rand -hex 32 > {path}` writes a token")
    if not _TOKEN.fullmatch(token):
        raise UserError(f"token file {path} must hold one word of plain ASCII, without spaces")
    return token


def write_token(path: str | Path) -> str:
    """A fresh token in a new file that only its owner can read."""
    token = fresh_token()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"token file {path} exists already: use it, or remove it first") from None
    except OSError as error:
        raise UserError(f"token file {path} cannot be written: {error}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that every call carries."""
    return ((AUTHORIZATION, f"Bearer {token}"),)


def knows(tokens: Iterable[str], metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether a call shows one of the tokens; the comparison takes the same time however much of it is right."""
    shown = next((value for key, value in metadata if key == AUTHORIZATION), "")
    given = shown if isinstance(shown, bytes) else shown.encode()
    return any([hmac.compare_digest(given, f"Bearer {token}".encode()) for token in tokens])


def server_credentials(cert: str | Path, key: str | Path, ca: str | Path | None = None) -> grpc.ServerCredentials:
    """TLS for whoever listens; with `ca`, those who connect must show a certificate that it signed."""
    _check_pair(cert, key)
    roots = _authority(ca) if ca is not None else None
    pair = (_pem(key, "PRIVATE KEY"), _pem(cert, "CERTIFICATE"))
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)


def channel_credentials(ca: str | Path, cert: str | Path | None = None,
                        key: str | Path | None = None) -> grpc.ChannelCredentials:
    """TLS for whoever connects: `ca` signed the fleet's certificate (or is it itself); cert and key are its own."""
    roots = _authority(ca)
    if cert is None or key is None:
        if cert is not None or key is not None:
            raise UserError("a client certificate needs both files: give tls_cert and tls_key, or neither")
        return grpc.ssl_channel_credentials(roots)
    _check_pair(cert, key)
    return grpc.ssl_channel_credentials(roots, _pem(key, "PRIVATE KEY"), _pem(cert, "CERTIFICATE"))


def _pem(path: str | Path, kind: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"TLS file {path} does not exist") from None
    except OSError as error:
        raise UserError(f"TLS file {path} cannot be read: {error}") from None
    if not re.search(rb"-----BEGIN [A-Z ]*" + kind.encode(), data):
        raise UserError(f"TLS file {path} holds no {kind} in PEM form: a line -----BEGIN {kind}----- is missing")
    return data


def _authority(path: str | Path) -> bytes:
    data = _pem(path, "CERTIFICATE")
    try:
        ssl.create_default_context(cadata=data.decode("ascii", "replace"))
    except ssl.SSLError as error:
        raise UserError(f"TLS file {path} holds no certificate that can be read: {error}") from None
    return data


def _check_pair(cert: str | Path, key: str | Path) -> None:
    """gRPC would only say that it cannot bind; OpenSSL says what is wrong with a certificate and its key."""
    _pem(cert, "CERTIFICATE")
    if b"ENCRYPTED" in _pem(key, "PRIVATE KEY"):
        raise UserError(f"TLS key {key} is encrypted: write it without a passphrase, readable by its owner only")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise UserError(f"TLS certificate {cert} and key {key} do not go together: {error}") from None
