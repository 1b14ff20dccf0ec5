"""Both ends of a wire for the tests: a learner's end without a learner, a lossy proxy, and certificates."""

from __future__ import annotations

import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Chunk, Window
from qfleet.replay.chunker import Chunker
from qfleet.replay.layout import Layout
from qfleet.transport.address import Address, socket_address
from qfleet.transport.client import FleetConnection
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.fleet_server import FleetServer, Inbox, PublishedState, Registry
from qfleet.transport.grpc_channel import GrpcChannel

TOKEN, JOIN_TOKEN = "a-token-for-the-tests", "a-token-for-those-who-join"
SPEC = EnvSpec(
    "kit", {"vector": Leaf((3,), "float32", "vector"), "wide": Leaf((80,), "float32", "vector")}, num_actions=4
)
LAYOUT = Layout(SPEC, Window(future=2), 8)


def some_chunk(seed: int = 0) -> Chunk:
    rng, chunker = np.random.default_rng(seed), Chunker(LAYOUT, 1)
    while True:
        obs = {"vector": rng.normal(size=(1, 3)).astype("f4"), "wide": rng.normal(size=(1, 80)).astype("f4")}
        for _, chunk in chunker.append(obs, rng.integers(0, 4, 1).astype("i4"), rng.normal(size=1).astype("f4"),
                                       np.ones(1, "f4"), np.zeros(1, bool), {}):
            return chunk


def weights(version: int, size: int = 4) -> dict[str, torch.Tensor]:
    vector = torch.arange(size, dtype=torch.float32) + version
    return {"a": vector[:2].view(2, 1), "b": vector[2:], "count": torch.tensor(version)}


class FakeLearner:
    """Desk, registry, inbox and server of one learner process, and the list of what its main thread stored."""

    def __init__(self, folder: Path, listen: str | None = None, state: dict | None = None, **cfg) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.cfg = FleetConfig(listen=listen, token_file="unused" if listen else None, **cfg)
        self.published = PublishedState("seed: 1\n", "{}", actors=2)
        self.registry = Registry(actors=2, live_s=self.cfg.heartbeat_timeout_s)
        if state is not None:
            self.registry.load_state_dict(state)
        self.inbox = Inbox(self.cfg.inbox_messages)
        self.unix = socket_address(folder / "learner.sock")
        self.server = FleetServer(self.published, self.registry, self.inbox, self.cfg, folder / "learner.sock",
                                  [TOKEN, JOIN_TOKEN])
        self.server.start()
        self.tcp = Address("127.0.0.1", self.server.port or 0)
        self.stored: list = []
        self.duplicates = 0

    def drain(self) -> int:
        """What a main thread does; returns how many messages there were."""
        count = 0
        while (message := self.inbox.pop()) is not None:
            count += 1
            if self.registry.accept_sequence(message.index, message.incarnation, message.sequence):
                self.stored.append(message)
            else:
                self.duplicates += 1
        return count

    def drain_until(self, done: Callable[[], bool], timeout_s: float = 60.0) -> None:
        def turn() -> bool:
            self.drain()
            return done()
        eventually(turn, timeout_s)

    def close(self) -> None:
        self.server.close(0)


@contextmanager
def fake_learner(folder: Path, listen: str | None = None, **cfg) -> Iterator[FakeLearner]:
    made = FakeLearner(folder, listen, **cfg)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def link(address: Address, name: str = "actor/0", role: str = "actor", token: str = TOKEN, start: bool = True,
         credentials=None, **options) -> Iterator[FleetConnection]:
    made = FleetConnection(GrpcChannel(address, token, credentials), name, role, **{"patience_s": 20.0, **options})
    try:
        made.hello()
        if start:
            made.start()
        yield made
    finally:
        made.close()


def proved(channel, token: str = TOKEN) -> tuple[tuple[str, str], ...]:
    """The metadata of calls by a process that knows the token."""
    from qfleet.transport.grpc_channel import Credential

    return Credential(channel, token, Address("127.0.0.1", 1)).prove().metadata


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Proxy:
    """A TCP line that can be cut. `fate(direction, data)` says what becomes of each piece: pass, cut, or drop."""

    def __init__(self, port: int, fate: Callable[[str, bytes], str] = lambda direction, data: "pass") -> None:
        self._target, self.fate, self.lost = port, fate, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._lines: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._lines += [near, far]
            threading.Thread(target=self._carry, args=(near, far, "request"), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, "reply"), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        try:
            while data := source.recv(65536):
                fate = self.fate(direction, data)
                self.lost += fate != "pass"
                if fate == "cut":
                    break
                if fate == "pass":
                    sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in self._lines:
            line.close()


class Luck:
    """Cuts the line by chance: requests before they arrive, replies after what they answer was done."""

    def __init__(self, seed: int, chance: float) -> None:
        self._rng, self._chance = random.Random(seed), chance
        self.over = False

    def __call__(self, direction: str, data: bytes) -> str:
        return "cut" if not self.over and len(data) > 30 and self._rng.random() < self._chance else "pass"


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


def certificate(folder: Path, name: str, authority: Path | None = None) -> tuple[Path, Path]:
    """Certificate and key for localhost, signed by `authority` (a stem) or by itself."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    sign = [] if authority is None else ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"]
    kind = "CA:TRUE" if authority is None else "CA:FALSE"
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30",
            "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext",
            f"basicConstraints=critical,{kind}", "-keyout", str(key), "-out", str(cert), *sign)
    return cert, key
