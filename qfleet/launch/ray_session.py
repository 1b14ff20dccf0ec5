"""Ray connection of a run: an existing cluster, or a local Ray that ends with the run.

A local Ray requires a token, listens only where Ray must, has no dashboard unless configured, and limits its object
store as configured. Its files are in the run's private folder.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qfleet.accel.threads import usable_cores
from qfleet.core.errors import UserError
from qfleet.process.signals import sighup_ignored
from qfleet.transport.ray_config import RayConfig
from qfleet.transport.ray_host import RayHost
from qfleet.transport.security import write_token

log = logging.getLogger(__name__)

MAX_FOLDER_BYTES = 40
"""Longest folder path, bytes: Ray creates sockets below it, whose paths the system limits to 107."""

CALLS_AT_ONCE = 64
HEAD = "node:__internal_head__"
PLACED_S = 60
LISTENER_S = 10.0


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UserError("launcher=ray needs Ray: pip install 'qfleet[ray]'")


def address_of(cfg: RayConfig) -> str | None:
    return cfg.address or os.environ.get("RAY_ADDRESS") or None


def node_address() -> str:
    """Address of this node, as known to Ray."""
    import ray

    return str(ray.util.get_node_ip_address())


class RaySession:
    """Connection to Ray. `own`: this Ray was started for the run, and ends with it."""

    def __init__(self, cfg: RayConfig, folder: Path, cpus: float) -> None:
        require_ray()
        address = address_of(cfg)
        self.own = address is None and not ("ray" in sys.modules and sys.modules["ray"].is_initialized())
        self._shared = not self.own and address is None  # the caller had connected already
        self._groups: list[Any] = []
        quiet: dict[str, Any] = {"namespace": "qfleet", "log_to_driver": False, "configure_logging": False}
        if self.own:
            _secure()
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            if self.own:
                with sighup_ignored():
                    ray.init(address="local", num_cpus=max(usable_cores(), round(cpus + 0.5)), _temp_dir=str(folder),
                             include_dashboard=cfg.dashboard, object_store_memory=cfg.object_store_mb << 20, **quiet)
            elif not self._shared:
                _require_listener(str(address))
                ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise UserError(f"no Ray at {address or 'this host'}: {why}; is it running "
                            "(ray status), and is its token in RAY_AUTH_TOKEN_PATH?") from None

    def reserve(self, bundles: Sequence[Mapping[str, float]], strategy: str, here: bool) -> Any:
        """Reserve a placement group; `here`: on this node. UserError if the cluster lacks the resources."""
        import ray
        from ray.util import placement_group, remove_placement_group

        mine = ray.get_runtime_context().get_node_id()
        names = (name for node in ray.nodes() if node["NodeID"] == mine for name in node["Resources"])
        pin = {name: 0.001 for name in names if name.startswith("node:") and name != HEAD} if here else {}
        group = placement_group([dict(bundle) | pin for bundle in bundles], strategy=strategy)
        if not any(group.wait(1) for _ in range(PLACED_S)):  # Ctrl-C takes effect between two waits
            remove_placement_group(group)
            needed = "; ".join(", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles)
            raise UserError(f"the cluster has no room{' on this node' * here} for the learner and the evaluator, which "
                            f"need {needed}: free resources, or lower ray.learner_cpus, ray.learner_gpus and "
                            "ray.evaluator_cpus" + ", or allow other nodes with ray.learner_any_node=true" * here)
        self._groups.append(group)
        return group

    def create(self, name: str, log_path: Path, needs: Mapping[str, float], group: Any = None, bundle: int = 0) -> Any:
        """Create a Ray actor, in its bundle of a group or spread over the nodes; it starts when resources are free."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = "SPREAD" if group is None else PlacementGroupSchedulingStrategy(group, bundle)
        custom = {key: amount for key, amount in needs.items() if key not in ("CPU", "GPU", "memory")}
        options: dict[str, Any] = {
            "name": name, "num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "resources": custom,
            "memory": needs.get("memory"), "max_restarts": -1, "max_task_retries": 0,
            "max_concurrency": CALLS_AT_ONCE, "scheduling_strategy": strategy}
        paths = [os.getcwd(), *filter(None, sys.path)]
        return ray.remote(**options)(RayHost).remote(str(log_path.resolve()), paths)

    def room(self, needs: Mapping[str, float], group: Any, bundles: Sequence[Mapping[str, float]]) -> int:
        """Number of actors with these needs that the live nodes have resources for, besides the bundles of a group."""
        import ray
        from ray.util import placement_group_table

        free = {node["NodeID"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
        for index, where in placement_group_table(group)["bundles_to_node_id"].items():
            for name, amount in bundles[index].items() if where in free else ():
                free[where][name] = free[where].get(name, 0.0) - amount
        return sum(max(0, min(int(node.get(name, 0.0) / amount + 1e-6) for name, amount in needs.items()))
                   for node in free.values())

    def close(self) -> None:
        """Remove the placement groups, and shut down a Ray of our own."""
        import ray
        from ray.util import remove_placement_group

        if not ray.is_initialized():
            return
        for group in self._groups:
            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)
        if not self._shared:
            ray.shutdown()


def _require_listener(address: str) -> None:
    """OSError at once if nothing listens at HOST:PORT: Ray itself would retry for a minute and print warnings.

    A Ray on this host may listen on the node's address only.
    """
    found = re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)", address)
    if found is None:  # auto, for instance
        return
    host, port = found[1], int(found[2])
    hosts = [host, node_address()] if host in ("localhost", "127.0.0.1", "::1") else [host]
    for number, each in enumerate(hosts, start=1):
        try:
            socket.create_connection((each, port), LISTENER_S).close()
            return
        except OSError:
            if number == len(hosts):
                raise


def _secure() -> None:
    """Make a local Ray require a token. Ray reads these variables when it is first imported."""
    if os.environ.get("RAY_AUTH_MODE"):
        return  # set by the user
    if "ray" in sys.modules and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        raise UserError("launcher=ray starts a Ray that requires a token, which must be set before ray is imported: "
                        "set RAY_AUTH_MODE yourself, import ray later, or connect to your own Ray with ray.init")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    token = cache / "qfleet" / "ray_token"
    if not token.exists():
        token.parent.mkdir(parents=True, exist_ok=True)
        # FileExistsError: another run was first.
        with tempfile.TemporaryDirectory(dir=token.parent) as folder, suppress(FileExistsError):
            write_token(fresh := Path(folder) / "token")
            os.link(fresh, token)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
