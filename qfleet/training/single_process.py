"""Training with actors, learner and evaluator in one process, called in turn; bitwise reproducible on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from qfleet.accel.choose import acts_captured
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
    """Environment and exploration strategy of one actor."""

    env: VectorEnv
    explorer: Explorer


@dataclass(frozen=True)
class ActingSetup:
    """The agent, an `ActorSpec` per actor, and the environment for evaluations."""

    agent: Agent
    actor_specs: Sequence[ActorSpec]
    eval_env: VectorEnv

    def close(self) -> None:
        with ExitStack() as stack:
            for env in [self.eval_env, *(spec.env for spec in self.actor_specs)]:
                stack.callback(env.close)


class EvaluatorSlot(Worker, Protocol):
    """Evaluator interface of `SingleProcessRun`: an `Evaluator`, or its replacement in a run of several processes."""

    @property
    def policy(self) -> Policy: ...
    @property
    def count(self) -> int: ...
    def evaluate(self) -> None: ...
    def resume(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SingleProcessRun:
    """Builds actors, learner and evaluator, runs them, and saves and restores their state.

    Several actors take turns: while the network selects actions for one, the environments of the others step.
    """

    def __init__(self, setup: ActingSetup, plan: TrainingPlan, hooks: Hooks) -> None:
        self.plan, self.setup = plan, setup
        self.weights = Mailbox()
        self.core = LearnerCore(setup.agent, setup.actor_specs[0].env.spec, plan, hooks, self.weights)
        self.shares = TimeShares()
        self.core.gauges.append(self.shares)
        self.actors = [self._actor(index, spec) for index, spec in enumerate(setup.actor_specs)]
        policy = Policy(setup.agent, seed_for(plan.seed, "evaluator"), plan.device, plan.learner.precision)
        evaluator = Evaluator(
            policy, setup.eval_env, self.weights, plan.eval, plan.seed, self.core.progress,
            self._on_evaluation, lambda: self.core.stop.is_external)
        evaluator.recent_return = lambda: self.core.meter.recent_return
        self.evaluator: EvaluatorSlot = evaluator
        self.checkpointer = Checkpointer(self.snapshot, hooks.save, plan.checkpoint, self.core.progress,
                                         self.core.meter, self._abort_episodes if plan.exact_resume else None)
        self.extra_workers: list[Worker] = []  # stepped after actors and learner
        self._seed_key: tuple[str, int] = ("begin", 0)

    def run(self) -> str:
        """Train to the end, evaluate and save; returns the stop reason."""
        for actor, seeds in zip(self.actors, self._seeds(), strict=True):
            actor.begin(seeds)
        core, stop, timed = self.core, self.core.stop, self.shares.timed
        # An actor's step ends with sending its actions, so its environments step while the learner trains. The learner
        # runs after every actor, so that the GPU is busy while the next actor waits for its environments.
        learner = timed("time/learner_share", core.learner)
        turns = [worker for actor in self.actors for worker in (timed("time/actor_share", actor), learner)]
        try:
            drive([*turns, *self.extra_workers, core.meter,
                   timed("time/eval_share", self.evaluator), timed("time/save_share", self.checkpointer)], stop)
            if stop.reason in ("total_steps", "total_updates"):
                core.learner.publish()
                self.evaluator.evaluate()
            # With exact_resume, the run resumes from the last scheduled checkpoint: only that is an episode boundary.
            if not (self.plan.exact_resume and stop.is_external and self.checkpointer.saved_at):
                self.checkpointer.save()
        finally:
            core.meter.finish()
        return stop.reason or "total_steps"

    def snapshot(self) -> Snapshot:
        return self.core.snapshot({"actors": [actor.state_dict() for actor in self.actors],
                                   "weights": self.weights.state_dict(), "evaluator": self.evaluator.state_dict(),
                                   "begin": list(self._seed_key)})

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Resume from a snapshot; exactly, if it was taken at a scheduled episode boundary."""
        self.core.restore(state, segments)
        saved = state.get("actors", [])  # their number differs if the topology or `actors` has changed
        if same := len(saved) == len(self.actors):
            self.weights.load_state_dict(state["weights"])
            for actor, actor_state in zip(self.actors, saved, strict=True):
                actor.load_state_dict(actor_state)
            self.evaluator.load_state_dict(state["evaluator"])
        else:
            self.core.republish()
            self.evaluator.resume()
        self.checkpointer.resume()
        self.core.finish_restore(state)
        exact = same and all(actor_state["fresh"] for actor_state in saved)
        self._seed_key = tuple(state["begin"]) if exact else ("resume", self.core.progress().steps)

    def _actor(self, index: int, spec: ActorSpec) -> Actor:
        plan = self.plan
        policy = Policy(self.setup.agent, seed_for(plan.seed, "actor", index), plan.device, plan.learner.precision)
        # A policy that is not captured synchronises with the GPU anyway: waiting for the newest weights costs nothing.
        weights = self.weights.completed if acts_captured(policy) else self.weights
        return Actor(policy, spec.env, spec.explorer, self.core.meter, weights,
                     self.core.recorder(spec.env.lanes), self.core.clock)

    def _seeds(self) -> list[list[int]]:
        """Lane seeds of every actor."""
        lanes = self.setup.actor_specs[0].env.lanes
        seeds = lane_seeds(self.plan.seed, lanes * len(self.actors), *self._seed_key)
        return [seeds[at:at + lanes] for at in range(0, len(seeds), lanes)]

    def _abort_episodes(self, index: int) -> None:
        self._seed_key = ("exact", index)
        for actor, seeds in zip(self.actors, self._seeds(), strict=True):
            actor.truncate_episodes(seeds)

    def _on_evaluation(self, score: Score, weights: dict[str, torch.Tensor]) -> None:
        self.core.hooks.record_video(self.evaluator.policy, self.evaluator.count - 1)
        self.core.record_evaluation(score, weights)
