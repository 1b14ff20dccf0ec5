"""All roles in one process, one after the other: plain method calls, and on a CPU bitwise reproducible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from qfleet.agent import Agent
from qfleet.explore import Explorer
from qfleet.roles.actor import Actor
from qfleet.roles.checkpointer import Checkpointer, Snapshot
from qfleet.roles.evaluator import Evaluator, Score
from qfleet.roles.policy import Policy
from qfleet.roles.reflex import Reflex
from qfleet.roles.seeds import lane_seeds, seed_for
from qfleet.roles.weights import Mailbox
from qfleet.runtime.cell import Cell, Outside
from qfleet.runtime.plan import Plan, Worker, drive
from qfleet.runtime.shares import Shares
from qfleet.types import VectorEnv


@dataclass(frozen=True)
class Seat:
    """Where an actor plays, and how it explores there."""

    env: VectorEnv
    explorer: Explorer


@dataclass(frozen=True)
class Cast:
    """Who plays: the agent, a seat for every actor, and the environment that the agent is judged in."""

    agent: Agent
    seats: Sequence[Seat]
    eval_env: VectorEnv

    def close(self) -> None:
        with ExitStack() as stack:
            for env in [self.eval_env, *(seat.env for seat in self.seats)]:
                stack.callback(env.close)


class Judge(Worker, Protocol):
    """Who evaluates: an `Evaluator`, or somebody who does it together with others."""

    @property
    def policy(self) -> Policy: ...
    @property
    def count(self) -> int: ...
    def judge(self) -> None: ...
    def resume(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Inline:
    """Builds the roles, runs them, and knows their common state.

    Several actors take turns: while the network chooses for one, the environments of the others compute.
    """

    def __init__(self, cast: Cast, plan: Plan, outside: Outside) -> None:
        self.plan, self.cast = plan, cast
        self.weights = Mailbox()
        self.cell = Cell(cast.agent, cast.seats[0].env.spec, plan, outside, self.weights)
        self.shares = Shares()
        self.cell.gauges.append(self.shares)
        self.actors = [self._actor(index, seat) for index, seat in enumerate(cast.seats)]
        policy = Policy(cast.agent, seed_for(plan.seed, "evaluator"), plan.device, plan.learner.precision)
        judge = Evaluator(policy, cast.eval_env, self.weights, plan.eval, plan.seed, self.cell.progress, self._judged,
                          lambda: self.cell.stop.told)
        judge.recent = lambda: self.cell.meter.recent
        self.evaluator: Judge = judge
        self.checkpointer = Checkpointer(self.snapshot, outside.save, plan.checkpoint, self.cell.progress,
                                         self.cell.meter, self._cut if plan.exact_resume else None)
        self.beside: list[Worker] = []  # whoever else has something to do when the learner is done
        self._begin: tuple[str, int] = ("begin", 0)

    def run(self) -> str:
        """Train to the end, evaluate and save; returns why it ended."""
        for actor, seeds in zip(self.actors, self._seeds(), strict=True):
            actor.begin(seeds)
        cell, stop, timed = self.cell, self.cell.stop, self.shares.timed
        # An actor has sent its actions when the learner's turn comes: the emulators work while it trains. It has a turn
        # after each of them, so that the GPU has something to do while the next one's emulators are waited for.
        learner = timed("time/learner_share", cell.learner)
        turns = [worker for actor in self.actors for worker in (timed("time/actor_share", actor), learner)]
        try:
            drive([*turns, *self.beside, cell.meter,
                   timed("time/eval_share", self.evaluator), timed("time/save_share", self.checkpointer)], stop)
            if stop.reason in ("total_steps", "total_updates"):
                cell.learner.publish()
                self.evaluator.judge()
            # An exact run goes on from its last scheduled checkpoint: one taken anywhere else would not be exact.
            if not (self.plan.exact_resume and stop.told and self.checkpointer.saved_at):
                self.checkpointer.save()
        finally:
            cell.meter.finish()
        return stop.reason or "total_steps"

    def snapshot(self) -> Snapshot:
        return self.cell.snapshot({"actors": [actor.state_dict() for actor in self.actors],
                                   "weights": self.weights.state_dict(), "evaluator": self.evaluator.state_dict(),
                                   "begin": list(self._begin)})

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Go on from a snapshot; exactly so, if it was taken at a scheduled episode boundary."""
        self.cell.restore(state, segments)
        saved = state.get("actors", [])  # none, or more or fewer, in a run that had other processes, or other actors
        if same := len(saved) == len(self.actors):
            self.weights.load_state_dict(state["weights"])
            for actor, its in zip(self.actors, saved, strict=True):
                actor.load_state_dict(its)
            self.evaluator.load_state_dict(state["evaluator"])
        else:
            self.cell.republish()
            self.evaluator.resume()
        self.checkpointer.resume()
        self.cell.settle(state)
        exact = same and all(its["fresh"] for its in saved)
        self._begin = tuple(state["begin"]) if exact else ("resume", self.cell.progress().steps)

    def _actor(self, index: int, seat: Seat) -> Actor:
        plan = self.plan
        policy = Policy(self.cast.agent, seed_for(plan.seed, "actor", index), plan.device, plan.learner.precision)
        weights = self.weights if Reflex.obstacle(policy) else self.weights.complete  # others wait for the GPU anyway
        return Actor(policy, seat.env, seat.explorer, self.cell.meter, weights,
                     self.cell.recorder(seat.env.lanes))

    def _seeds(self) -> list[list[int]]:
        """For every actor the seeds of its lanes."""
        lanes = self.cast.seats[0].env.lanes
        seeds = lane_seeds(self.plan.seed, lanes * len(self.actors), *self._begin)
        return [seeds[at:at + lanes] for at in range(0, len(seeds), lanes)]

    def _cut(self, index: int) -> None:
        self._begin = ("exact", index)
        for actor, seeds in zip(self.actors, self._seeds(), strict=True):
            actor.cut(seeds)

    def _judged(self, score: Score, weights: dict[str, torch.Tensor]) -> None:
        self.cell.outside.film(self.evaluator.policy, self.evaluator.count - 1)
        self.cell.judged(score, weights)
