"""A Ray cluster for tests, with real raylets, in a process of its own: this one never imports Ray.

    with RayYard(folder) as yard:  yard.add(cpus=1);  yard.remove();  yard.pulse();  yard.run("train", ...)

As a program it is that process: it obeys lines of JSON on stdin and answers each with one on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleet_runs import processes
from real_runs import ENVIRONMENT, command

PATHS = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
LOSSY = {"RAY_testing_rpc_failure": json.dumps({"CoreWorkerService.grpc_client.PushTask": {
    "num_failures": -1, "req_failure_prob": 10, "resp_failure_prob": 30, "in_flight_failure_prob": 0}})}
"""Of the calls between workers of a node so many per cent are lost: before they are made, or the answers to them."""

HASTY = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
"""Ray looks more often whether a node is there than the three seconds of its own, and gives it up sooner."""


class RayRun:
    """`qfleet train` or `resume` as a driver of Ray; what it says is gathered in a file."""

    def __init__(self, words: list[str], cwd: Path, env: dict[str, str]) -> None:
        self.cwd = cwd
        self.errors = cwd / "stderr.txt"
        with self.errors.open("wb") as errors:
            self.head = subprocess.Popen(command(*words, "--quiet", "--json"), cwd=cwd, text=True,
                                         stdout=subprocess.PIPE, stderr=errors, env=ENVIRONMENT | env)

    def __enter__(self) -> RayRun:
        return self

    def __exit__(self, *failure: object) -> None:
        self.head.kill()
        self.head.communicate()

    @property
    def complaints(self) -> str:
        return self.errors.read_text()

    def until(self, ready: Callable[[], Any], timeout: float = 180) -> Any:
        """Wait for something that the living run is to bring about, and return it."""
        deadline = time.monotonic() + timeout
        while not (found := ready()):
            assert self.head.poll() is None, f"ended with {self.head.returncode}: {self.complaints}"
            assert time.monotonic() < deadline, f"not in {timeout} s\n{self.complaints}"
            time.sleep(0.05)
        return found

    def ended(self, timeout: float = 180) -> tuple[int, dict[str, Any]]:
        out, _ = self.head.communicate(timeout=timeout)
        return self.head.returncode, json.loads(out) if out.strip() else {}


class RayYard:
    """The cluster, from the test's side."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, folder / "token"
        self.token.touch(0o600)
        self.token.write_text("t" * 64)
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token), "PYTHONPATH": PATHS,
                    "RAY_USAGE_STATS_ENABLED": "0"}
        own = {"RAY_TMPDIR": str(folder), **HASTY}
        self._log = (folder / "yard.txt").open("wb")
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._log, text=True, cwd=folder, start_new_session=True,
                                         env=ENVIRONMENT | self.env | own)
        self.address = self._ask("start")["address"]

    def __enter__(self) -> RayYard:
        return self

    def __exit__(self, *failure: object) -> None:
        with suppress(Exception):
            self._ask("stop")
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._log.close()

    def add(self, cpus: int, env: dict[str, str] | None = None) -> None:
        """A node more."""
        self._ask("add", cpus=cpus, env=env or {})

    def remove(self) -> None:
        """The node that was added last dies without a word."""
        self._ask("remove")

    def pulse(self) -> dict[str, Any] | None:
        """A run's own account of itself; None while nobody gives one."""
        return self._ask("pulse")["pulse"]

    def actors(self) -> list[str]:
        return self._ask("actors")["actors"]

    def pid(self, name: str) -> int | None:
        """The process of a role; None between two."""
        return self._ask("pid", name=name)["pid"]

    def flood(self, repeats: int) -> dict[str, Any]:
        """Have somebody on the lossy node tell numbers, until so many messages came again since their answers were
        lost: what is `stored` of them in the end, the number that was `told` last, and how many came again."""
        return self._ask("flood", repeats=repeats)

    def run(self, *words: str, folder: str) -> RayRun:
        """The command line, connected to this cluster."""
        cwd = self.folder / folder
        cwd.mkdir(exist_ok=True)
        return RayRun(list(words), cwd, self.env | {"RAY_ADDRESS": self.address})

    def _ask(self, what: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, (self.folder / "yard.txt").read_text()
        return json.loads(line)


def alive(pids: list[int]) -> list[int]:
    known = {pid for pid, _ in processes()}
    return [pid for pid in pids if pid in known]


def store(host: Any) -> int:
    """The job of a learner that learns nothing: it keeps what is told, as `Intake` does, and counts repetitions."""
    from qfleet.transport.fleet_server import FleetService
    from qfleet.transport.inbox import Inbox
    from qfleet.transport.published_state import PublishedState
    from qfleet.transport.ray_channel import fleet_methods, serve_calls
    from qfleet.transport.registry import Registry

    registry, inbox = Registry(1, 30.0), Inbox(4)
    stored: list[float] = []
    repeats = 0
    with serve_calls(host, fleet_methods(FleetService(PublishedState("", "{}", 1), registry, inbox, 1 << 20))):
        while True:
            while (message := inbox.pop()) is not None:
                if registry.accept_sequence(message.index, message.incarnation, message.sequence):
                    stored += [episode.ret for episode in message.episodes]
                else:
                    repeats += 1
            host.message = json.dumps({"stored": stored, "repeats": repeats})
            time.sleep(0.005)


def tell(host: Any, learner: Any) -> int:
    """The job of a member that has nothing but numbers to tell, each in a message of its own, until it shall leave."""
    from qfleet.core.episode import Episode
    from qfleet.transport.client import FleetConnection
    from qfleet.transport.ray_channel import RayChannel

    link = FleetConnection(RayChannel(learner, "the learner"), "actor/0", patience_s=120.0)
    link.hello()
    link.start()
    over = threading.Event()
    host.heartbeat.on_orphan(over.set)
    number = 0
    while link.failed is None and not over.is_set():
        link.metrics.episode(Episode(float(number), 1))
        while link.failed is None and not (link.metrics.empty and link._message is None):
            time.sleep(0.005)
        host.message = str(number)
        number += 1
    link.close(5.0)
    if link.failed is not None:
        raise link.failed
    return 0


class Obeying:
    """The cluster, in its process."""

    def __init__(self) -> None:
        self.added: list[Any] = []

    def start(self) -> dict[str, Any]:
        import ray
        from ray.cluster_utils import Cluster

        os.mkdir("ray")  # RAY_TMPDIR is here, and all of it goes with the test's own folder
        self.cluster = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 3, "object_store_memory": 100 << 20, "include_dashboard": False})
        ray.init(address=self.cluster.address, namespace="qfleet", log_to_driver=False)
        return {"address": self.cluster.address}

    def add(self, cpus: int, env: dict[str, str]) -> dict[str, Any]:
        self.added.append(self.cluster.add_node(num_cpus=cpus, object_store_memory=100 << 20, env_vars=env or None,
                                                resources={"lossy": 1} if env else None))
        return {}

    def flood(self, repeats: int) -> dict[str, Any]:
        import ray

        from qfleet.transport.ray_host import RayHost

        kind = ray.remote(max_restarts=0, max_concurrency=16)(RayHost)
        learner, sender = kind.remote("", []), kind.options(resources={"lossy": 1}).remote("", [])
        ray.get([learner.begin.remote(1, store), sender.begin.remote(1, tell, learner)])
        deadline = time.monotonic() + 150
        while (look := ray.get(sender.look.remote())).code is None:  # calls of this process are not lost
            word = ray.get(learner.look.remote()).message
            if (word and json.loads(word)["repeats"] >= repeats) or time.monotonic() > deadline:
                sender.leave.remote()
            time.sleep(0.1)
        found = json.loads(ray.get(learner.look.remote()).message)
        for each in (learner, sender):
            ray.kill(each)
        return found | {"code": look.code, "told": look.message}

    def remove(self) -> dict[str, Any]:
        self.cluster.remove_node(self.added.pop(), allow_graceful=False)
        return {}

    def actors(self) -> dict[str, Any]:
        from ray.util import list_named_actors

        return {"actors": [each["name"] for each in list_named_actors(all_namespaces=True)]}

    def pid(self, name: str) -> dict[str, Any]:
        import ray

        full = next(each for each in self.actors()["actors"] if each.endswith(f"/{name}"))
        try:
            return {"pid": ray.get(ray.get_actor(full).look.remote(), timeout=10).pid}
        except ray.exceptions.RayError:
            return {"pid": None}

    def pulse(self) -> dict[str, Any]:
        import grpc
        import ray
        from google.protobuf.json_format import MessageToDict

        from qfleet.transport.ray_channel import RayChannel

        ends = ("/coordinator", "/learner", "/learner/0")
        found = [name for end in ends for name in self.actors()["actors"] if name.endswith(end)]
        try:
            pulse = RayChannel(ray.get_actor(found[0]), "the learner").pulse(5.0)
        except (IndexError, ValueError, grpc.RpcError):
            return {"pulse": None}
        return {"pulse": MessageToDict(pulse, always_print_fields_with_no_presence=True,
                                       preserving_proto_field_name=True)}

    def stop(self) -> dict[str, Any]:
        import ray

        ray.shutdown()
        self.cluster.shutdown()
        return {}


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    obeying = Obeying()
    for order in sys.stdin:
        words = json.loads(order)
        answer = getattr(obeying, words.pop("do"))(**words)
        print(json.dumps(answer), file=out, flush=True)
    obeying.stop()  # also when the test was killed
