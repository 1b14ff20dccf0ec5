"""The roles of a real run in one process, acting and learning at a measurer's word instead of in turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qfleet import recipe
from qfleet.assemble import cast_of, make_env, plan_of, settle
from qfleet.roles.seeds import lane_seeds
from qfleet.runtime.cell import Outside
from qfleet.runtime.inline import Inline
from qfleet.runtime.memory import keep_pages

NOTHING = Outside([], lambda snapshot: None, lambda *best: True, lambda *bad: None)
ENDLESS = 1e12


class Stage:
    """`play` steps without learning, `learn` updates without acting. Nothing is logged, judged or saved."""

    def __init__(self, name: str, overrides: Sequence[str] = ()) -> None:
        keep_pages()
        config = recipe.resolve(name, [*overrides]).config
        env = make_env(config.env, config.env.lanes)
        try:
            self.config = settle(config, env.spec)
            torch.set_num_threads(self.config.run.threads or 1)
            self.spec = env.spec
            self._cast = cast_of(self.config, env)
        except BaseException:
            env.close()
            raise
        try:
            self._begin(env.lanes)
        except BaseException:
            self._cast.close()
            raise

    def _begin(self, lanes: int) -> None:
        inline = Inline(self._cast, plan_of(self.config), NOTHING)
        self.actors, self.learner, self.replay = inline.actors, inline.cell.learner, inline.cell.replay
        self.lanes = lanes * len(self.actors)
        seeds = lane_seeds(self.config.seed, self.lanes, "begin")
        for index, actor in enumerate(self.actors):
            actor.begin(seeds[index * lanes:(index + 1) * lanes])

    def play(self) -> int:
        """One turn of every actor; how many steps that is."""
        for actor in self.actors:
            actor.step()
        return self.lanes

    def fill(self, steps: int) -> None:
        """Play until so many steps and those of the warm-up are taken; from then on updates are limited by nothing."""
        least = max(steps, self.config.replay.min_steps)
        while self.replay.steps <= least or self.replay.metrics()["replay/size"] == 0:
            self.play()
        self.replay.pace.samples_per_insert = ENDLESS

    def learn(self, updates: int) -> int:
        """So many updates; how many were made, which is fewer if some met a loss that is not finite."""
        before, self.learner.burst = self.learner.updates, updates
        if not self.learner.step():
            raise RuntimeError("nothing to learn from: fill the replay first")
        return self.learner.updates - before

    def burst(self) -> int:
        """How many updates follow a turn of an actor in a run of this configuration, at least one."""
        replay, learner = self.config.replay, self.config.learner
        return max(1, round(self.config.env.lanes * replay.samples_per_insert / learner.batch_size))

    def wait(self) -> None:
        """Until the GPU is done, if there is one."""
        if self.config.device.startswith("cuda"):
            torch.cuda.synchronize()

    def close(self) -> None:
        self._cast.close()
