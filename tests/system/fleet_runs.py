"""Fleets to be killed: real runs in processes, who lives in them, what they say, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from real_runs import ENVIRONMENT, command, newest, records

from qfleet import api
from qfleet.replay.segments import read_segments
from qfleet.runconfig.build import make_layout
from qfleet.transport.address import parse_address
from qfleet.transport.grpc_channel import GrpcChannel

SMALL = ["agent.hidden=[32]", "env.lanes=2", "replay.chunk_steps=8", "replay.min_steps=64", "learner.batch_size=8",
         "replay.samples_per_insert=4", "replay.capacity=20000", "eval.episodes=2", "run.tensorboard=false",
         "run.log_period_steps=100", "run.threads=1", "stop_at=null", "device=cpu"]
"""Without the number of processes, which each run sets."""
GENTLE = "env.wrappers=[fleet_envs:Gentle]"
"""For fleets that run until something has happened: they leave the cores to processes that are starting."""
PATHS = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


class FleetRun:
    """`qfleet train` or `resume` in a process of its own, quiet, with a private TMPDIR so that leavings are seen."""

    def __init__(self, *words: str, cwd: Path, run: str = "x", **env: str) -> None:
        self.run = cwd / "runs" / run
        self.tmp = cwd / "tmp"
        self.tmp.mkdir(exist_ok=True)
        self.errors = cwd / "stderr.txt"
        with self.errors.open("wb") as errors:
            self.head = subprocess.Popen(
                command(*words, "--quiet", "--json"), cwd=cwd, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=ENVIRONMENT | {"TMPDIR": str(self.tmp), "PYTHONPATH": PATHS} | env)
        self._caller: GrpcChannel | None = None

    def __enter__(self) -> FleetRun:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._caller is not None:
            self._caller.close()
        pids = [self.head.pid, *self.everybody()]
        self.head.kill()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.head.communicate()

    # ---- Who is there ----

    def pids(self) -> dict[str, int]:
        """The living children by name: learner, actor/0, ..., evaluator; of a parameter server coordinator, shard/0,
        ..., learner/0, ..., evaluator."""
        found = {}
        for pid, words in processes(self.head.pid):
            if "_member" in words:
                role, _, *name = words[words.index("_member") + 1:]
                found[name[0] or role] = pid  # a learner and a coordinator have no name: the line ends there
        return found

    def everybody(self) -> list[int]:
        """All processes of the run but the head, also when it is dead: those that know its private folder."""
        return [pid for pid, words in processes() if any(str(self.tmp) in word for word in words)]

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    # ---- What it says ----

    def pulse(self) -> Any:
        """The learner's own account, None while there is nobody who could give it."""
        try:
            if self._caller is None:
                private = next(self.tmp.glob("qfleet-*"))
                token = (private / "token").read_text().strip()
                socket = private / "fleet.sock"
                if not token or not socket.exists():  # a call that comes too early would be followed by a back-off
                    return None
                self._caller = GrpcChannel(parse_address(f"unix:{socket}"), token)
            return self._caller.pulse(2.0)
        except (grpc.RpcError, StopIteration, OSError):
            return None

    def now(self) -> Any:
        """The same, of a fleet that is to answer."""
        return self.until(self.pulse)

    def member(self, name: str) -> Any:
        pulse = self.pulse()
        return next((each for each in pulse.members if each.name == name), None) if pulse else None

    def metrics(self) -> list[dict[str, Any]]:
        try:
            lines = (self.run / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run / "checkpoints").glob("step-*"))

    @property
    def complaints(self) -> str:
        return self.errors.read_text()

    def log(self, name: str) -> str:
        return (self.run / "logs" / f"{name}.log").read_text()

    # ---- What comes of it ----

    def until(self, ready: Callable[[], Any], timeout: float = 150) -> Any:
        """Wait for something that the living fleet is to bring about, and return it."""
        deadline = time.monotonic() + timeout
        while not (found := ready()):
            assert self.head.poll() is None, f"ended with {self.head.returncode}: {self.complaints}"
            assert time.monotonic() < deadline, f"not in {timeout} s; {self.pulse()}\n{self.complaints}"
            time.sleep(0.02)
        return found

    def learns(self, timeout: float = 150) -> int:
        """Wait until updates are being made by now; how many there have been."""
        first = self.until(self.pulse, timeout).updates
        now = self.until(lambda: (now := self.pulse()) and now.updates > first and now, timeout)
        return int(now.updates)

    def ended(self, timeout: float = 150) -> tuple[int, dict[str, Any]]:
        """Wait for the end: exit code and the result, empty if there is none."""
        out, _ = self.head.communicate(timeout=timeout)
        return self.head.returncode, json.loads(out) if out.strip() else {}

    def assert_gone(self, within: float = 3.0) -> None:
        """Nobody and nothing of the fleet is left."""
        deadline = time.monotonic() + within
        while (self.everybody() or list(self.tmp.glob("qfleet-*"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.everybody(), [words for pid, words in processes() if pid in self.everybody()]
        assert not list(self.tmp.iterdir())


def stored(run: Path) -> tuple[dict[int, list[int]], int]:
    """Observations of `Ledger` in the replays of a run's last checkpoint: who -> when; those that a chunk begins
    windows with. Also the rows of a chunk."""
    agent, seen = api.load(run, which="latest"), defaultdict(list)
    layout = make_layout(agent.config, agent.spec)
    for _, packed in read_segments(newest(run).segments(), layout):
        for name, t in packed.dense["obs.obs"][:layout.chunk_steps]:
            seen[int(name)].append(int(t))
    return seen, layout.rows


def processes(parent: int | None = None) -> list[tuple[int, list[str]]]:
    """(pid, command line) of every living process, or of the children of one."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX" and parent in (None, int(fields[1])):
                found.append((int(folder.name), (folder / "cmdline").read_text().split("\0")))
    return found


def assert_goes_forward(run: Path) -> None:
    """No moment of the run is recorded twice, and none after a later one, whatever died in between.

    The last record may show the steps of the one before: learning goes on between two messages. An evaluation that was
    under way elsewhere when learning ended is booked then, at the same moment as the last one.
    """
    for evaluated in (False, True):
        moments = [(record["step"], record["updates"]) for record in records(run)
                   if ("eval/mean_reward" in record) == evaluated]
        assert moments == sorted(moments), moments
        assert all(moments.count(moment) <= 1 + evaluated for moment in moments), moments
        assert [updates for _, updates in moments] == sorted(updates for _, updates in moments)
