"""Learner, replay and metrics of one process. Independent of where the actors run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qfleet.accel.choose import stores_in_turns
from qfleet.actor.actor import Recorder
from qfleet.actor.policy import Policy
from qfleet.core.agent import Agent
from qfleet.core.clock import Progress, RunClock
from qfleet.core.env import EnvSpec
from qfleet.core.evaluation import Score
from qfleet.core.replay import Chunk, Sample
from qfleet.core.seeds import seed_for
from qfleet.core.weights import WeightStore
from qfleet.learner.learner import Learner, LearnerContext
from qfleet.optim.row_moments import RowMoments
from qfleet.replay.chunker import staggered_padding
from qfleet.replay.codec import Codec, PackedChunk
from qfleet.replay.layout import Layout
from qfleet.replay.make_store import make_store
from qfleet.replay.store import ReplayStore
from qfleet.sync.gradient_sync import GradientSync
from qfleet.training.callbacks import CheckedCallback, Evaluation, EventQueue
from qfleet.training.checkpointer import Snapshot
from qfleet.training.loop import StopRule, TrainingPlan
from qfleet.training.meter import Meter, Sink


@dataclass(frozen=True)
class Hooks:
    """Outputs of a run: for metrics, checkpoints, bad batches, videos and the member list; and the user's callbacks.

    `best_score` returns the score of the best policy on disk. Its argument is the score in the loaded snapshot, which
    may be older.
    """

    sinks: Sequence[Sink]
    save: Callable[[Snapshot], Path | None]
    save_best: Callable[[Score, Progress, dict[str, torch.Tensor]], bool]
    on_bad_batch: Callable[[Sample, int], None]
    record_video: Callable[[Policy, int], None] = lambda policy, evaluation: None
    write_members: Callable[[Sequence[Mapping[str, Any]]], None] = lambda members: None
    best_score: Callable[[float | None], float | None] = lambda loaded: loaded
    callbacks: Sequence[CheckedCallback] = ()
    directory: Path | None = None


SILENT_HOOKS = Hooks((), lambda snapshot: None, lambda score, progress, weights: True, lambda sample, update: None)
"""Hooks of a learner whose metrics and state another process collects."""

MakeSync = Callable[[ReplayStore[Any], Meter], GradientSync | None]
"""Creates the gradient synchronisation of a learner from its replay and meter; None: the learner is alone."""


@dataclass(frozen=True)
class Components:
    """Parts of a learner's run that differ between kinds of runs, created before everything that uses them.

    `max_updates_per_step`: updates between two rounds of the loop. `slack_samples`: samples by which the learner may
    fall behind before actors have to wait for it. `outlier_deviations`: see `LearnerContext`.
    """

    clock: RunClock
    stop: StopRule
    make_sync: MakeSync = lambda replay, meter: None
    max_updates_per_step: int | None = None
    slack_samples: float | None = None
    outlier_deviations: float | None = None

    @classmethod
    def single(cls, plan: TrainingPlan) -> Components:
        """Components of a run with one learner."""
        clock = RunClock()
        return cls(clock, StopRule(plan, clock.progress))


class ObservedReplay:
    """Adds chunks to a replay, and the rows of accepted ones to an agent's running statistics."""

    def __init__(self, replay: ReplayStore[Any], moments: RowMoments) -> None:
        self._replay, self._moments, self._codec = replay, moments, Codec(replay.layout)
        self._columns = [column for column in replay.layout.columns if not column.image]

    def add(self, chunk: Chunk, priority: np.ndarray | None = None) -> int | None:
        serial = self._replay.add(chunk, priority)
        if serial is not None:
            self._observe(chunk.columns)
        return serial

    def add_packed(self, packed: PackedChunk, priority: np.ndarray | None = None) -> int | None:
        serial = self._replay.add_packed(packed, priority)
        if serial is not None:
            self._observe(self._codec.unpack_columns(packed, self._columns))
        return serial

    def _observe(self, columns: Mapping[str, np.ndarray]) -> None:
        rows = self._replay.layout.new_rows
        taken = rows.start + np.flatnonzero(~columns["last"][rows])
        self._moments.add({column.name: columns[column.name][taken] for column in self._columns})


