"""Actors in the learner's process, called in turn with it; bitwise reproducible on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from qfleet.accel.choose import acts_captured
from qfleet.actor.actor import Actor
from qfleet.actor.policy import Policy
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec, VectorEnv
from qfleet.core.evaluation import Score
from qfleet.core.exploration import Explorer
from qfleet.core.seeds import lane_seeds, seed_for
from qfleet.learner.weight_store import Mailbox
from qfleet.replay.store import ReplayStore
from qfleet.training.evaluation import Evaluator, EvaluatorHooks
from qfleet.training.learner_core import Components, LearnerCore
from qfleet.training.learner_run import Acting
from qfleet.training.loop import TrainingPlan, Worker, idle
from qfleet.training.timers import TimeShares


@dataclass(frozen=True)
class ActorSpec:
    """Environment and exploration strategy of one actor."""

    env: VectorEnv
    explorer: Explorer


@dataclass(frozen=True)
class ActingSetup:
    """Implements `RunSetup`: the agent, an `ActorSpec` per actor, and the environment for evaluations."""

    agent: Agent
    actor_specs: Sequence[ActorSpec]
    eval_env: VectorEnv
    weights: Mailbox = field(default_factory=Mailbox)

    @property
    def spec(self) -> EnvSpec:
        return self.actor_specs[0].env.spec

    def components(self, plan: TrainingPlan, components: Components) -> Components:
        return components

    def batches_ahead(self, plan: TrainingPlan, replay: ReplayStore[Any]) -> int | None:
        """With priorities unknown: each vote compares importance weights."""
        return replay.rate_limiter.batches_allowed(plan.learner.batch_size) if plan.replay.alpha == 0 else None

    def acting(self, core: LearnerCore, shares: TimeShares) -> LocalActors:
        return LocalActors(self, core, shares)

    def evaluator(self, core: LearnerCore, acting: Acting) -> Evaluator:
        plan = core.plan

        def on_score(score: Score, weights: dict[str, torch.Tensor]) -> None:
            core.hooks.record_video(evaluator.policy, evaluator.count - 1)
            core.record_evaluation(score, weights)

        evaluator = Evaluator(
            Policy(self.agent, seed_for(plan.seed, "evaluator"), plan.device, plan.learner.precision), self.eval_env,
            self.weights, plan.eval, plan.seed,
            EvaluatorHooks(core.progress, on_score, lambda: core.stop.is_external, lambda: core.meter.recent_return))
        return evaluator

    def close(self) -> None:
        with ExitStack() as stack:
            for env in [self.eval_env, *(spec.env for spec in self.actor_specs)]:
                stack.callback(env.close)


class LocalActors:
    """Implements `Acting` with actors in this process.

    Several actors take turns: while the network selects actions for one, the environments of the others step.
    """

    evaluates = True

    def __init__(self, setup: ActingSetup, core: LearnerCore, shares: TimeShares) -> None:
        self.setup, self.core, self.shares = setup, core, shares
        self.weights = setup.weights
        self.actors = [self._actor(index, spec) for index, spec in enumerate(setup.actor_specs)]
        self._seed_key: tuple[str, int] = ("begin", 0)

    def begin(self) -> None:
        for actor, seeds in zip(self.actors, self.seeds(), strict=True):
            actor.begin(seeds)

    def turns(self, learner: Worker) -> list[Worker]:
        """Every actor, each followed by the learner.

        An actor's step ends with sending its actions, so its environments step while the learner trains. The learner
        runs after every actor, so that the GPU is busy while the next actor waits for its environments.
        """
        timed = self.shares.timed
        return [worker for actor in self.actors for worker in (timed("time/actor_share", actor), learner)]

    def serve(self, sleep_s: float) -> None:
        idle(sleep_s)

    def finish(self, all_updates: bool) -> None:
        """Nothing to do: the learner made all updates that were due after the last step."""

    def end(self) -> None:
        """Nothing to do: the actors end with the process."""

    def before_checkpoint(self, index: int) -> None:
        """Truncate running episodes if the run resumes exactly."""
        if self.core.plan.exact_resume:
            self._seed_key = ("exact", index)
            for actor, seeds in zip(self.actors, self.seeds(), strict=True):
                actor.truncate_episodes(seeds)

    def before_write(self) -> None:
        """Nothing to do: no other process waits."""

    def metrics(self) -> Mapping[str, float]:
        """None: the actors write theirs to the meter."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"actors": [actor.state_dict() for actor in self.actors], "weights": self.weights.state_dict(),
                "begin": list(self._seed_key)}

    def restore(self, state: Mapping[str, Any]) -> bool:
        saved = state.get("actors", [])  # their number differs if the topology or `actors` has changed
        if len(saved) != len(self.actors):
            self.core.republish()
            return False
        self.weights.load_state_dict(state["weights"])
        for actor, actor_state in zip(self.actors, saved, strict=True):
            actor.load_state_dict(actor_state)
        return True

    def finish_restore(self, state: Mapping[str, Any]) -> bool:
        saved = state.get("actors", [])
        exact = len(saved) == len(self.actors) and all(actor_state["fresh"] for actor_state in saved)
        self._seed_key = tuple(state["begin"]) if exact else ("resume", self.core.progress().steps)
        return exact

    def seeds(self) -> list[list[int]]:
        """Lane seeds of every actor."""
        lanes = self.setup.actor_specs[0].env.lanes
        seeds = lane_seeds(self.core.plan.seed, lanes * len(self.actors), *self._seed_key)
        return [seeds[at:at + lanes] for at in range(0, len(seeds), lanes)]

    def _actor(self, index: int, spec: ActorSpec) -> Actor:
        plan = self.core.plan
        policy = Policy(self.setup.agent, seed_for(plan.seed, "actor", index), plan.device, plan.learner.precision)
        # A policy that is not captured synchronises with the GPU anyway: waiting for the newest weights costs nothing.
        weights = self.weights.completed if acts_captured(policy) else self.weights
        return Actor(policy, spec.env, spec.explorer, self.core.meter, weights,
                     self.core.recorder(spec.env.lanes), self.core.clock)
