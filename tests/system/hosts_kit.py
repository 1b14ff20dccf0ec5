"""Hosts for tests: fleets and joiners as real processes, a second machine behind a cable that can be pulled, papers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from real_runs import ENVIRONMENT, command

from qfleet.transport.address import parse_address
from qfleet.transport.grpc_channel import GrpcChannel
from qfleet.transport.security import channel_credentials, read_token, write_token

SMALL = ["agent.hidden=[16]", "env.lanes=2", "replay.chunk_steps=8", "replay.min_steps=64", "learner.batch_size=8",
         "replay.samples_per_insert=1", "eval.episodes=1", "eval.period_steps=null", "env.max_episode_steps=100",
         "run.tensorboard=false", "run.log_period_steps=500"]

needs_namespaces = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None,
                                      reason="network namespaces need root and iproute2")


class Running:
    """A qfleet process; what it says, on both streams, is gathered in a file."""

    def __init__(self, words: list[str], cwd: Path, host: str = "", **env: str) -> None:
        self.log = cwd / f"said-{time.monotonic_ns()}.txt"
        within = ["ip", "netns", "exec", host] if host else []
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*within, *words], cwd=cwd, env=ENVIRONMENT | env, stdout=log,
                                            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, ready: Callable[[], object], timeout_s: float = 150.0) -> None:
        """Wait for something that comes about while this lives."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said}"
            assert time.monotonic() < deadline, f"not in {timeout_s:g} s:\n{self.said}"
            time.sleep(0.05)

    def until_said(self, words: str, timeout_s: float = 150.0) -> str:
        self.until(lambda: re.search(words, self.said), timeout_s)
        return re.search(words, self.said)[0]

    def ends(self, code: int, timeout_s: float = 150.0) -> str:
        """Wait for the end, which must be this one; what was said until then."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end in {timeout_s:g} s:\n{self.said}") from None
        assert self.process.returncode == code, self.said
        assert "Traceback" not in self.said, self.said
        return self.said

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """End it, in order if it can be."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait()


class Yard:
    """A folder where processes run and are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, folder / "token"
        self.started: list[Running] = []
        write_token(self.token)

    def run(self, *args: str, host: str = "", cwd: Path | None = None, **env: str) -> Running:
        """Start the command line; `host` is a network namespace."""
        return self.shell(command(*args), host, cwd, **env)

    def shell(self, words: list[str], host: str = "", cwd: Path | None = None, **env: str) -> Running:
        self.started.append(Running(words, cwd or self.folder, host, **env))
        return self.started[-1]

    def join(self, place: str, *options: str, token: Path | None = None, host: str = "", cwd: Path | None = None,
             **env: str) -> Running:
        return self.run("join", place, "--token-file", str(token or self.token), "--actors", "1", *options, host=host,
                        cwd=cwd, TMPDIR=str(self.folder), **env)  # logs of those who were refused stay here

    def close(self) -> None:
        for running in reversed(self.started):
            running.stop()


def invitation(head: Running) -> list[str]:
    """The command by which others join, as the head printed it, word by word; from this checkout."""
    words = shlex.split(head.until_said(r"(?m)^join +qfleet join .+$").removeprefix("join"))
    assert words[0] == "qfleet"
    return command(*words[1:])


class Watch:
    """Looks at a fleet from outside, as anybody who knows the token can."""

    def __init__(self, place: str, token: Path, *papers: Path) -> None:
        credentials = channel_credentials(*papers) if papers else None
        self.caller = GrpcChannel(parse_address(place), read_token(token), credentials)

    def pulse(self):
        """How the fleet is, None if it does not answer."""
        try:
            return self.caller.pulse(2.0)
        except grpc.RpcError:
            return None

    @property
    def steps(self) -> int:
        pulse = self.pulse()
        return -1 if pulse is None else pulse.steps

    def grows(self, by: int = 50) -> Callable[[], bool]:
        """Whether that many steps were added since now, for `until`."""
        before = self.steps
        return lambda: self.steps >= before + by

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.caller.close()


class Cable:
    """Two network stacks and the link between: this one at `here`, the namespace `host` at `there`."""

    def __init__(self) -> None:
        number = os.getpid()
        self.host, self._near, self._far = f"qfleet-{number}", f"qfn{number}", f"qff{number}"
        net = f"10.{200 + number // 16384 % 50}.{number // 64 % 256}"
        self.here, self.there = f"{net}.{number % 64 * 4 + 1}", f"{net}.{number % 64 * 4 + 2}"

        ip("netns", "add", self.host)
        ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.host)
        ip("addr", "add", f"{self.here}/30", "dev", self._near)
        self._there("addr", "add", f"{self.there}/30", "dev", self._far)
        self._there("link", "set", "lo", "up")
        self.plug()

    def pull(self, far: bool = False) -> None:
        """Cut the link. At this end: over there nobody notices, words just vanish; at the far end dialling fails."""
        self._there("link", "set", self._far, "down") if far else ip("link", "set", self._near, "down")

    def plug(self) -> None:
        ip("link", "set", self._near, "up")
        self._there("link", "set", self._far, "up")

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):
            ip("netns", "del", self.host)

    def _there(self, *words: str) -> None:
        ip("-n", self.host, *words)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def crowd(place: tuple[str, int], size: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    lines = [socket.create_connection(place, timeout=10) for _ in range(size)]
    try:
        yield lines
    finally:
        for line in lines:
            line.close()


def certificate(folder: Path, name: str, *names: str, authority: Path | None = None) -> tuple[Path, Path]:
    """Certificate and key for some names (`IP:127.0.0.1`), signed by `authority` (a stem) or by itself."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    sign = [] if authority is None else ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"]
    kind = "CA:TRUE" if authority is None else "CA:FALSE"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "30", "-subj", f"/CN={name}", "-addext",
                    f"subjectAltName={','.join(names or ('IP:127.0.0.1',))}", "-addext",
                    f"basicConstraints=critical,{kind}", "-keyout", str(key), "-out", str(cert), *sign],
                   check=True, capture_output=True, timeout=60)
    return cert, key
