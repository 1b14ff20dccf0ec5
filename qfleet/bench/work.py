"""The same work for everybody, `updates` aside: what is trained, with which network and batch, how many updates."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qfleet.bench.rates import Marks, Rate, repeated

if TYPE_CHECKING:
    from qfleet.bench.stage import Stage


@dataclass(frozen=True)
class Job:
    """One measurement: how long, in how many lanes, on how many threads, and where the network computes."""

    steps: int
    lanes: int
    threads: int
    device: str


@dataclass(frozen=True)
class Work:
    """A workload. A peer does `updates` updates of `batch` after every `cycle` steps, from `starts` on.

    `ours` are our variants by name, as overrides of the recipe; `rivals` are others that need no peer's package.
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
    rivals: Mapping[str, Callable[[Work, Job], Rate]] = field(default_factory=dict)
    measure: Callable[[Work, tuple[str, ...], Job], Rate] | None = None

    @property
    def least(self) -> int:
        """How many steps, or updates, it takes to measure anything."""
        return self.warm_up + (2 * self.mark if self.unit == "steps" else 5)

    @property
    def mark(self) -> int:
        """Steps between looks at the clock: whole cycles, in which updates are made for all steps."""
        return max(self.cycle, 40)

    def phase(self, lanes: int) -> tuple[int, int]:
        """Steps in a cycle that all lanes take part in, and the updates that follow them."""
        cycle = max(self.cycle, lanes)
        return cycle, self.updates * cycle // self.cycle


def trained(work: Work, overrides: tuple[str, ...], job: Job) -> Rate:
    """Steps per second of a whole run, from its records."""
    from qfleet import api

    marks = Marks()
    with tempfile.TemporaryDirectory() as root:
        api.train(work.recipe, [
            f"total_steps={job.steps}", "stop_at=null", "eval.period_steps=null", "eval.episodes=1",
            "checkpoint.period_steps=null", "checkpoint.replay=false", f"env.lanes={job.lanes}",
            f"learner.batch_size={work.batch}", f"replay.samples_per_insert={work.batch * work.updates / work.cycle:g}",
            f"replay.min_steps={work.starts}", f"device={job.device}", f"run.threads={job.threads}",
            f"run.root={root}", f"run.log_period_steps={work.mark}", "run.tensorboard=false", *overrides,
        ], sinks=[marks])
    return marks.rate(work.warm_up)


def stage_of(work: Work, overrides: tuple[str, ...], job: Job, fill: int) -> Stage:
    from qfleet.bench.stage import Stage

    name = "pong-fast" if job.device.startswith("cuda") and work.recipe == "pong" else work.recipe
    return Stage(name, [f"device={job.device}", f"run.threads={job.threads}", f"replay.min_steps={fill}", *overrides])


def updated(work: Work, overrides: tuple[str, ...], job: Job) -> Rate:
    """Updates per second of the learner alone, from the draw to the priorities."""
    stage = stage_of(work, overrides, job, work.starts)
    stage.fill(work.starts)
    stage.learn(10)
    return repeated(lambda: stage.learn(5), job.steps, 2.0, stage.wait)


def acted(work: Work, overrides: tuple[str, ...], job: Job) -> Rate:
    """Steps per second of the actors alone: batched inference, chunks, compression, replay."""
    groups = (f"env.lanes={job.lanes // 2}", "actors=2", "replay.capacity=100000", f"env.threads={job.threads}")
    stage = stage_of(work, (*groups, *overrides), job, work.warm_up)
    repeated(stage.play, work.warm_up)
    return repeated(stage.play, job.steps, 0.0, stage.wait)


def emulated(work: Work, job: Job) -> Rate:
    """Steps per second of the bare emulators under random actions, on as many threads as our two groups have."""
    import numpy as np
    from ale_py.vector_env import AtariVectorEnv

    threads = min(2 * job.threads, len(os.sched_getaffinity(0)))
    env, rng = AtariVectorEnv("pong", job.lanes, num_threads=threads, reward_clipping=False), np.random.default_rng(0)
    env.reset(seed=0)

    def play() -> int:
        env.step(rng.integers(0, 6, job.lanes))
        return job.lanes

    repeated(play, work.warm_up)
    return repeated(play, job.steps)


def ours(work: Work, variant: str, job: Job) -> Rate:
    """One of our variants at a workload."""
    return (work.measure or trained)(work, work.ours[variant], job)


def both(*overrides: str) -> dict[str, tuple[str, ...]]:
    """A variant of ours in each precision."""
    return {name: (*overrides, f"learner.precision={name}") for name in ("bf16", "fp32")}


ATARI: Any = {"module": "ale_py", "extra": "atari"}
CHEETAH: Any = {"env_id": "HalfCheetah-v5", "batch": 256, "starts": 320, "steps": 1_000, "warm_up": 400,
           "module": "mujoco", "extra": "mujoco"}
TD3 = ("agent.norm=none", "agent.policy_delay=2", "explore.warmup_steps=320")  # as the peers have it
ALL = (
    Work("cartpole", "DQN on CartPole-v1: 2 × 256, batch 64, 128 updates for 256 steps", "cartpole",
         algo="DQN", env_id="CartPole-v1", batch=64, cycle=256, updates=128, starts=512, steps=2_816, warm_up=768,
         lanes=(1, 8), ours={"": ("agent.n_step=1", "agent.double=false", "agent.hidden=[256,256]",
                                  "learner.target_period_updates=128", "learner.publish_period_updates=128",
                                  "learner.learning_rate=2.3e-3")}),
    Work("pong", "DQN on Pong: Nature CNN, batch 32, an update for 4 steps", "pong", algo="DQN",
         env_id="PongNoFrameskip-v4", batch=32, cycle=4, starts=520, steps=1_000, warm_up=600, lanes=(8,), **ATARI,
         ours=both("agent.double=false", "replay.capacity=10000")),
    Work("halfcheetah", "TD3 on HalfCheetah-v5: 2 × 256, batch 256, an update for every step", "halfcheetah",
         algo="TD3", **CHEETAH, ours=both(*TD3)),
    Work("halfcheetah-ddpg", "DDPG on HalfCheetah-v5: 2 × 256, batch 256, an update for every step", "halfcheetah",
         algo="DDPG", **CHEETAH, ours=both(*TD3, "agent.twin=false", "agent.smoothing=0", "agent.policy_delay=1")),
    Work("acting", "playing Pong and storing it, no learning, against the bare emulators", "pong",
         steps=6_400, warm_up=1_000, lanes=(16,), gpu_lanes=(128,), **ATARI, ours={"": ()}, measure=acted,
         rivals={"emulators, random actions": emulated}),
    *(Work(name, f"the learner of Pong alone, from the draw to the priorities, batch {batch}", "pong", unit="updates",
           algo="DQN", batch=batch, starts=1_000, steps=20, lanes=(8,), **ATARI, measure=updated,
           ours=both(f"learner.batch_size={batch}", "replay.alpha=0.6", "agent.dueling=true", "agent.norm=none"))
      for name, batch in (("updates", 32), ("updates-512", 512))),
)
WORKS = {work.name: work for work in ALL}
DEFAULT = ("cartpole", "pong")
