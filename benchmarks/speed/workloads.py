"""Workloads: environment, network, batch size and number of updates, equal for all contenders (except in `updates`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speed.throughput import Throughput, ThroughputMeter, measure_throughput

if TYPE_CHECKING:
    from speed.stage import BenchStage


@dataclass(frozen=True)
class RoundSpec:
    """One measurement: its steps (or updates), lanes, threads and device."""

    steps: int
    lanes: int
    threads: int
    device: str


@dataclass(frozen=True)
class Workload:
    """A workload: `updates` updates of `batch` items after every `cycle` steps, from step `starts` on.

    `ours` are qfleet's variants by name, as overrides of the recipe; `rivals` need no package of a peer.
    """

    name: str
    what: str
    recipe: str
    unit: str = "steps"
    algo: str = ""
    env_id: str = ""
    batch: int = 0
    cycle: int = 1
    updates: int = 1
    starts: int = 0
    steps: int = 0
    warm_up: int = 0
    lanes: tuple[int, ...] = (1,)
    gpu_lanes: tuple[int, ...] = ()  # instead of those, where the network is on a GPU
    module: str = ""
    extra: str = ""
    ours: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})
    rivals: Mapping[str, Callable[[Workload, RoundSpec], Throughput]] = field(default_factory=dict)
    measure: Callable[[Workload, tuple[str, ...], RoundSpec], Throughput] | None = None

    @property
    def least(self) -> int:
        """The fewest steps, or updates, that can be measured."""
        return self.warm_up + (2 * self.mark if self.unit == "steps" else 5)

    @property
    def mark(self) -> int:
        """Steps between readings of the clock: whole cycles, each with all of its updates."""
        return max(self.cycle, 40)

    def phase(self, lanes: int) -> tuple[int, int]:
        """Steps of a cycle in which every lane steps, and the updates that follow."""
        cycle = max(self.cycle, lanes)
        return cycle, self.updates * cycle // self.cycle


def measure_training(work: Workload, overrides: tuple[str, ...], spec: RoundSpec) -> Throughput:
    """Steps per second of a whole run, from its metric records."""
    from qfleet import api

    meter = ThroughputMeter()
    with tempfile.TemporaryDirectory() as root:
        api.train(work.recipe, [
            f"total_steps={spec.steps}", "stop_at=null", "eval.period_steps=null", "eval.episodes=1",
            "checkpoint.period_steps=null", "checkpoint.replay=false", f"env.lanes={spec.lanes}",
            f"learner.batch_size={work.batch}", f"replay.samples_per_insert={work.batch * work.updates / work.cycle:g}",
            f"replay.min_steps={work.starts}", f"device={spec.device}", f"run.threads={spec.threads}",
            f"run.root={root}", f"run.log_period_steps={work.mark}", "run.tensorboard=false", *overrides,
        ], sinks=[meter])
    return meter.throughput(work.warm_up)


def stage_of(work: Workload, overrides: tuple[str, ...], spec: RoundSpec, fill: int) -> BenchStage:
    from speed.stage import BenchStage

    name = "pong-fast" if spec.device.startswith("cuda") and work.recipe == "pong" else work.recipe
    return BenchStage(name, [f"device={spec.device}", f"run.threads={spec.threads}", f"replay.min_steps={fill}",
                             *overrides])


def measure_updates(work: Workload, overrides: tuple[str, ...], spec: RoundSpec) -> Throughput:
    """Updates per second of the learner alone, from sampling to the priorities."""
    stage = stage_of(work, overrides, spec, work.starts)
    stage.fill(work.starts)
    stage.learn(10)
    return measure_throughput(lambda: stage.learn(5), spec.steps, 2.0, stage.wait)


def measure_acting(work: Workload, overrides: tuple[str, ...], spec: RoundSpec) -> Throughput:
    """Steps per second of the actors alone: batched inference, chunks, compression, replay."""
    groups = (f"env.lanes={spec.lanes // 2}", "env.groups=2", "replay.capacity=100000", f"env.threads={spec.threads}")
    stage = stage_of(work, (*groups, *overrides), spec, work.warm_up)
    measure_throughput(stage.play, work.warm_up)
    return measure_throughput(stage.play, spec.steps, 0.0, stage.wait)


def measure_emulators(work: Workload, spec: RoundSpec) -> Throughput:
    """Steps per second of the bare emulators under random actions, on as many threads as qfleet's two groups have."""
    import numpy as np
    from ale_py.vector_env import AtariVectorEnv

    threads = min(2 * spec.threads, len(os.sched_getaffinity(0)))
    env, rng = AtariVectorEnv("pong", spec.lanes, num_threads=threads, reward_clipping=False), np.random.default_rng(0)
    env.reset(seed=0)

    def play() -> int:
        env.step(rng.integers(0, 6, spec.lanes))
        return spec.lanes

    measure_throughput(play, work.warm_up)
    return measure_throughput(play, spec.steps)


