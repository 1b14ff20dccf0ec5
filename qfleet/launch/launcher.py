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
    """Starts the nodes of a run, and connects them.

    Attributes:
        folder: Directory that is removed if the driver is killed.
    """

    folder: Path

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None: ...

    @staticmethod
    def require() -> None:
        """Check that everything the launcher needs is installed.

        Raises:
            UserError: A package is missing.
        """

    def open(self, run_request: RunRequest, nodes: Sequence[Node]) -> None:
        """Prepare for all nodes at once; further actors may follow.

        Args:
            run_request: What the run is: its directory, and whether it is new.
            nodes: Nodes of the run.

        Raises:
            UserError: The nodes do not fit.
        """

    def start(self, node: Node, attempt: int, now: float, may_start: Callable[[], bool]) -> ProcessHandle:
        """Start a node.

        Args:
            node: The node.
            attempt: Number of the start of this node.
            now: Time of the supervisor's clock, seconds.
            may_start: The node begins its work when this returns True.

        Returns:
            Handle of the process.
        """

    def release(self, node: Node) -> None:
        """Give back what is reserved for an actor that will not be started again.

        Args:
            node: The actor.
        """

    def room(self) -> int | None:
        """Number of actors that fit, for launchers that determine it.

        Returns:
            Number of actors; None = as many as the configuration says.
        """

    def has_started(self) -> bool:
        """Whether the first node has begun its work, so that its exit is a failure.

        Returns:
            True once it has.
        """

    def result(self) -> str | None:
        """Result of the run.

        Returns:
            A JSON document; None while there is none.
        """

    def invitation(self) -> list[tuple[str, str]]:
        """Command by which other hosts join, if they can.

        Returns:
            Rows for the printed plan, as name and text.
        """

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
