"""Local launcher: nodes are processes of this host, connected by sockets in a private folder.

The folder holds the driver's request, the tokens, the sockets, where ranks meet, and the result of the run.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from qfleet.launch.endpoint import GrpcEndpoint
from qfleet.launch.run_request import RunRequest, learner_socket
from qfleet.launch.topology import Node, Role, actor_assignment, count
from qfleet.process.handle import ChildSpec, LocalProcess, ProcessHandle, child_environment
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.runs.find import acting_part, foreign_names
from qfleet.sync.process_group import network_interface
from qfleet.transport.address import Address
from qfleet.transport.security import write_token


class LocalLauncher:
    """Implements `Launcher`."""

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory
        self._nodes: Sequence[Node] = ()
        self.folder = Path(tempfile.mkdtemp(prefix="qfleet-"))  # readable by its owner only

    @staticmethod
    def require() -> None:
        """UserError if something is not installed."""

    def open(self, run_request: RunRequest, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        run_request.write(self.folder)
        write_token(self.folder / RunRequest.TOKEN_FILE)
        write_token(self.folder / RunRequest.JOIN_TOKEN_FILE)

    def start(self, node: Node, attempt: int, now: float, may_start: Callable[[], bool]) -> ProcessHandle:
        argv = [sys.executable, "-m", "qfleet", "_member", node.main, *self.arguments(node, attempt)]
        environment = child_environment() | (_rank_environment(node) if node.main == "rank" else {})
        child = ChildSpec(node.name, argv, environment, node.log_path(self._directory.path))
        return LocalProcess(child, attempt, now)

    def arguments(self, node: Node, attempt: int) -> list[str]:
        """Arguments of the main function of a node, on the command line."""
        if node.main == "rank":
            return [str(self.folder), f"{node.index}/{count(self._nodes, Role.LEARNER)}", str(attempt)]
        if node.main in ("learner", "coordinator", "shard"):
            return [str(self.folder), *([node.name] if node.main == "shard" else [])]
        videos = node.role is Role.EVALUATOR and self._config.eval.video_period
        return [*self._endpoint(node).to_argv(), *(
            ["--videos", str(self._directory.videos.resolve())] if videos else [])]

    def release(self, node: Node) -> None: ...

    def room(self) -> int | None:
        return None

    def has_started(self) -> bool:
        return (self.folder / RunRequest.ENDPOINT_FILE).exists()

    def result(self) -> str | None:
        try:
            return (self.folder / RunRequest.RESULT_FILE).read_text()
        except FileNotFoundError:
            return None

    def invitation(self) -> list[tuple[str, str]]:
        fleet = self._config.fleet
        if fleet.address is None or not self.has_started():
            return []
        port = json.loads((self.folder / RunRequest.ENDPOINT_FILE).read_text())["port"]
        host = os.uname().nodename if fleet.address.is_wildcard else fleet.address.host
        argv = ["qfleet", "join", fleet.advertise or str(Address(host, port)),
                "--token-file", fleet.token_file or str(self.folder / RunRequest.JOIN_TOKEN_FILE)]
        if fleet.tls_cert:
            argv += ["--tls-ca", fleet.tls_cert]
        if fleet.tls_ca:
            argv += ["--tls-cert", "YOUR.pem", "--tls-key", "YOUR.key"]
        foreign = foreign_names(acting_part(self._config.model_dump(mode="json")))
        if not fleet.tls_cert and not fleet.address.is_loopback and foreign:
            argv += ["--trust"]
        return [("join", shlex.join(argv))]

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _endpoint(self, node: Node) -> GrpcEndpoint:
        """Endpoint of the node that `node` calls."""
        called = next(each for each in self._nodes if each.name == node.calls[0])
        assignment = actor_assignment(self._config)
        service = assignment.own_service(called.index) if called.role is Role.LEARNER else None
        socket = learner_socket(self.folder, service)
        return GrpcEndpoint(
            f"unix:{socket}", node.name, str(self.folder / RunRequest.TOKEN_FILE),
            self._config.fleet.reconnect_timeout_s, siblings=max(1, count(self._nodes, Role.ACTOR)))


def _rank_environment(node: Node) -> dict[str, str]:
    """Environment of a rank. Ranks connect to each other on this host only: their connections require no password."""
    name = network_interface("127.0.0.1")
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name else ()
    return {"QFLEET_RANK": str(node.index), **{each: os.environ.get(each, str(name)) for each in variables}}