def measure_variant(work: Workload, variant: str, spec: RoundSpec) -> Throughput:
    """Throughput of one of qfleet's variants."""
    return (work.measure or measure_training)(work, work.ours[variant], spec)


def both_precisions(*overrides: str) -> dict[str, tuple[str, ...]]:
    """These overrides in each precision."""
    return {name: (*overrides, f"learner.precision={name}") for name in ("bf16", "fp32")}


ATARI: Any = {"module": "ale_py", "extra": "atari"}
CHEETAH: Any = {"env_id": "HalfCheetah-v5", "batch": 256, "starts": 320, "steps": 1_000, "warm_up": 400,
           "module": "mujoco", "extra": "mujoco"}
TD3 = ("agent.norm=none", "agent.policy_delay=2", "explore.warmup_steps=320")  # as the peers have it
ALL = (
    Workload("cartpole", "DQN on CartPole-v1: 2 × 256, batch 64, 128 updates for 256 steps", "cartpole",
             algo="DQN", env_id="CartPole-v1", batch=64, cycle=256, updates=128, starts=512, steps=2_816, warm_up=768,
             lanes=(1, 8), ours={"": ("agent.n_step=1", "agent.double=false", "agent.hidden=[256,256]",
                                      "learner.target_period_updates=128", "learner.publish_period_updates=128",
                                      "learner.learning_rate=2.3e-3")}),
    Workload("pong", "DQN on Pong: Nature CNN, batch 32, an update for 4 steps", "pong", algo="DQN",
             env_id="PongNoFrameskip-v4", batch=32, cycle=4, starts=520, steps=1_000, warm_up=600, lanes=(8,), **ATARI,
             ours=both_precisions("agent.double=false", "replay.capacity=10000")),
    Workload("halfcheetah", "TD3 on HalfCheetah-v5: 2 × 256, batch 256, an update for every step", "halfcheetah",
             algo="TD3", **CHEETAH, ours=both_precisions(*TD3)),
    Workload("halfcheetah-ddpg", "DDPG on HalfCheetah-v5: 2 × 256, batch 256, an update for every step", "halfcheetah",
             algo="DDPG", **CHEETAH,
             ours=both_precisions(*TD3, "agent.twin=false", "agent.smoothing=0", "agent.policy_delay=1")),
    Workload("acting", "playing Pong and storing it, no learning, against the bare emulators", "pong",
             steps=6_400, warm_up=1_000, lanes=(16,), gpu_lanes=(128,), **ATARI, ours={"": ()}, measure=measure_acting,
             rivals={"emulators, random actions": measure_emulators}),
    *(Workload(name, f"the learner of Pong alone, from sampling to the priorities, batch {batch}", "pong",
               unit="updates", algo="DQN", batch=batch, starts=1_000, steps=20, lanes=(8,), **ATARI,
               measure=measure_updates,
               ours=both_precisions(f"learner.batch_size={batch}", "replay.alpha=0.6", "agent.dueling=true",
                                    "agent.norm=none"))
      for name, batch in (("updates", 32), ("updates-512", 512))),
)
WORKLOADS = {work.name: work for work in ALL}
DEFAULT = ("cartpole", "pong")
