"""The private folder of a run on this host: the driver's request, tokens, sockets, ports, and the result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from qfleet.runconfig import resolution
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory, replace_text


@dataclass(frozen=True)
class RunRequest:
    """Request of the driver to the processes of the run, as a file in their private folder."""

    directory: str
    spec: dict[str, Any]
    origin: dict[str, Any]

    REQUEST_FILE: ClassVar = "request.json"
    RESULT_FILE: ClassVar = "result.json"
    ENDPOINT_FILE: ClassVar = "endpoint.json"
    SOCKET_FILE: ClassVar = "fleet.sock"
    TOKEN_FILE: ClassVar = "token"  # of the run's own processes
    JOIN_TOKEN_FILE: ClassVar = "join-token"  # for joining members, if the config names no file

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(Path(self.directory))

    def config(self) -> RunConfig:
        """The config that the driver has written to the run directory."""
        return resolution.resolve(str(self.run.config), []).config

    def write(self, private: Path) -> None:
        replace_text(private / self.REQUEST_FILE, json.dumps(asdict(self)))

    @staticmethod
    def read(private: Path) -> RunRequest:
        return RunRequest(**json.loads((private / RunRequest.REQUEST_FILE).read_text()))


def learner_socket(private: Path, index: int | None) -> Path:
    """Socket of a learner's own service; None: of the run's main service."""
    return private / (RunRequest.SOCKET_FILE if index is None else f"learner-{index}.sock")


def learner_endpoint(private: Path, index: int | None) -> Path:
    """File with the port of a service; None: of the run's main service."""
    return private / (RunRequest.ENDPOINT_FILE if index is None else f"learner-{index}.json")


def shard_socket(private: Path, index: int) -> Path:
    """Socket of a shard of a parameter server."""
    return private / f"shard-{index}.sock"


def former_port(endpoint_file: Path) -> int | None:
    """Port of a service, perhaps of one that has died; None before its first start."""
    try:
        port: int | None = json.loads(endpoint_file.read_text())["port"]
        return port
    except FileNotFoundError:
        return None
