"""Connections without credentials: however many there are, files can be opened and members are heard."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
from transport_kit import eventually, fake_learner, link

from qfleet.transport import fleet_server

pytestmark = pytest.mark.timeout(60)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

LEARNER = """
import resource, sys
from pathlib import Path
from transport_kit import SPEC, fake_learner, link, weights
from qfleet.runs.checkpoint import Checkpoints, CheckpointMeta

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
folder = Path(sys.argv[1])
with fake_learner(folder / "c", "127.0.0.1:0") as here:
    print(here.tcp.port, flush=True)
    sys.stdin.readline()
    try:
        Checkpoints(folder / "checkpoints", 2).save(1, 1, weights(1), {}, [], CheckpointMeta("seed: 1", SPEC))
        with link(here.unix) as line:
            line.metrics.count_steps(1)
            here.drain_until(lambda: bool(here.stored), 20)
        print("saved and heard", flush=True)
    except OSError as error:
        print(error, flush=True)
"""


@contextmanager
def crowd(port, size):
    """Connections that greet as HTTP/2 does, and then say no more; every other one says nothing at all."""
    lines = []
    try:
        for number in range(size):
            with suppress(OSError):
                lines.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                if number % 2:
                    lines[-1].sendall(PREFACE)
        yield lines
    finally:
        for line in lines:
            line.close()


def closed(line):
    """Whether the other side has hung up."""
    line.setblocking(False)
    try:
        while line.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_a_checkpoint_is_written_whatever_number_of_strangers_is_connected(tmp_path):
    """A process with 200 descriptors, and 300 connections."""
    with subprocess.Popen([sys.executable, "-c", LEARNER, str(tmp_path)], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, cwd="tests/transport") as learner:
        try:
            with crowd(int(learner.stdout.readline()), 300) as lines:
                eventually(lambda: sum(not closed(line) for line in lines) <= 101, 20)
                assert learner.communicate("go\n", timeout=40)[0] == "saved and heard\n"
        finally:
            learner.kill()
    manifest, = (tmp_path / "checkpoints").glob("step-*/manifest.json")
    assert json.loads(manifest.read_text())["step"] == 1


def test_connections_without_calls_are_closed_and_members_stay(tmp_path, monkeypatch):
    options = dict(fleet_server.OPTIONS)
    assert options["grpc.max_connection_idle_ms"] <= 30_000
    shorter = {"grpc.max_connection_idle_ms": 1500, "grpc.server_handshake_timeout_ms": 1500}
    monkeypatch.setattr(fleet_server, "OPTIONS", tuple((options | shorter).items()))
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here, link(here.tcp) as line, crowd(here.tcp.port, 20) as lines:
        eventually(lambda: all(closed(stranger) for stranger in lines), 20)
        line.metrics.count_steps(1)
        here.drain_until(lambda: bool(here.stored), 20)
        assert line.failed is None


def test_descriptors_are_raised_to_the_hard_limit_and_half_of_them_is_for_files(monkeypatch):
    limits = [(256, 4096)]
    monkeypatch.setattr(fleet_server.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(fleet_server.resource, "setrlimit", lambda kind, pair: limits.append(pair))
    assert fleet_server.connection_limit(10_000) == 2048 and limits[-1] == (4096, 4096)
    assert fleet_server.connection_limit(100) == 100
    limits.append((100, 100))
    assert fleet_server.connection_limit(10_000) == 50
    limits.append((fleet_server.resource.RLIM_INFINITY,) * 2)
    assert fleet_server.connection_limit(10_000) == 10_000
    limits.append((64, 4096))
    monkeypatch.setattr(fleet_server.resource, "setrlimit", lambda kind, pair: 1 // 0 if pair[0] < 64 else _refuse())
    assert fleet_server.connection_limit(10_000) == 32


def _refuse():
    raise ValueError("not allowed")