class LearnerCore:
    """Learner, replay and meter of one process, with the run's step and update counts, stop rule and best score."""

    def __init__(self, agent: Agent, spec: EnvSpec, plan: TrainingPlan, hooks: Hooks, weights: WeightStore,
                 components: Components) -> None:
        self.agent, self.plan, self.hooks = agent, plan, hooks
        self.clock, self.stop = components.clock, components.stop
        seed = plan.seed
        self.layout = Layout(
            spec, agent.window, plan.replay.chunk_steps, agent.columns, agent.stored_states, agent.state_rows
        )
        self.replay = make_store(
            self.layout, plan.replay, seed_for(seed, "replay"), plan.device, plan.decode_threads, self.clock)
        if components.slack_samples is not None:
            self.replay.rate_limiter.limit_inserts(components.slack_samples)
        self.best = hooks.best_score(None)
        self.events = EventQueue(hooks.callbacks)
        self.meter = Meter(
            hooks.sinks, self.progress, spec.frames_per_step, plan.log_schedule, on_episode=self.events.add,
            on_failure=self.stop.end_early)
        torch.manual_seed(seed_for(seed, "torch"))  # for layers that use torch's global generator, such as dropout
        context = LearnerContext(
            self.clock, components.make_sync(self.replay, self.meter), plan.total_updates,
            components.max_updates_per_step, components.outlier_deviations, hooks.on_bad_batch)
        self.learner = Learner(agent, self.replay, weights, self.meter, plan.learner, seed, plan.device, context)
        moments = self.learner.row_moments
        self.experience = self.replay if moments is None else ObservedReplay(self.replay, moments)
        self.learner.publish()

    experience: ReplayStore[Any] | ObservedReplay
    """Takes the chunks of actors."""

    def progress(self) -> Progress:
        return self.clock.progress()

    def recorder(self, lanes: int) -> Recorder:
        """Recorder for an actor in this process.

        Chunk boundaries are staggered over the lanes if that keeps the environments busy. Chunks that end with episodes
        are staggered anyway.
        """
        stagger = stores_in_turns(self.plan.device) and not self.layout.window.within_episode
        return Recorder(self.agent, self.layout, lanes, self.experience, self.plan.replay.alpha > 0,
                        staggered_padding(self.layout, lanes) if stagger else ())

    def record_evaluation(self, score: Score, weights: dict[str, torch.Tensor]) -> None:
        """Record a score: emit metrics, save the policy if it is the best, and check `stop_at`.

        Of equal scores the newest counts as best: many tasks have a highest score, and later policies reach it more
        reliably.
        """
        self._copy_eval_buffers(weights)
        better = self.best is None or score.mean >= self.best
        if better and self.hooks.save_best(score, self.progress(), weights):
            self.best = score.mean  # only once saved: a score without a saved policy must not block later ones
        best = {} if self.best is None else {"eval/best_reward": self.best}
        if score.seconds is not None:
            best["eval/seconds"] = score.seconds
        self.meter.emit({"eval/mean_reward": score.mean, "eval/std_reward": score.std,
                         "eval/updates": max(0, score.version), **best,
                         "eval/mean_ep_length": sum(score.lengths) / len(score.lengths),
                         **{f"eval/info/{name}": value for name, value in score.info.items()}})
        self.events.add(Evaluation.of(score, self.progress().steps, better))
        self.stop.check_score(score.mean)

    def _copy_eval_buffers(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the agent's `eval_buffers` from evaluated weights, so that published and saved weights contain them."""
        flat = self.learner.flat
        flat.set_buffers({name: weights[name] for name in self.agent.eval_buffers
                          if name in weights and weights[name].shape == flat.buffer(name).shape})

    def snapshot(self, others: Mapping[str, Any]) -> Snapshot:
        """State of this core, plus the entries in `others`."""
        keep = self.plan.checkpoint.replay
        state = {"learner": self.learner.state_dict(), "meter": self.meter.state_dict(), "best": self.best,
                 "torch_rng": torch.get_rng_state(), "replay": self.replay.state_dict() if keep else None,
                 "clock": self.replay.rate_limiter.state_dict(), **others}
        return Snapshot(self.progress(), self.learner.flat.state(), state, self.replay.segments() if keep else [])

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Restore replay and learner. The caller then restores its own state and calls `finish_restore`."""
        if state["replay"] is not None:
            self.replay.load_state_dict(state["replay"])
            self.replay.load_segments(segments)
        else:
            self.replay.rate_limiter.restart_at(state["clock"]["steps"])
        self.learner.load_state_dict(state["learner"])

    def republish(self) -> None:
        """Publish the learner's current weights again, for a restore that does not know the last published version."""
        self.learner.load_state_dict(self.learner.state_dict() | {"published": -1})
        self.learner.publish_for_actors()

    def finish_restore(self, state: Mapping[str, Any]) -> None:
        """Last step of a restore: state that depends on the other parts, and torch's generator, which they may use."""
        self.meter.load_state_dict(state["meter"])
        self.best = self.hooks.best_score(state["best"])
        if self.best is not None:
            self.stop.check_score(self.best)
        torch.set_rng_state(state["torch_rng"])
