"""The end of a run: score the best policy with fresh episodes, and record how the run ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from qfleet.actor.policy import Policy
from qfleet.core.evaluation import Score
from qfleet.core.final_score import FinalScore, standard_error
from qfleet.launch.attempt import record_result, require_same_spaces, show_plan
from qfleet.launch.train_result import TrainResult
from qfleet.process.signals import EXIT_CODES, SignalledStop, stop_on_signal
from qfleet.runconfig.auto import run_threads, training_device
from qfleet.runconfig.build import make_agent, make_eval_env
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoint, Checkpoints
from qfleet.runs.directory import RunDirectory
from qfleet.runs.metric_writers import TensorBoardWriter
from qfleet.training.evaluation import EvaluationAborted, evaluate
from qfleet.training.meter import Sink

log = logging.getLogger(__name__)

SCORED_ENDINGS = ("total_steps", "total_updates", "stop_at", "stopped")
"""Reasons for the end of a run after which its best policy is scored: all but signals."""

FIRST_SEED = 1000
"""Seed of the episodes for a run with seed 0; a run with seed N uses FIRST_SEED + N. Evaluations during the training
use other seeds."""

QUIET_S, PERIOD_S = 3.0, 10.0
"""Seconds until the first message about the progress, and between further ones."""


def score_result(result: TrainResult, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Add the score of the best policy to the result of a run that has ended, and record it in the run directory.

    Nothing is added to a run that ended by a signal or a fault, that has no best policy, or that was finished before.
    A signal skips the remaining episodes. One other than Ctrl-C also sets the exit code, since the process is to leave
    and, for example, must not train another seed. An error is logged: the training itself has succeeded.
    """
    if result.already_finished or result.exit_code or result.reason not in SCORED_ENDINGS:
        return result
    if not config.eval.final_episodes:
        return result
    directory, stop = RunDirectory(result.directory), SignalledStop()
    try:
        best = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest("best", set_aside=False)
        if best is None:
            return result
        with stop_on_signal(stop):
            score = play(best, config, lambda: stop.reason is not None, EpisodeProgress(config, sinks))
    except (EvaluationAborted, KeyboardInterrupt):
        log.warning("the score of the best policy was skipped: `qfleet eval %s` plays fresh episodes", result.directory)
        return replace(result, exit_code=EXIT_CODES["preempted"]) if stop.reason == "preempted" else result
    except Exception as error:
        log.warning("the best policy could not be scored (%s)", str(error) or type(error).__name__)
        return result
    scored = replace(result, score=score)
    record_result(directory, scored)
    if config.run.tensorboard:  # its HParams tab compares scalars
        with closing(TensorBoardWriter(directory.tensorboard)) as writer:
            writer.write({"step": result.steps, "eval/final_score": score.mean})
    return scored


def play(best: Checkpoint, config: RunConfig, stop: Callable[[], bool],
         on_episode: Callable[[int], None]) -> FinalScore:
    """Play the final episodes with the best policy, by the rules of the evaluations during the training."""
    cfg, seed = config.eval, FIRST_SEED + config.seed
    parallel = cfg.model_copy(update={"episodes": max(cfg.episodes, cfg.final_episodes)})
    with run_threads(config):
        policy = Policy(make_agent(config, best.spec), 0, training_device(config))
        policy.load(best.policy(), best.manifest.updates)
        with closing(make_eval_env(config.model_copy(update={"eval": parallel}))) as env:
            require_same_spaces("the best policy was trained on", best.spec, "the environment", env.spec)
            score = evaluate(policy, env, cfg.final_episodes, cfg.epsilon, seed, stop, on_episode)
    return describe(score, seed, best.path.name)


def describe(score: Score, seed: int, checkpoint: str) -> FinalScore:
    episodes = len(score.returns)
    return FinalScore(score.mean, standard_error(score.std, episodes), episodes, seed, checkpoint)


class EpisodeProgress:
    """Shows the number of completed episodes to the sinks that display the run, if the episodes take long."""

    def __init__(self, config: RunConfig, sinks: Sequence[Sink], now: Callable[[], float] = time.monotonic) -> None:
        self._episodes, self._sinks, self._now = config.eval.final_episodes, sinks, now
        self._due = now() + QUIET_S

    def __call__(self, completed: int) -> None:
        if self._now() >= self._due and completed < self._episodes:
            self._due = self._now() + PERIOD_S
            show_plan(self._sinks, [("score", f"{completed:,} of {self._episodes:,} fresh episodes of the best policy; "
                                              "Ctrl-C skips the rest")])
