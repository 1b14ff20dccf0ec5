"""Actors, replay and learner of a real run in one process, driven step by step by a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qfleet.core.seeds import lane_seeds
from qfleet.process.memory import retain_freed_memory
from qfleet.runconfig import resolution
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_run import LearnerRun
from qfleet.training.local_actors import LocalActors

NOTHING = Hooks([], lambda snapshot: None, lambda *best: True, lambda *bad: None)
ENDLESS = 1e12


class BenchStage:
    """`play` acts without learning, `learn` updates without acting. Nothing is logged, evaluated or saved."""

    def __init__(self, name: str, overrides: Sequence[str] = ()) -> None:
        retain_freed_memory()
        config = resolution.resolve(name, [*overrides]).config
        env = make_env(config.env, config.env.lanes)
        try:
            self.config = resolve_auto(config, env.spec)
            torch.set_num_threads(self.config.run.threads or 1)
            self.spec = env.spec
            self._cast = make_acting_setup(self.config, env)
        except BaseException:
            env.close()
            raise
        try:
            self._begin(env.lanes)
        except BaseException:
            self._cast.close()
            raise

    def _begin(self, lanes: int) -> None:
        run = LearnerRun(self._cast, make_plan(self.config), NOTHING)
        assert isinstance(run.acting, LocalActors)
        self.actors, self.learner, self.replay = run.acting.actors, run.core.learner, run.core.replay
        self.lanes = lanes * len(self.actors)
        seeds = lane_seeds(self.config.seed, self.lanes, "begin")
        for index, actor in enumerate(self.actors):
            actor.begin(seeds[index * lanes:(index + 1) * lanes])

    def play(self) -> int:
        """Step every actor once; returns the number of environment steps."""
        for actor in self.actors:
            actor.step()
        return self.lanes

    def fill(self, steps: int) -> None:
        """Play `steps` steps, at least the replay's warm-up; afterwards the samples-per-insert limit is lifted."""
        least = max(steps, self.config.replay.min_steps)
        while self.replay.clock.steps <= least or self.replay.metrics()["replay/size"] == 0:
            self.play()
        self.replay.rate_limiter.samples_per_insert = ENDLESS

    def learn(self, updates: int) -> int:
        """Make `updates` updates; returns how many counted: those with a non-finite loss do not."""
        before, self.learner.max_updates_per_step = self.learner.updates, updates
        if not self.learner.step():
            raise RuntimeError("nothing to learn from: fill the replay first")
        return self.learner.updates - before

    def burst(self) -> int:
        """Updates per actor step in a run of this configuration, at least one."""
        replay, learner = self.config.replay, self.config.learner
        return max(1, round(self.config.env.lanes * replay.samples_per_insert / learner.batch_size))

    def wait(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.config.device.startswith("cuda"):
            torch.cuda.synchronize()

    def close(self) -> None:
        self._cast.close()
