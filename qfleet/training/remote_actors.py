"""The run of a cell whose actors and evaluator are other processes, here or on other hosts.

    actors ──▶ inbox ──▶ Intake ──▶ replay ──▶ learner ──▶ desk ──▶ actors, evaluator ──▶ inbox ──▶ ...

One thread does everything that changes anything. Those that answer calls only put messages into the inbox and read from
the desk, so a long checkpoint delays nobody's heartbeat.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.training.checkpointer import Checkpointer, Snapshot
from qfleet.training.learner_core import Hooks, LearnerCore
from qfleet.training.loop import TrainingPlan, drive, idle
from qfleet.training.timers import TimeShares
from qfleet.transport.fleet_pb2 import ExchangeRequest, Part
from qfleet.transport.inbox import MAX_STEPS, DecodedMessage, Inbox, decode_message
from qfleet.transport.message_rules import MAX_TAGS, expected_weights, require_allowed, require_sound
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import ACTOR, EVALUATOR, Registry

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 32
"""Between two updates; more would only wait for the replay."""

FEWEST_STEPS = 1 << 16
"""So many steps any message of an actor's may tell of."""

MEMBERS_PERIOD_S = 1.0

EVALUATOR_GRACE_S = 60.0
"""How long a run that ended waits for an evaluator of which nothing is heard."""


class MessageHandler:
    """Takes messages out of the inbox and does what they say, each once; waits when the replay is ahead of the learner.

    `closing`: the run has ended, and only evaluations still count. `shares` hears for how long messages were held back.
    """

    def __init__(self, cell: LearnerCore, registry: Registry, inbox: Inbox, shares: TimeShares) -> None:
        self.core, self.registry, self.inbox, self.shares = cell, registry, inbox, shares
        self.closing = False
        self.evaluated_version = -1
        self.member_steps: Counter[int] = Counter()  # steps of every sender
        self.on_checkpoint_part: Callable[[int, Part], None] = lambda index, part: None
        self._held_since: float | None = None
        # An actor waits when twice as many steps are under way as all its chunks have; an inbox holds an eighth.
        self._most_steps = min(MAX_STEPS, max(FEWEST_STEPS, 64 * inbox.steps))
        self._expected = expected_weights(cell.learner.flat.state())

    def step(self) -> bool:
        now = time.perf_counter()
        self.shares.add_seconds("fleet/held_share", 0.0 if self._held_since is None else now - self._held_since)
        self._held_since = None
        for taken in range(MESSAGES_PER_TURN):
            message = self.inbox.peek()
            if message is None:
                return taken > 0
            if message.steps and not self.closing and not self.core.replay.rate_limiter.may_insert():
                self._held_since = now
                return taken > 0
            self.inbox.pop()
            if not self.registry.accept_sequence(message.index, message.incarnation, message.sequence):
                self.core.meter.count("wire/duplicates")
                continue
            role = self.registry.role(message.index, message.incarnation)
            try:
                delivery = self._read(message, role)
            except ValueError as error:
                self.core.meter.count("fault/bad_messages")
                log.warning("a message of member %d was refused: %s", message.index, error)
                if role == EVALUATOR:
                    self.evaluated_version = max(
                        [self.evaluated_version, *(judgement.version for judgement in message.judgements)]
                    )
                continue
            self._apply(message.index, delivery)
        return True

    def _read(self, message: ExchangeRequest, role: str) -> DecodedMessage:
        """ValueError if anything of it cannot be believed."""
        require_allowed(message, role, self._most_steps)
        delivery = decode_message(message, self.core.layout)
        for score, weights in delivery.evaluations:
            require_sound(score, weights, self._expected)
        return delivery

    def _apply(self, index: int, delivery: DecodedMessage) -> None:
        replay, meter = self.core.replay, self.core.meter
        if not self.closing:
            self.core.clock.count_steps(delivery.steps)
            self.member_steps[index] += delivery.steps
            for packed, priority in delivery.chunks:
                if replay.add_packed(packed, priority) is None:
                    meter.count("fault/bad_messages")
                    log.warning("a chunk of member %d was dropped: it does not decode", index)
            for episode in delivery.episodes:
                meter.episode(*episode)
        for tag, (total, count) in delivery.metrics.items():
            meter.add(tag, total, count)
        for tag, by in delivery.counters.items():
            if tag in meter.counters or len(meter.counters) < MAX_TAGS:  # members may invent tags
                meter.count(tag, by)
        if delivery.member_state:
            self.registry.set_member_state(index, delivery.member_state)
        if delivery.checkpoint_part is not None:
            self.on_checkpoint_part(index, delivery.checkpoint_part)
        for score, weights in delivery.evaluations:
            if score.version > self.core.learner.updates:
                continue  # weights of a learner that died, which this one has not got to again
            self.core.record_evaluation(score, weights)
            self.evaluated_version = score.version


