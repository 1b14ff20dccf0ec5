"""What starts the nodes of a run: `LocalLauncher`, `RayLauncher`, or a class of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from qfleet.config import load_attribute
from qfleet.core.errors import UserError
from qfleet.launch.local_launcher import LocalLauncher
from qfleet.launch.ray_launcher import RayLauncher
from qfleet.launch.run_request import RunRequest
from qfleet.launch.topology import Node
from qfleet.process.handle import ProcessHandle
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory

METHODS = ("require", "open", "start", "release", "room", "has_started", "result", "invitation", "close")


class Launcher(Protocol):
    """Starts the nodes of a run, and connects them. `folder` is removed if the driver is killed."""

    folder: Path

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None: ...

    @staticmethod
    def require() -> None:
        """UserError if what it needs is not installed."""

    def open(self, run_request: RunRequest, nodes: Sequence[Node]) -> None:
        """Prepare for all nodes at once; further actors may follow. UserError if they do not fit."""

    def start(self, node: Node, attempt: int, now: float, may_start: Callable[[], bool]) -> ProcessHandle:
        """Start a node for the `attempt`-th time; its work begins when `may_start`. `now` is the supervisor's clock."""

    def release(self, node: Node) -> None:
        """Give back what is reserved for an actor that will not be started again."""

    def room(self) -> int | None:
        """Number of actors that fit, if it determines how many there are; None: as many as the config says."""

    def has_started(self) -> bool:
        """True once the first node has begun its work, so that its exit is a failure."""

    def result(self) -> str | None:
        """Result of the run as JSON, None while there is none."""

    def invitation(self) -> list[tuple[str, str]]:
        """Rows with the command by which other hosts join, if they can."""

    def close(self) -> None:
        """End what `open` began. May be called at any time."""


LAUNCHERS: dict[str, type[Launcher]] = {"local": LocalLauncher, "ray": RayLauncher}


def launcher_class(config: RunConfig) -> type[Launcher]:
    """Class of the launcher, perhaps the user's."""
    name = config.launcher
    if name in LAUNCHERS:
        return LAUNCHERS[name]
    found = load_attribute(name)
    if missing := [method for method in METHODS if not callable(getattr(found, method, None))]:
        raise UserError(f"launcher={name}: it has no method {' and no '.join(missing)}: name a class that implements "
                        "Launcher (qfleet/launch/launcher.py), such as a subclass of LocalLauncher")
    return found
