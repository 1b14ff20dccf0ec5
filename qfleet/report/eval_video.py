"""Videos of evaluations during training: one episode with the weights that were just evaluated."""

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
from qfleet.report.video import EncodingFailed, without_display, write_mp4
from qfleet.runconfig.build import eval_env_config, make_env
from qfleet.runconfig.run_config import RunConfig
from qfleet.training.evaluation import EvaluationAborted

log = logging.getLogger(__name__)

MAX_FRAMES = 10_000
"""Limit of a video, more than five minutes at 30 frames per second: an episode may never end."""


class EvalVideoRecorder:
    """Records every `eval.video_period`-th evaluation into a folder. A failure is logged and does not stop the run."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self._disabled = False

    def record(self, policy: Policy, index: int, steps: int, stop: Callable[[], bool]) -> None:
        """Record one episode after evaluation `index` (0, 1, ...) if it is due; `stop` aborts the recording."""
        period = self.config.eval.video_period
        if not period or index % period or self._disabled:
            return
        without_display()
        try:
            with closing(make_env(eval_env_config(self.config), 1, render=True)) as env:
                write_mp4(self._frames(policy, env, index, stop), self.folder / f"step-{steps:012d}.mp4")
        except EvaluationAborted:
            log.info("the video of the evaluation at step %d was aborted", steps)
        except Exception as error:  # a failed video must not end the run
            self._disabled = isinstance(error, UserError) and not isinstance(error, EncodingFailed)
            log.warning("no video of the evaluation at step %d%s: %s", steps,
                        ", nor of later ones" if self._disabled else "", error or type(error).__name__)

    def _frames(self, policy: Policy, env: VectorEnv, index: int, stop: Callable[[], bool]) -> Iterator[np.ndarray]:
        params = Constant(self.config.eval.epsilon, 1).params(0)
        with policy.other_episodes():
            policy.begin(1)
            obs = env.reset(lane_seeds(seed_for(self.config.seed, "films", index), 1, "evaluation"))
            for _ in range(MAX_FRAMES):
                if stop():
                    raise EvaluationAborted
                if (frame := env.render()) is not None:
                    yield frame
                env.send(policy.act(obs, params)[0])
                outcome = env.recv()
                policy.observe(outcome.reward, outcome.aborted)
                obs = outcome.obs
                if outcome.last[0]:
                    break
            if (frame := env.render()) is not None:
                yield frame