class RemoteActorsRun:
    """Learner, replay and books of a fleet; knows when it ends and what must be remembered of it."""

    def __init__(
        self, agent: Agent, spec: EnvSpec, plan: TrainingPlan, outside: Hooks, desk: PublishedState,
        registry: Registry, inbox: Inbox, beat: Callable[[], None] = lambda: None) -> None:
        self.published, self.registry, self.hooks, self.beat = desk, registry, outside, beat
        self.core = LearnerCore(agent, spec, plan, outside, desk)
        self.shares = TimeShares()
        self.core.gauges += [self.shares, self.members]
        self.core.learner.max_updates_per_step = 1  # between two updates the inbox is looked after
        self.core.replay.rate_limiter.error_buffer = plan.slack_samples
        self.message_handler = MessageHandler(self.core, registry, inbox, self.shares)
        self.checkpointer = Checkpointer(self.snapshot, self.save, plan.checkpoint, self.core.progress,
                                         self.core.meter)
        self._incarnations: dict[tuple[int, str], int] = {}
        self._called_at = -MEMBERS_PERIOD_S

    def run(self) -> str:
        """Train to the end, let the evaluator judge and save; returns why it ended."""
        cell, stop, timed = self.core, self.core.stop, self.shares.timed
        try:
            drive(
                [
                    timed("time/intake_share", self.message_handler),
                    timed("time/learner_share", cell.learner), cell.meter,
                    timed("time/save_share", self.checkpointer)],
                stop,
                self.serve,
            )
            self.message_handler.closing = True
            if stop.reason in ("total_steps", "total_updates"):
                while not stop.is_external and cell.learner.step():  # what is still due
                    self.serve(0)
                cell.learner.publish()
                await_evaluation(cell, self.message_handler, self.registry, self.published, self.serve)
            self.checkpointer.save()
        finally:
            cell.meter.finish()
        if not stop.is_external:  # nor after a failure: whoever is told to leave is not there when the run is resumed
            self.published.stop()
        return stop.reason or "total_steps"

    def snapshot(self) -> Snapshot:
        return self.core.snapshot({"registry": self.registry.state_dict()})

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Go on from a snapshot, also from one of a run that had all its roles in one process."""
        self.core.restore(state, segments)
        if "registry" in state:
            self.registry.load_state_dict(state["registry"])
        self.checkpointer.resume()
        self.core.finish_restore(state)
        self.core.republish()
        self.published.update_progress(
            *self.core.progress(), "starting"
        )  # whoever says hello first finds the clocks right

    def serve(self, nap_s: float) -> None:
        self.published.update_progress(*self.core.progress(), "ending" if self.message_handler.closing else "training")
        self.beat()
        self._write_members()
        if nap_s:
            since = time.perf_counter()
            idle(nap_s)
            self.shares.add_seconds("time/idle_share", time.perf_counter() - since)

    def _write_members(self) -> None:
        """Tell now and then who takes part, for people who look on."""
        now, live_s = time.monotonic(), self.registry.live_s
        if now - self._called_at < MEMBERS_PERIOD_S:
            return
        self._called_at = now
        self.hooks.write_members(
            [
                {
                    "name": member.name, "role": member.role, "host": member.host, "pid": member.pid,
                    "incarnation": member.incarnation, "steps": member.steps, "version": member.version,
                    "silent_s": now - member.heard, "live_s": live_s}
                for member in self.registry.members()
            ]
        )

    def save(self, snapshot: Snapshot) -> None:
        self.published.update_progress(*self.core.progress(), "saving a checkpoint")
        self.hooks.save(snapshot)

    def members(self) -> dict[str, float]:
        now, updates, members = time.monotonic(), self.core.learner.updates, self.registry.members()
        actors = [member for member in members if member.role == ACTOR and now - member.heard < self.registry.live_s]
        for member in members:
            before = self._incarnations.get((member.index, member.name), member.incarnation)
            if member.incarnation > before:  # not when it is first seen: a run that is resumed starts everybody anew
                self.core.meter.count("fleet/restarts", member.incarnation - before)
            self._incarnations[member.index, member.name] = member.incarnation
        figures = {"fleet/actors": float(len(actors)), "fleet/inbox": float(len(self.message_handler.inbox))}
        present = {(member.index, member.name) for member in members}
        if len(self._incarnations) > 2 * len(present) + self.registry.most:
            self._incarnations = {place: life for place, life in self._incarnations.items() if place in present}
        if lags := [max(0, updates - max(0, member.version)) for member in actors]:
            figures["fleet/policy_lag"] = sum(lags) / len(lags)
        return figures


def await_evaluation(cell: LearnerCore, intake: MessageHandler, registry: Registry, desk: PublishedState,
                     serve: Callable[[float], None]) -> None:
    """The last weights are judged elsewhere; whoever does it may be slow, but must be alive."""
    desk.request_final_evaluation()
    heard = time.monotonic()

    def over() -> bool:
        nonlocal heard
        heard = max([heard, *(member.heard for member in registry.members() if member.role == "evaluator")])
        if time.monotonic() - heard > EVALUATOR_GRACE_S:
            log.warning("the last weights were not evaluated: nothing was heard of the evaluator for %.0f s",
                        EVALUATOR_GRACE_S)
            return True
        return cell.stop.is_external or intake.evaluated_version >= cell.learner.updates

    drive([intake], over, serve)
