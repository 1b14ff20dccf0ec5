"""What the wire of a fleet costs: weights to actors in milliseconds, experience in bytes and CPU time per Atari step.

    OMP_NUM_THREADS=1 python benchmarks/wire.py [--steps 20000] [--games Pong ...] [--out benchmarks/results/wire.json]

Weights: a server publishes 13 MB again and again to 1 and then to 16 actor processes, each with its own Link, which
exchange messages meanwhile as actors do. Two times: from publishing until an actor has the tensors (of 16: until the
last one has), and of that the fetch alone, which begins when an exchange has told of the new version.

Experience: an actor process plays 16 lanes of a game with random actions, each held for a few steps, through the real
Recorder (3-step, prioritised), Codec and Link, and sleeps where a network would choose; a learner process stores it in
a real replay. CPU time is that of threads, from /proc: emulators (with the time the actor spends on sending to and
receiving from them), recording (chunks, priorities, compression), the link on one side, calls and storing on the other.

Bars: 50 ms to one actor, 500 ms to sixteen; 0.5 KB per step in the mean of the games; recording, wire and storing
together at most 15 % of the emulators' CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed import describe_machine

from qfleet.actor.actor import Recorder
from qfleet.core.clock import StepClock
from qfleet.core.env import EnvSpec, Obs, VectorEnv
from qfleet.process.memory import retain_freed_memory
from qfleet.replay.host_store import HostReplay
from qfleet.runconfig import resolution
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_agent, make_env, make_layout
from qfleet.transport.address import socket_address
from qfleet.transport.client import FleetConnection
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.fleet_server import FleetServer
from qfleet.transport.grpc_channel import GrpcChannel
from qfleet.transport.inbox import Inbox, decode_message
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import Registry

GAMES = ("Pong", "Breakout", "SpaceInvaders", "Seaquest", "Qbert", "MontezumaRevenge", "Boxing", "Asterix")
LANES, HOLD, ACT_S, WARM_UP = 16, 0.3, 0.010, 2048
"""A Nature CNN on one core lets 16 lanes take about 1,000 steps a second: 10 of 16 ms are not the emulators'."""

BARS = {"one_actor_ms": 50, "sixteen_actors_ms": 500, "kb_per_step": 0.5, "share_of_emulators": 0.15}
TOKEN = "benchmark"
WEIGHTS_BYTES = 13_000_000


class LearnerEnd:
    """Published state, registry, inbox and server of a learner process, at a socket in `folder`."""

    def __init__(self, folder: Path, actors: int, steps: int = 1 << 62) -> None:
        self.published, self.registry = PublishedState("seed: 1\n", "{}", actors), Registry(actors, 30.0)
        self.inbox = Inbox(FleetConfig().inbox_messages, steps)
        self.socket = folder / "learner.sock"
        self.server = FleetServer(self.published, self.registry, self.inbox, FleetConfig(), self.socket, [TOKEN])
        self.server.start()

    def news(self) -> Iterator[Any]:
        """The messages that wait, each once."""
        while (message := self.inbox.pop()) is not None:
            if self.registry.accept_sequence(message.index, message.incarnation, message.sequence):
                yield message


