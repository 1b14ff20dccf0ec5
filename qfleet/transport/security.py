"""Authentication of a fleet: a token from a file that only its owner can read, and optional TLS.

    client ── nonce ──────────────────────────▶ server      the token itself is never sent: both sides send an HMAC
    client ◀───── challenge, HMAC("server", ..) server      of both nonces, with a key derived from the token, and
    client ── HMAC("client", ..), every call ─▶ server      the server sends its HMAC first

The reply to a hello is signed as well, since it may name code to import: a process between the two can forward it, but
not change it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import ssl
import stat
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import grpc

from qfleet.core.errors import UserError

ChannelCredentials = grpc.ChannelCredentials
AUTHORIZATION, NONCE, PROOF = "authorization", "qfleet-nonce", "qfleet-proof"
"""Metadata keys: credentials of a call, nonce of a proof request, signature of a reply."""

CLAIM_DIGITS = 16
_TOKEN = re.compile(r"[!-~]+")
_NONCE = re.compile(r"[0-9a-f]{32}")
_JOINED = re.compile(rf"[A-Za-z0-9._-]{{1,100}}-([0-9a-f]{{{CLAIM_DIGITS}}})/[0-9]{{1,5}}")

Metadata = Iterable[tuple[str, str | bytes]]


def fresh_token() -> str:
    return secrets.token_hex(32)


def read_token(path: str | Path) -> str:
    """Read a token file. UserError with the remedy if others can read it, or it holds no token."""
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
        raise UserError(f"token file {path} must hold one token of printable ASCII characters, without spaces")
    return token


def write_token(path: str | Path) -> str:
    """Write a fresh token to a new file that only its owner can read."""
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


def fresh_nonce() -> str:
    return secrets.token_hex(16)


@lru_cache(maxsize=64)
def derive_key(token: str) -> bytes:
    """HMAC key of a token. Slow by design: any process that can connect receives a proof to test guesses on."""
    return hashlib.scrypt(token.encode(), salt=b"qfleet.wire", n=1 << 14, r=8, p=1, dklen=32)


def sign(key: bytes, *fields: str | bytes) -> str:
    """HMAC-SHA256 of a list of fields, each preceded by its length."""
    parts = [field.encode() if isinstance(field, str) else field for field in fields]
    data = b"".join(piece for part in parts for piece in (len(part).to_bytes(8, "big"), part))
    return hmac.digest(key, data, "sha256").hex()


def constant_time_equal(given: str, expected: str) -> bool:
    """Compare in a time that does not depend on the position of the first difference."""
    return hmac.compare_digest(given.encode(), expected.encode())


def client_metadata(token: str, nonce: str, challenge: str) -> tuple[tuple[str, str], ...]:
    """Metadata of every call to a server with this challenge."""
    return ((AUTHORIZATION, f"QFleet {nonce} {sign(derive_key(token), 'client', nonce, challenge)}"),)


def metadata_value(metadata: Metadata, key: str) -> str:
    """Value of a key, empty if absent."""
    value = next((value for name, value in metadata if name == key), "")
    return value if isinstance(value, str) else value.decode("latin-1")


class Keyring:
    """Tokens of a server: the first is that of the run's own processes, the others are for members that join.

    Credentials are valid for one `challenge`, that is for one server process; clients of the next one authenticate
    again.
    """

    def __init__(self, tokens: Sequence[str], challenge: str | None = None) -> None:
        if not tokens:
            raise ValueError("a server needs at least one token")
        self.challenge = fresh_nonce() if challenge is None else challenge
        self._keys = [derive_key(token) for token in tokens]

    def proofs(self, metadata: Metadata) -> list[str]:
        """Proofs that this server knows its tokens, one for each; none without a valid nonce."""
        nonce = metadata_value(metadata, NONCE)
        return [sign(key, "server", nonce, self.challenge) for key in self._keys] if _NONCE.fullmatch(nonce) else []

    def token_index(self, metadata: Metadata) -> int | None:
        """Index of the token that the caller knows: 0 = that of the run's own processes, None = none."""
        scheme, _, rest = metadata_value(metadata, AUTHORIZATION).partition(" ")
        nonce, _, given = rest.partition(" ")
        right = [constant_time_equal(given, sign(key, "client", nonce, self.challenge)) for key in self._keys]
        return right.index(True) if scheme == "QFleet" and any(right) else None

    def sign_reply(self, metadata: Metadata, request: bytes, reply: bytes) -> str:
        """Signature of a reply, with the token that the caller knows."""
        metadata = list(metadata)
        nonce, index = metadata_value(metadata, AUTHORIZATION).split(" ")[1], self.token_index(metadata)
        assert index is not None
        return sign(self._keys[index], "answer", nonce, self.challenge, request, reply)


def claimed_name(host: str, claim: str, index: int) -> str:
    """Name of a joining member. It contains the hash of a secret, so only the secret's holder can use it."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", host)[:100] or "host"
    return f"{plain}-{_digest(claim)}/{index}"


def may_claim(name: str, claim: str) -> bool:
    """True if a name was made with this secret."""
    found = _JOINED.fullmatch(name)
    return found is not None and constant_time_equal(found[1], _digest(claim))


def _digest(claim: str) -> str:
    return hashlib.sha256(claim.encode()).hexdigest()[:CLAIM_DIGITS]


def server_credentials(cert: str | Path, key: str | Path, ca: str | Path | None = None) -> grpc.ServerCredentials:
    """TLS credentials of a server; with `ca`, clients must present a certificate signed by it."""
    _check_pair(cert, key)
    roots = _authority(ca) if ca is not None else None
    pair = (_pem(key, "PRIVATE KEY"), _pem(cert, "CERTIFICATE"))
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)


def channel_credentials(ca: str | Path, cert: str | Path | None = None,
                        key: str | Path | None = None) -> grpc.ChannelCredentials:
    """TLS credentials of a client.

    `ca` signed the server's certificate (or is it); `cert` and `key` are the client's.
    """
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
    """Load certificate and key with OpenSSL, which explains what is wrong; gRPC would only say that it cannot bind."""
    _pem(cert, "CERTIFICATE")
    if b"ENCRYPTED" in _pem(key, "PRIVATE KEY"):
        raise UserError(f"TLS key {key} is encrypted: write it without a passphrase, readable by its owner only")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise UserError(f"TLS certificate {cert} and key {key} do not go together: {error}") from None
