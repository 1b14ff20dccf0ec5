"""The ray section of a config."""

from __future__ import annotations

from pydantic import Field

from qfleet.config import Config, NonNegative, Positive, PositiveCount


class RayConfig(Config):
    """Which Ray a run uses, and what each of its roles asks for there."""

    address: str | None = Field(
        None, description="HOST:PORT of a Ray cluster, or auto; none = RAY_ADDRESS, or else a Ray of the run's own")
    elastic: bool = Field(
        False, description="as many actors as the cluster has room for, as nodes come and go; actors=auto sets it")
    cell_cpus: Positive = Field(1.0, description="CPUs of the learner and its replay")
    cell_gpus: NonNegative | None = Field(None, description="GPUs of the learner; none = 1 if device is a GPU, else 0")
    cell_memory_mb: PositiveCount | None = Field(None, description="memory of the learner and its replay; none = any")
    cell_resources: dict[str, float] = Field(
        default_factory=dict, description="custom resources of Ray's that the learner asks for")
    cell_anywhere: bool = Field(
        False, description="the learner may live on any node, since all share the disk of the run; false = here")
    actor_cpus: Positive = Field(1.0, description="CPUs of an actor")
    actor_gpus: NonNegative = Field(0.0, description="GPUs of an actor, for environments that use one")
    actor_memory_mb: PositiveCount | None = Field(None, description="memory of an actor; none = any")
    actor_resources: dict[str, float] = Field(
        default_factory=dict, description="custom resources of Ray's that an actor asks for")
    evaluator_cpus: Positive = Field(1.0, description="CPUs of the evaluator")
    server_cpus: Positive = Field(1.0, description="CPUs of each shard of a parameter server, and of its registrar")
    object_store_mb: PositiveCount = Field(
        256, ge=80, description="memory for messages and weights under way, of a Ray of the run's own")
    dashboard: bool = Field(False, description="start Ray's dashboard, of a Ray of the run's own")

    def inactive(self) -> dict[str, str]:
        if self.address is None:
            return {}
        why = "a cluster that is there already has been told when it was started"
        return dict.fromkeys(["object_store_mb", "dashboard"], why)

    def needs(self, role: str, device: str) -> dict[str, float]:
        """What a role asks for, as Ray counts it: by name of a resource."""
        asked: dict[str, float | int | None] = {"CPU": self.server_cpus if role == "server" else self.evaluator_cpus}
        more: dict[str, float] = {}
        if role == "cell":
            gpus = float(device.startswith("cuda")) if self.cell_gpus is None else self.cell_gpus
            asked = {"CPU": self.cell_cpus, "GPU": gpus, "memory": _bytes(self.cell_memory_mb)}
            more = self.cell_resources
        elif role == "actor":
            asked = {"CPU": self.actor_cpus, "GPU": self.actor_gpus, "memory": _bytes(self.actor_memory_mb)}
            more = self.actor_resources
        return {name: amount for name, amount in asked.items() if amount} | more


def _bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes << 20
