"""Addresses, the fleet section of a config, tokens and certificate files: what is refused, and in which words."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from pydantic import ValidationError
from transport_kit import certificate

from qfleet.core.errors import UserError
from qfleet.transport.address import Address, parse_address, socket_address
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.security import (
    AUTHORIZATION,
    NONCE,
    Keyring,
    channel_credentials,
    claimed_name,
    client_metadata,
    derive_key,
    fresh_nonce,
    may_claim,
    read_token,
    server_credentials,
    sign,
    write_token,
)


@pytest.mark.parametrize(("text", "loopback"), [
    ("127.0.0.1:4440", True), ("127.9.9.9:1", True), ("localhost:65535", True), ("[::1]:4440", True),
    ("unix:/tmp/x/learner.sock", True), ("0.0.0.0:4440", False), ("[::]:4440", False), ("10.0.0.7:80", False),
    ("head.example.org:4440", False), ("localhost.evil.org:4440", False), ("node_7-a:4440", False),
])
def test_addresses_are_read_and_written(text, loopback):
    address = parse_address(text)
    assert str(address) == text and parse_address(str(address)) == address
    assert address.is_loopback is loopback


@pytest.mark.parametrize("text", [
    "", "host", ":4440", "4440", "host:", "host:port", "host:65536", "host:-1", "host:0", "host:99999999", "a b:80",
    "::1:4440", "[127.0.0.1]:80", "[host]:80", "300.1.1.1:80", "host/path:80", "grpc://host:80", "unix:relative",
    "host:4_0", "hôst:80", "-h:80", "unix:/" + 120 * "x",
])
def test_bad_addresses_are_named(text):
    with pytest.raises(UserError) as caught:
        parse_address(text)
    assert text.removeprefix("unix:") in str(caught.value)


def test_port_zero_is_for_those_who_listen():
    assert parse_address("127.0.0.1:0", any_port=True) == Address("127.0.0.1", 0)


def test_sockets_fit_the_kernel():
    assert socket_address(Path("/tmp/" + 102 * "x")).path
    with pytest.raises(UserError, match=r"108 bytes.*TMPDIR"):
        socket_address(Path("/tmp/" + 103 * "x"))


@pytest.mark.parametrize(("values", "words"), [
    ({"listen": "0.0.0.0:4440"}, ["fleet.listen=0.0.0.0:4440", "fleet.token_file", "127.0.0.1:4440"]),
    ({"listen": "[::]:0"}, ["fleet.listen=[::]:0", "fleet.token_file"]),
    ({"local_actors": False}, ["fleet.local_actors=false", "fleet.listen"]),
    ({"listen": "127.0.0.1:1", "tls_cert": "c"}, ["fleet.tls_cert without fleet.tls_key"]),
    ({"listen": "127.0.0.1:1", "tls_key": "k"}, ["fleet.tls_key without fleet.tls_cert"]),
])
def test_contradictions_are_named(values, words):
    found = FleetConfig(**values).problems()
    assert len(found) == 1 and all(word in found[0] for word in words)


def test_what_is_consistent_is_accepted():
    assert FleetConfig().problems() == []
    assert FleetConfig(listen="127.0.0.1:0", local_actors=False).problems() == []
    assert FleetConfig(listen="0.0.0.0:1", token_file="t", tls_cert="c", tls_key="k").problems() == []


@pytest.mark.parametrize("values", [{"listen": "nowhere"}, {"advertise": "host:0x10"}, {"listen": "unix:/tmp/x"}])
def test_bad_addresses_in_the_config_are_named(values):
    with pytest.raises(ValidationError) as caught:
        FleetConfig(**values)
    assert next(iter(values.values())) in str(caught.value)


def test_keys_without_effect_are_known():
    assert set(FleetConfig().inactive()) == {"advertise", "token_file", "tls_cert", "tls_key", "tls_ca", "max_members"}
    assert set(FleetConfig(listen="127.0.0.1:1").inactive()) == {"tls_ca"}
    assert FleetConfig(listen="127.0.0.1:1", tls_cert="c", tls_key="k").inactive() == {}


def test_a_token_is_written_for_its_owner_only(tmp_path):
    old = os.umask(0)
    try:
        token = write_token(tmp_path / "token")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert read_token(tmp_path / "token") == token and len(token) == 64
    with pytest.raises(UserError, match="exists already"):
        write_token(tmp_path / "token")
    with pytest.raises(UserError, match="cannot be written"):
        write_token(tmp_path / "none" / "token")


@pytest.mark.parametrize(("content", "mode", "words"), [
    (b"secret\n", 0o644, "can be read by others.*chmod 600"), (b"secret\n", 0o620, "chmod 600"),
    (b" \n", 0o600, "is empty"), (b"", 0o400, "is empty"), (b"two words", 0o600, "one token"),
    ("sécret".encode(), 0o600, "ASCII"), (b"\xff\xfe", 0o600, "cannot be read"),
])
def test_bad_token_files_are_refused(tmp_path, content, mode, words):
    (tmp_path / "token").write_bytes(content)
    (tmp_path / "token").chmod(mode)
    with pytest.raises(UserError, match=words) as caught:
        read_token(tmp_path / "token")
    assert str(tmp_path / "token") in str(caught.value) and "secret" not in str(caught.value)


def test_a_missing_token_file_says_how_to_make_one(tmp_path):
    with pytest.raises(UserError, match=r"does not exist.*openssl rand"):
        read_token(tmp_path / "token")
    with pytest.raises(UserError, match="cannot be read"):
        read_token(tmp_path)


def test_credentials_hold_for_one_token_and_one_challenge():
    keys, nonce = Keyring(["one", "two"]), fresh_nonce()
    own, joined = client_metadata("one", nonce, keys.challenge), client_metadata("two", nonce, keys.challenge)
    assert keys.token_index(own) == 0 and keys.token_index(joined) == 1
    assert keys.token_index([("user-agent", "x"), (AUTHORIZATION, joined[0][1].encode())]) == 1
    strangers = [
        client_metadata("on", nonce, keys.challenge), client_metadata("ones", nonce, keys.challenge),
        client_metadata("one", nonce, ""), (), ((AUTHORIZATION, "Bearer one"),),
        ((AUTHORIZATION, own[0][1][:-1]),), ((AUTHORIZATION, own[0][1].replace(nonce, fresh_nonce())),),
        ((AUTHORIZATION, own[0][1].replace("QFleet", "Bearer")),), ((AUTHORIZATION, "QFleet é é"),)]
    assert [keys.token_index(metadata) for metadata in strangers] == [None] * len(strangers)
    assert Keyring(["one", "two"]).token_index(own) is None, "credentials of another life of the server"
    with pytest.raises(ValueError, match="at least one token"):
        Keyring([])


def test_a_server_proves_its_tokens_for_the_nonce_that_was_sent():
    keys, nonce = Keyring(["one", "two"]), fresh_nonce()
    assert keys.proofs([(NONCE, nonce)]) == [sign(derive_key(token), "server", nonce, keys.challenge)
                                             for token in ("one", "two")]
    assert keys.proofs([(NONCE, nonce)]) != keys.proofs([(NONCE, fresh_nonce())])
    for wrong in ("", "x" * 32, nonce + "0"):
        assert keys.proofs([(NONCE, wrong)]) == keys.proofs([]) == []
    assert sign(b"key", "ab", "c") != sign(b"key", "a", "bc")


def test_the_name_of_a_member_belongs_to_the_secret_that_it_was_made_with():
    name = claimed_name("höst name", "secret", 3)
    assert may_claim(name, "secret") and may_claim(claimed_name("", "secret", 0), "secret")
    assert not may_claim(name, "other") and not may_claim(name, "")
    assert not any(may_claim(name, "secret") for name in ("actor/0", "evaluator", "learner/0", "", name + "\n"))


def test_certificate_files_are_checked(tmp_path):
    cert, key = certificate(tmp_path, "one")
    other, _ = certificate(tmp_path, "two")
    server_credentials(cert, key, other)
    channel_credentials(cert, cert, key)
    (tmp_path / "noise").write_bytes(b"\0\1\2")
    (tmp_path / "hollow").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (tmp_path / "locked").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n")
    for call, words in [
            (lambda: server_credentials(tmp_path / "gone", key), "gone does not exist"),
            (lambda: server_credentials(cert, tmp_path), "cannot be read"),
            (lambda: server_credentials(cert, tmp_path / "noise"), "noise holds no PRIVATE KEY"),
            (lambda: server_credentials(key, cert), "holds no CERTIFICATE"),
            (lambda: server_credentials(other, key), "do not go together"),
            (lambda: server_credentials(cert, tmp_path / "locked"), "passphrase"),
            (lambda: channel_credentials(tmp_path / "hollow"), "hollow holds no certificate"),
            (lambda: channel_credentials(cert, cert), "both files")]:
        with pytest.raises(UserError, match=words):
            call()
