"""Strangers, mistakes and leaks: what knocks at the port harms nobody, and who is refused learns why."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from contextlib import contextmanager

import grpc
import pytest
from transport_kit import (
    LAYOUT,
    TOKEN,
    FakeLearner,
    certificate,
    eventually,
    fake_learner,
    link,
    proved,
    some_chunk,
    weights,
)

import qfleet
from qfleet.core.errors import UserError
from qfleet.transport import client, fleet_server, grpc_channel
from qfleet.transport.address import Address
from qfleet.transport.client import FleetConnection
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.fleet_server import FleetServer
from qfleet.transport.grpc_channel import SERVICE, GrpcChannel
from qfleet.transport.security import channel_credentials

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def no_tracebacks(caplog):
    """Whatever happens here is no reason for the service to log an error."""
    yield
    loud = [record for record in caplog.get_records("call") if record.exc_info or record.levelno >= logging.ERROR]
    assert loud == []


def works(here, address=None, **options):
    """A well-behaved client gets through."""
    before = len(here.stored)
    with link(address or here.unix, "actor/1", **options) as line:
        assert line.replay(LAYOUT, 2).add(some_chunk()) == 0
        here.drain_until(lambda: len(here.stored) > before, 10)


def refused(address, words, token=TOKEN, patience_s=5.0, credentials=None):
    line = FleetConnection(GrpcChannel(address, token, credentials), "actor/0", patience_s=patience_s)
    try:
        with pytest.raises(UserError, match=words) as caught:
            line.hello()
    finally:
        line.close()
    return str(caught.value)


@pytest.mark.parametrize("token", ["wrong", "", TOKEN[:-1], TOKEN + "x"])
def test_a_wrong_token_is_refused_at_once(tmp_path, token):
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here:
        for address in (here.unix, here.tcp):
            text = refused(address, "does not know this token", token)
            assert str(address) in text and TOKEN not in text
        assert here.registry.members() == ()
        works(here)


@pytest.mark.parametrize("method", ["Hello", "Exchange", "Fetch", "Pulse", "Unheard"])
def test_no_call_is_answered_without_a_token(tmp_path, method):
    with fake_learner(tmp_path / "c") as here, grpc.insecure_channel(str(here.unix)) as line:
        for metadata in (None, (("authorization", TOKEN),), (("authorization", f"bearer {TOKEN}"),)):
            with pytest.raises(grpc.RpcError) as caught:
                line.unary_unary(f"/{SERVICE}/{method}")(b"", timeout=5, metadata=metadata)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_calls_without_a_token_that_never_end_hold_nobody_up(tmp_path):
    never = threading.Event()
    with fake_learner(tmp_path / "c") as here, grpc.insecure_channel(str(here.unix)) as line:

        def silence():
            never.wait()
            yield b""

        calls = [line.stream_unary(f"/{SERVICE}/Exchange").future(silence(), timeout=30) for _ in range(60)]
        works(here)
        assert {call.exception().code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        never.set()


@pytest.mark.parametrize("method", ["Hello", "Exchange", "Fetch", "Pulse"])
def test_bytes_that_are_no_message_are_refused(tmp_path, method):
    with fake_learner(tmp_path / "c") as here, grpc.insecure_channel(str(here.unix)) as line:
        for data in (b"\xff\xff\xff", b"\x0a\x05ab", b"not a message at all"):
            with pytest.raises(grpc.RpcError) as caught:
                line.unary_unary(f"/{SERVICE}/{method}")(data, timeout=5, metadata=proved(line))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        works(here)


def test_messages_without_a_place_are_refused(tmp_path):
    with fake_learner(tmp_path / "c") as here:
        caller = GrpcChannel(here.unix, TOKEN)
        for request in (
            b"",
            client.ExchangeRequest(epoch=here.published.epoch, index=3, incarnation=1).SerializeToString(),
            client.ExchangeRequest(epoch=here.published.epoch, index=-(2**31), sequence=1).SerializeToString()):
            with pytest.raises(grpc.RpcError) as caught:
                caller.exchange(request)
            assert caught.value.code() == grpc.StatusCode.ABORTED
        with pytest.raises(grpc.RpcError) as caught:
            caller.hello(client.HelloRequest(protocol=grpc_channel.PROTOCOL, version=qfleet.__version__))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert len(here.inbox) == 0
        caller.close()


def test_another_protocol_or_version_is_refused_with_both_names(tmp_path, monkeypatch):
    with fake_learner(tmp_path / "c") as here:
        monkeypatch.setattr(client, "PROTOCOL", 99)
        text = refused(here.unix, "protocol 99")
        assert f"protocol {grpc_channel.PROTOCOL} (qfleet {qfleet.__version__})" in text and "install" in text
        monkeypatch.setattr(client, "PROTOCOL", grpc_channel.PROTOCOL)
        with monkeypatch.context() as patch:
            ours = qfleet.__version__
            hello = GrpcChannel.hello
            patch.setattr(GrpcChannel, "hello", lambda self, request: hello(self, _as_version(request, "0.0.1")))
            text = refused(here.unix, r"runs qfleet 0\.0\.1")
            assert f"this fleet qfleet {ours}" in text
        works(here)


def _as_version(request, version):
    request.version = version
    return request


def test_tls_lets_those_in_who_know_the_authority(tmp_path):
    certificate(tmp_path, "ca")
    cert, key = certificate(tmp_path, "fleet", tmp_path / "ca")
    stranger, _ = certificate(tmp_path, "stranger")
    with fake_learner(tmp_path / "c", "127.0.0.1:0", tls_cert=str(cert), tls_key=str(key)) as here:
        works(here, here.tcp, credentials=channel_credentials(tmp_path / "ca.pem"))
        works(here, Address("localhost", here.tcp.port), credentials=channel_credentials(tmp_path / "ca.pem"))
        refused(here.tcp, "tls_ca", credentials=channel_credentials(stranger))
        text = refused(here.tcp, "no answer from", patience_s=0.7)
        assert str(here.tcp) in text and "TLS" in text
        works(here)


def test_tls_to_somebody_who_does_not_speak_it_says_so(tmp_path):
    certificate(tmp_path, "ca")
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here:
        refused(here.tcp, "does not speak TLS", credentials=channel_credentials(tmp_path / "ca.pem"))
        works(here, here.tcp)


def test_with_an_authority_joiners_must_show_a_certificate(tmp_path):
    certificate(tmp_path, "ca")
    cert, key = certificate(tmp_path, "fleet", tmp_path / "ca")
    ca, joiner, its_key = tmp_path / "ca.pem", *certificate(tmp_path, "joiner", tmp_path / "ca")
    with fake_learner(tmp_path / "c", "127.0.0.1:0", tls_cert=str(cert), tls_key=str(key), tls_ca=str(ca)) as here:
        works(here, here.tcp, credentials=channel_credentials(ca, joiner, its_key))
        refused(here.tcp, "no answer from", patience_s=0.7, credentials=channel_credentials(ca))


def test_nobody_at_home_is_said_with_the_address_and_not_for_ever(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        free = silent.getsockname()[1]
    with caplog.at_level(logging.WARNING):
        began = time.monotonic()
        refused(Address("127.0.0.1", free), f"127.0.0.1:{free}", patience_s=1.0)
        assert time.monotonic() - began < 8
    assert f"127.0.0.1:{free}" in caplog.records[0].getMessage() and len(caplog.records) == 1


def test_a_client_may_come_before_the_fleet(tmp_path):
    made = []
    late = threading.Timer(0.7, lambda: made.append(FakeLearner(tmp_path / "c")))
    late.start()
    line = FleetConnection(
        GrpcChannel(fleet_server.socket_address(tmp_path / "c" / "learner.sock"), TOKEN), "actor/0", patience_s=15
    )
    assert line.hello().index == 0
    line.close()
    late.join()
    made[0].close()


@contextmanager
def noise(port, count):
    """Connections that say nothing, or nonsense."""
    lines = []
    try:
        for number in range(count):
            line = socket.create_connection(("127.0.0.1", port))
            lines.append(line)
            if number % 4 == 1:
                line.sendall(os.urandom(200))
            elif number % 4 == 2:
                line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            elif number % 4 == 3:
                line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4")
        yield
    finally:
        for line in lines:
            line.close()


@pytest.mark.parametrize("tls", [False, True])
def test_200_strangers_at_the_port_harm_nobody(tmp_path, tls, capfd):
    cert, key = certificate(tmp_path, "fleet")
    files = {"tls_cert": str(cert), "tls_key": str(key)} if tls else {}
    with fake_learner(tmp_path / "c", "127.0.0.1:0", **files) as here:
        credentials = channel_credentials(cert) if tls else None
        with link(here.tcp, credentials=credentials) as steady:
            with noise(here.tcp.port, 200):
                began = time.monotonic()
                works(here, here.tcp, credentials=credentials)
                works(here)
                assert time.monotonic() - began < 10
            here.published.publish(weights(1), 1)
            eventually(lambda: steady.weights.fetch(-1) is not None)
            assert steady.failed is None
    assert capfd.readouterr().err == ""


def test_a_message_above_the_limit_is_refused_and_the_limit_named(tmp_path):
    with fake_learner(tmp_path / "c", max_message_mb=1) as here, link(here.unix, start=False) as line:
        assert line.welcome.max_message_bytes == 1 << 20
        line.replay(LAYOUT, 2)
        with pytest.raises(UserError, match=r"replay.chunk_steps or raise fleet.max_message_mb"):
            line.metrics.add_chunk(bytes(600_000), b"")
        line.metrics._max_message_bytes = 1 << 30  # ignores the limit
        line.metrics.add_chunk(bytes(3 << 20), b"")
        line.start()
        eventually(lambda: line.failed is not None)
        assert isinstance(line.failed, UserError) and "fleet.max_message_mb" in str(line.failed)
        works(here)


def test_weights_above_the_limit_are_named(tmp_path):
    with fake_learner(tmp_path / "c", max_message_mb=1) as here, link(here.unix) as line:
        here.published.publish(weights(1, size=400_000), 1)
        eventually(lambda: line.failed is not None)
        assert "fleet.max_message_mb=1" in str(line.failed)
        with pytest.raises(UserError, match=r"fleet\.max_message_mb"):
            line.send_evaluation(client.Score([1.0], [1], 1), weights(1, size=400_000))


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}.*in use"):
            FakeLearner(tmp_path / "c", f"127.0.0.1:{port}")
    with fake_learner(tmp_path / "a", "127.0.0.1:0") as here, \
            pytest.raises(UserError, match=f":{here.tcp.port}.*in use"):
        FakeLearner(tmp_path / "b", f"127.0.0.1:{here.tcp.port}")
    with pytest.raises(UserError, match=r"203\.0\.113\.7:1"):
        FakeLearner(tmp_path / "d", "203.0.113.7:1")
    with pytest.raises(UserError, match="socket unix:"):
        FleetServer(*[None] * 3, FleetConfig(), tmp_path / "none" / "s", [TOKEN])
    with pytest.raises(ValueError, match="at least one token"):
        FleetServer(*[None] * 3, FleetConfig(), tmp_path / "s", [])


def test_what_breaks_inside_is_told_to_the_caller(tmp_path, monkeypatch, caplog):
    with fake_learner(tmp_path / "c") as here:
        caller = GrpcChannel(here.unix, TOKEN)
        monkeypatch.setattr(here.registry, "members", lambda: 1 / 0)
        with pytest.raises(grpc.RpcError) as caught:
            caller.pulse()
        assert caught.value.code() == grpc.StatusCode.INTERNAL and "division" in caught.value.details()
        caller.close()
        assert "an RPC failed" in caplog.text
        caplog.clear()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def wire_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("wire", "link"))]


def test_nothing_is_left_behind(tmp_path):
    def once():
        with fake_learner(tmp_path / "c", "127.0.0.1:0") as here:
            here.published.publish(weights(1), 1)
            with link(here.unix) as one, link(here.tcp, "actor/1") as two:
                for line in (one, two):
                    line.metrics.count_steps(1)
                    eventually(lambda line=line: line.weights.fetch(-1) is not None)
                here.drain_until(lambda: len(here.stored) == 2)
        gc.collect()

    once()
    eventually(lambda: wire_threads() == [])
    before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        once()
    eventually(lambda: wire_threads() == [] and threading.active_count() <= threads)
    eventually(lambda: descriptors() <= before)
    assert not (tmp_path / "c" / "learner.sock").exists()