@contextmanager
def child(*words: str) -> Iterator[subprocess.Popen[str]]:
    """This file in a process of its own, with pipes to talk through."""
    process = subprocess.Popen([sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# ---- Weights ----

def follow(place: str, name: str) -> None:
    """Be an actor that plays a little and says when which weights have come, until its input ends."""
    torch.set_num_threads(1)
    link = FleetConnection(GrpcChannel(socket_address(Path(place)), TOKEN), name)
    link.hello()
    asked: dict[str, float] = {}
    fetch = link._channel.fetch

    def timed(newer_than: int) -> Any:
        asked["at"] = time.monotonic()
        return fetch(newer_than)

    link._channel.fetch = timed  # type: ignore[method-assign]
    link.start()
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    version = -1
    while not over.wait(0.005):
        link.metrics.count_steps(LANES)
        if (found := link.weights.fetch(version)) is not None:
            version, now = found[0], time.monotonic()
            print(json.dumps([version, now, asked["at"]]), flush=True)
    link.close()


def weights_to(actors: int, rounds: int) -> dict[str, float]:
    """Milliseconds from publishing until all have it, and of the fetch alone, medians and worst."""
    state = {f"layer{i}": torch.randn(WEIGHTS_BYTES // 4 // 4) for i in range(4)}
    with tempfile.TemporaryDirectory() as folder:
        end = LearnerEnd(Path(folder), actors)
        over = threading.Event()

        def main_loop() -> None:
            while not over.wait(0.001):
                list(end.news())

        threading.Thread(target=main_loop, daemon=True).start()
        try:
            return _rounds(end, state, actors, rounds)
        finally:
            over.set()
            end.server.close(0)


def _rounds(end: LearnerEnd, state: dict[str, torch.Tensor], actors: int, rounds: int) -> dict[str, float]:
    whole, fetches = [], []
    with ExitStack() as stack:
        crowd = [stack.enter_context(child("--follow", str(end.socket), f"actor/{i}")) for i in range(actors)]
        for version in range(rounds + 1):
            began = time.monotonic()
            end.published.publish({name: value + version for name, value in state.items()}, version)
            told = [json.loads(each.stdout.readline()) for each in crowd if each.stdout is not None]
            assert all(line[0] == version for line in told)
            if version:  # the first round waits for processes to start
                whole.append(1000 * (max(line[1] for line in told) - began))
                fetches.append(1000 * (max(line[1] for line in told) - min(line[2] for line in told)))
            time.sleep(0.3)
    return {"published_ms": round(statistics.median(whole), 1), "worst_ms": round(max(whole), 1),
            "fetch_ms": round(statistics.median(fetches), 1)}


# ---- Experience ----

def settings(game: str) -> Any:
    return resolution.resolve("apex", [f"env.id={game}NoFrameskip-v4", f"env.lanes={LANES}", "env.threads=1",
                                    "replay.capacity=100000", "replay.samples_per_insert=1e12", "device=cpu"]).config


def store(folder: str, game: str, spec: str) -> None:
    """Be a learner: store what comes until the input ends, and tell what it was and what it cost."""
    torch.set_num_threads(1)
    made = EnvSpec.from_json(json.loads(spec))
    config = resolve_auto(settings(game), made)
    layout = make_layout(config, made)
    replay = HostReplay(layout, config.replay, 0, torch.device("cpu"))
    end = LearnerEnd(Path(folder), 1, LANES * config.replay.chunk_steps // 8)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    print("ready", flush=True)
    sums: Counter[str] = Counter()
    clock, before = time.thread_time, (0.0, 0.0)
    while not over.wait(0.001):
        for message in end.news():
            if not sums and replay.clock.steps >= WARM_UP:
                before = (time.process_time(), clock())
            since = clock()
            delivery = decode_message(message, layout)
            replay.clock.count_steps(delivery.steps)
            for packed, priority in delivery.chunks:
                replay.add_packed(packed, priority)
            if any(before):
                sums.update(steps=delivery.steps, bytes=message.ByteSize(), messages=1, chunks=len(delivery.chunks))
                sums["storing"] += clock() - since
    sums["calls"] = time.process_time() - before[0] - (clock() - before[1])
    print(json.dumps(sums))
    end.server.close(0)


def thread_seconds() -> dict[str, float]:
    """CPU time of every thread of this process."""
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9
            for task in Path("/proc/self/task").iterdir()}


def play(folder: str, game: str, steps: int) -> None:
    """Be an actor that plays at random; tells what its parts cost."""
    torch.set_num_threads(1)
    config = settings(game)
    before = set(thread_seconds())
    env = make_env(config.env, LANES)
    first = env.reset(range(LANES))  # here, for it costs as much as thousands of steps
    emulators = set(thread_seconds()) - before
    layout, agent = make_layout(config, env.spec), make_agent(config, env.spec)
    with child("--store", folder, game, json.dumps(env.spec.to_json())) as learner:
        assert learner.stdin is not None and learner.stdout is not None and learner.stdout.readline() == "ready\n"
        link = FleetConnection(GrpcChannel(socket_address(Path(folder) / "learner.sock"), TOKEN), "actor/0")
        link.hello()
        recorder = Recorder(agent, layout, LANES, link.replay(layout, LANES), True)
        link.start()
        player = Player(env, recorder, link.clock, first)
        player.lap(WARM_UP)
        start = thread_seconds()
        on_env, recording = player.lap(steps)
        end = thread_seconds()  # of a thread that ended nothing is known
        link.close(5.0)
        learner.stdin.close()
        told = json.loads(learner.stdout.readline())
    spent = {name: value - start.get(name, 0.0) for name, value in end.items()}
    main = str(threading.get_native_id())
    parts = {"emulators": on_env + sum(spent.get(name, 0.0) for name in emulators), "recording": recording,
             "link": sum(value for name, value in spent.items() if name not in emulators | {main})}
    per_step = {name: 1e6 * value / steps for name, value in parts.items()}
    per_step |= {name: 1e6 * told[name] / told["steps"] for name in ("calls", "storing")}
    ours = sum(value for name, value in per_step.items() if name != "emulators")
    print(json.dumps({"game": game, "bytes_per_step": round(told["bytes"] / told["steps"], 1),
                      "messages": told["messages"], "chunks": told["chunks"],
                      "cpu_us_per_step": {name: round(value, 1) for name, value in per_step.items()},
                      "share_of_emulators": round(ours / per_step["emulators"], 4)}))


class Player:
    """Plays all lanes at random and records it."""

    def __init__(self, env: VectorEnv, recorder: Recorder, clock: StepClock, obs: Obs) -> None:
        self.env, self.recorder, self.clock, self.obs = env, recorder, clock, obs
        self.rng = np.random.default_rng(0)
        self.last, self.action = np.zeros(LANES, bool), np.zeros(LANES, np.int64)

    def lap(self, steps: int) -> tuple[float, float]:
        """Play so many steps; the main thread's seconds with the emulators and with recording."""
        actions, clock, rng = self.env.spec.num_actions, time.thread_time, self.rng
        on_env = recording = 0.0
        for _ in range(steps // LANES):
            self.action = np.where(rng.random(LANES) < HOLD, rng.integers(0, actions, LANES), self.action)
            choice = (self.action.astype(np.int32), {"distribution": rng.random((LANES, actions), np.float32)})
            time.sleep(ACT_S)
            while not self.recorder.deliver():
                time.sleep(0.001)
            one = clock()
            self.env.send(self.action)
            out = self.env.recv()
            two = clock()
            alive = ~self.last
            self.clock.count_steps(int(alive.sum()))
            self.recorder.record_row(self.obs, choice, out.reward * alive, out.discount * alive, self.last)
            on_env, recording = on_env + two - one, recording + clock() - two
            self.obs, self.last = out.obs, out.last
        return on_env, recording


def experience(game: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, child("--play", folder, game, str(steps)) as actor:
        assert actor.stdout is not None
        row: dict[str, Any] = json.loads(actor.stdout.readline())
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps of each game")
    parser.add_argument("--rounds", type=int, default=20, help="publications of weights")
    parser.add_argument("--games", nargs="*", default=GAMES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--follow", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--store", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--play", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    retain_freed_memory()  # as the processes of a fleet do
    if args.follow:
        return follow(*args.follow)
    if args.store:
        return store(*args.store)
    if args.play:
        return play(args.play[0], args.play[1], int(args.play[2]))
    weights = {str(actors): weights_to(actors, args.rounds) for actors in (1, 16) if args.rounds}
    print(json.dumps(weights), flush=True)
    rows = []
    for game in args.games:
        rows.append(experience(game, args.steps))
        print(json.dumps(rows[-1]), flush=True)
    result: dict[str, Any] = {"bars": BARS, "weights_to_actors": weights}
    if rows:
        result |= {"kb_per_step": round(statistics.mean(row["bytes_per_step"] for row in rows) / 1000, 3),
                   "share_of_emulators": round(statistics.mean(row["share_of_emulators"] for row in rows), 4),
                   "worst_share": max(row["share_of_emulators"] for row in rows)}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result | {"games": rows, "steps": args.steps, "machine": describe_machine()},
                                       indent=1)
                            + "\n")
    return None


if __name__ == "__main__":
    main()
