"""Config section `ray`."""

from __future__ import annotations

from pydantic import Field

from qfleet.config import Config, NonNegative, Positive, PositiveCount


class RayConfig(Config):
    """The ray section: the Ray cluster of a run and the resources of its processes (launcher=ray)."""

    address: str | None = Field(
        None, description="HOST:PORT of a Ray cluster, or auto; null = RAY_ADDRESS if it is set, else a local Ray for "
                          "this run")
    elastic: bool = Field(
        False, description="adapt the number of actors to the size of the cluster as nodes join and leave; set by "
                           "actors=auto")
    learner_cpus: Positive = Field(1.0, description="CPUs reserved for each learner")
    learner_gpus: NonNegative | None = Field(
        None, description="GPUs reserved for each learner; null = 1 if device is a GPU, else 0")
    learner_memory_mb: PositiveCount | None = Field(
        None, description="memory reserved for each learner and its replay, megabytes; null = none")
    learner_resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources that each learner needs, by name")
    learner_any_node: bool = Field(
        False, description="place the learner on any node, all of which must share the run's file system; false = on "
                           "this node")
    actor_cpus: Positive = Field(1.0, description="CPUs reserved for each actor")
    actor_gpus: NonNegative = Field(0.0, description="GPUs reserved for each actor, for environments that use one")
    actor_memory_mb: PositiveCount | None = Field(
        None, description="memory reserved for each actor, megabytes; null = none")
    actor_resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources that each actor needs, by name")
    evaluator_cpus: Positive = Field(1.0, description="CPUs reserved for the evaluator")
    server_cpus: Positive = Field(
        1.0, description="CPUs reserved for each shard of the parameter server and for its coordinator")
    object_store_mb: PositiveCount = Field(
        256, ge=80, description="object store of a local Ray started for this run, megabytes")
    dashboard: bool = Field(False, description="start the dashboard of a local Ray started for this run")

    def inactive(self) -> dict[str, str]:
        if self.address is None:
            return {}
        why = "they apply only to a Ray that this run starts"
        return dict.fromkeys(["object_store_mb", "dashboard"], why)

    def resources(self, role: str, device: str) -> dict[str, float]:
        """Ray resources of a role, by resource name."""
        cpus = self.server_cpus if role == "server" else self.evaluator_cpus
        requested: dict[str, float | int | None] = {"CPU": cpus}
        custom: dict[str, float] = {}
        if role == "learner":
            gpus = float(device.startswith("cuda")) if self.learner_gpus is None else self.learner_gpus
            requested = {"CPU": self.learner_cpus, "GPU": gpus, "memory": _bytes(self.learner_memory_mb)}
            custom = self.learner_resources
        elif role == "actor":
            requested = {"CPU": self.actor_cpus, "GPU": self.actor_gpus, "memory": _bytes(self.actor_memory_mb)}
            custom = self.actor_resources
        return {name: amount for name, amount in requested.items() if amount} | custom


def _bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes << 20
