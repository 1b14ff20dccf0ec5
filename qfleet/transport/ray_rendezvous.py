"""Rendezvous of ranks by a Ray actor, reachable through Ray only, which asks for its token.

torch's TCPStore listens on all addresses of a host and accepts reads and writes without authentication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qfleet.sync.process_group import RankLost

RETRY_S = 0.1


class KeyValueActor:
    """The Ray actor: values by key. No call blocks, and each may be repeated if its reply was lost."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def find(self, keys: Sequence[str]) -> list[bytes] | None:
        """Values of all keys, or None while one is missing."""
        return [self._values[key] for key in keys] if all(key in self._values for key in keys) else None


@dataclass(frozen=True)
class RayRendezvous:
    """Implements `process_group.Rendezvous`: a rank's handle to the `KeyValueActor`."""

    actor: Any

    def put(self, key: str, value: bytes, timeout_s: float) -> None:
        self._call(lambda: self.actor.put.remote(key, value), timeout_s)

    def find(self, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        found: list[bytes] | None = self._call(lambda: self.actor.find.remote(list(keys)), timeout_s)
        return found

    def _call(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Result of a call, which is repeated if Ray loses it."""
        import ray

        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return ray.get(call(), timeout=max(RETRY_S, deadline - time.monotonic()))
            except (ray.exceptions.RayError, OSError) as error:
                if time.monotonic() >= deadline or isinstance(error, ray.exceptions.ActorDiedError):
                    raise RankLost(f"the Ray rendezvous actor does not answer: {error}") from None
                time.sleep(RETRY_S)


def start_rendezvous() -> RayRendezvous:
    """Start a rendezvous on this node, for the lifetime of this Ray driver."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    return RayRendezvous(ray.remote(**options)(KeyValueActor).remote())
