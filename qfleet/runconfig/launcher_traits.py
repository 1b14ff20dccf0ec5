"""What a launcher decides, as far as other settings depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from qfleet.transport.ray_config import RayConfig


@dataclass(frozen=True)
class LauncherTraits:
    """Properties of a launcher. The defaults are those of one that starts processes on this host.

    `cluster` names the software of a cluster whose nodes run the processes: it assigns GPUs to them, and hosts join the
    cluster, not the run. `learner_cores` are reserved for each learner; with None the learners share the cores of this
    host. `learner_elsewhere`: learners may run on hosts whose devices are not known here. `elastic`: the number of
    actors changes during the run.
    """

    cluster: str | None = None
    learner_cores: int | None = None
    learner_elsewhere: bool = False
    elastic: bool = False


def traits_of(launcher: str, ray: RayConfig) -> LauncherTraits:
    """Traits of a launcher by its name in the config; one of the user's counts as local."""
    if launcher != "ray":
        return LauncherTraits()
    return LauncherTraits("ray", max(1, int(ray.learner_cpus)), ray.learner_any_node, ray.elastic)
