"""Where ranks find each other, as a Ray actor: it can be reached through Ray alone, which asks for its token.

torch's own TCPStore listens on all addresses of a host and lets anybody read and write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qfleet.sync.process_group import RankLost

AGAIN_S = 0.1


class KeyValueActor:
    """The Ray actor: values by key. No call waits, and each may be repeated if its answer was lost."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def find(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of all keys, or None as long as one is missing."""
        return [self._values[key] for key in keys] if all(key in self._values for key in keys) else None


@dataclass(frozen=True)
class RayRendezvous:
    """Implements `ranks.Meeting`: what a rank is given to reach the shelf."""

    actor: Any

    def put(self, key: str, value: bytes, timeout_s: float) -> None:
        self._ask(lambda: self.actor.put.remote(key, value), timeout_s)

    def find(self, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        found: list[bytes] | None = self._ask(lambda: self.actor.find.remote(list(keys)), timeout_s)
        return found

    def _ask(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """The answer to a call, which is made again if Ray loses it."""
        import ray

        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return ray.get(call(), timeout=max(AGAIN_S, deadline - time.monotonic()))
            except (ray.exceptions.RayError, OSError) as error:
                if time.monotonic() >= deadline or isinstance(error, ray.exceptions.ActorDiedError):
                    raise RankLost(f"the Ray actor where ranks meet does not answer: {error}") from None
                time.sleep(AGAIN_S)


def start_rendezvous() -> RayRendezvous:
    """A meeting on this node, for as long as this driver of Ray lives."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    return RayRendezvous(ray.remote(**options)(KeyValueActor).remote())
