"""Films of evaluations while a run trains: one episode with the weights that were just judged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from qfleet.actor.policy import Policy
from qfleet.core.env import VectorEnv
from qfleet.core.errors import UserError
from qfleet.core.seeds import lane_seeds, seed_for
from qfleet.explore.constant import Constant
from qfleet.report.video import without_display, write_mp4
from qfleet.runconfig.build import eval_env_config, make_env
from qfleet.runconfig.run_config import RunConfig
from qfleet.training.evaluation import EvaluationAborted

log = logging.getLogger(__name__)

MAX_FRAMES = 10_000
"""More than five minutes at 30 pictures a second; an episode may never end."""


class EvalVideoRecorder:
    """Films every `eval.video_period`-th evaluation into a folder. What goes wrong is told and spoils nothing else."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self._hopeless = False

    def record(self, policy: Policy, index: int, steps: int, stop: Callable[[], bool]) -> None:
        """Film one episode after evaluation `index` (0, 1, ...), if that one is to be filmed; `stop` breaks it off."""
        period = self.config.eval.video_period
        if not period or index % period or self._hopeless:
            return
        without_display()
        try:
            with closing(make_env(eval_env_config(self.config), 1, render=True)) as env:
                write_mp4(self._pictures(policy, env, index, stop), self.folder / f"step-{steps:012d}.mp4")
        except EvaluationAborted:
            log.info("the film of the evaluation at step %d was broken off", steps)
        except Exception as error:  # a picture is not worth a run
            self._hopeless = isinstance(error, UserError)
            log.warning("no film of the evaluation at step %d%s: %s", steps,
                        ", nor of later ones" if self._hopeless else "", error or type(error).__name__)

    def _pictures(self, policy: Policy, env: VectorEnv, index: int, stop: Callable[[], bool]) -> Iterator[np.ndarray]:
        arm = Constant(self.config.eval.epsilon, 1).params(0)
        memory, policy.memory = policy.memory, None
        try:
            policy.begin(1)
            obs = env.reset(lane_seeds(seed_for(self.config.seed, "films", index), 1, "evaluation"))
            for _ in range(MAX_FRAMES):
                if stop():
                    raise EvaluationAborted
                if (picture := env.render()) is not None:
                    yield picture
                env.send(policy.act(obs, arm)[0])
                outcome = env.recv()
                policy.observe(outcome.reward, outcome.aborted)
                obs = outcome.obs
                if outcome.last[0]:
                    break
            if (picture := env.render()) is not None:
                yield picture
        finally:
            policy.memory = memory
