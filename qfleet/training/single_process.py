"""All roles in one process, one after the other: plain method calls, and on a CPU bitwise reproducible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from qfleet.accel.graph_policy import GraphPolicy
from qfleet.actor.actor import Actor
from qfleet.actor.policy import Policy
from qfleet.core.agent import Agent
from qfleet.core.env import VectorEnv
from qfleet.core.evaluation import Score
from qfleet.core.exploration import Explorer
from qfleet.core.seeds import lane_seeds, seed_for
from qfleet.learner.weight_store import Mailbox
from qfleet.training.checkpointer import Checkpointer, Snapshot
from qfleet.training.evaluation import Evaluator
from qfleet.training.learner_core import Hooks, LearnerCore
from qfleet.training.loop import TrainingPlan, Worker, drive
from qfleet.training.timers import TimeShares


@dataclass(frozen=True)
class ActorSpec:
    """Where an actor plays, and how it explores there."""

    env: VectorEnv
    explorer: Explorer


@dataclass(frozen=True)
class ActingSetup:
    """Who plays: the agent, a seat for every actor, and the environment that the agent is judged in."""

    agent: Agent
    actor_specs: Sequence[ActorSpec]
    eval_env: VectorEnv

    def close(self) -> None:
        with ExitStack() as stack:
            for env in [self.eval_env, *(seat.env for seat in self.actor_specs)]:
                stack.callback(env.close)


class EvaluatorSlot(Worker, Protocol):
    """Who evaluates: an `Evaluator`, or somebody who does it together with others."""

    @property
    def policy(self) -> Policy: ...
    @property
    def count(self) -> int: ...
    def evaluate(self) -> None: ...
    def resume(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SingleProcessRun:
    """Builds the roles, runs them, and knows their common state.

    Several actors take turns: while the network chooses for one, the environments of the others compute.
    """

    def __init__(self, cast: ActingSetup, plan: TrainingPlan, outside: Hooks) -> None:
        self.plan, self.setup = plan, cast
        self.weights = Mailbox()
        self.core = LearnerCore(cast.agent, cast.actor_specs[0].env.spec, plan, outside, self.weights)
        self.shares = TimeShares()
        self.core.gauges.append(self.shares)
        self.actors = [self._actor(index, seat) for index, seat in enumerate(cast.actor_specs)]
        policy = Policy(cast.agent, seed_for(plan.seed, "evaluator"), plan.device, plan.learner.precision)
        judge = Evaluator(
            policy, cast.eval_env, self.weights, plan.eval, plan.seed, self.core.progress,
            self._on_evaluation, lambda: self.core.stop.is_external)
        judge.recent_return = lambda: self.core.meter.recent_return
        self.evaluator: EvaluatorSlot = judge
        self.checkpointer = Checkpointer(self.snapshot, outside.save, plan.checkpoint, self.core.progress,
                                         self.core.meter, self._abort_episodes if plan.exact_resume else None)
        self.extra_workers: list[Worker] = []  # whoever else has something to do when the learner is done
        self._begin: tuple[str, int] = ("begin", 0)

    def run(self) -> str:
        """Train to the end, evaluate and save; returns why it ended."""
        for actor, seeds in zip(self.actors, self._seeds(), strict=True):
            actor.begin(seeds)
        cell, stop, timed = self.core, self.core.stop, self.shares.timed
        # An actor has sent its actions when the learner's turn comes: the emulators work while it trains. It has a turn
        # after each of them, so that the GPU has something to do while the next one's emulators are waited for.
        learner = timed("time/learner_share", cell.learner)
        turns = [worker for actor in self.actors for worker in (timed("time/actor_share", actor), learner)]
        try:
            drive([*turns, *self.extra_workers, cell.meter,
                   timed("time/eval_share", self.evaluator), timed("time/save_share", self.checkpointer)], stop)
            if stop.reason in ("total_steps", "total_updates"):
                cell.learner.publish()
                self.evaluator.evaluate()
            # An exact run goes on from its last scheduled checkpoint: one taken anywhere else would not be exact.
            if not (self.plan.exact_resume and stop.is_external and self.checkpointer.saved_at):
                self.checkpointer.save()
        finally:
            cell.meter.finish()
        return stop.reason or "total_steps"

    def snapshot(self) -> Snapshot:
        return self.core.snapshot({"actors": [actor.state_dict() for actor in self.actors],
                                   "weights": self.weights.state_dict(), "evaluator": self.evaluator.state_dict(),
                                   "begin": list(self._begin)})

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Go on from a snapshot; exactly so, if it was taken at a scheduled episode boundary."""
        self.core.restore(state, segments)
        saved = state.get("actors", [])  # none, or more or fewer, in a run that had other processes, or other actors
        if same := len(saved) == len(self.actors):
            self.weights.load_state_dict(state["weights"])
            for actor, its in zip(self.actors, saved, strict=True):
                actor.load_state_dict(its)
            self.evaluator.load_state_dict(state["evaluator"])
        else:
            self.core.republish()
            self.evaluator.resume()
        self.checkpointer.resume()
        self.core.finish_restore(state)
        exact = same and all(its["fresh"] for its in saved)
        self._begin = tuple(state["begin"]) if exact else ("resume", self.core.progress().steps)

    def _actor(self, index: int, seat: ActorSpec) -> Actor:
        plan = self.plan
        policy = Policy(self.setup.agent, seed_for(plan.seed, "actor", index), plan.device, plan.learner.precision)
        weights = (
            self.weights if GraphPolicy.why_not_captured(policy) else self.weights.completed
        )  # others wait for the GPU anyway
        return Actor(policy, seat.env, seat.explorer, self.core.meter, weights,
                     self.core.recorder(seat.env.lanes), self.core.clock)

    def _seeds(self) -> list[list[int]]:
        """For every actor the seeds of its lanes."""
        lanes = self.setup.actor_specs[0].env.lanes
        seeds = lane_seeds(self.plan.seed, lanes * len(self.actors), *self._begin)
        return [seeds[at:at + lanes] for at in range(0, len(seeds), lanes)]

    def _abort_episodes(self, index: int) -> None:
        self._begin = ("exact", index)
        for actor, seeds in zip(self.actors, self._seeds(), strict=True):
            actor.truncate_episodes(seeds)

    def _on_evaluation(self, score: Score, weights: dict[str, torch.Tensor]) -> None:
        self.core.hooks.record_video(self.evaluator.policy, self.evaluator.count - 1)
        self.core.record_evaluation(score, weights)
