"""Training with actors and evaluator in other processes, on this host or on others.

    actors, evaluator ──▶ Inbox ──▶ MessageHandler ──▶ replay ──▶ learner ──▶ PublishedState ──▶ actors, evaluator

Only the main thread changes state. RPC threads put messages into the inbox and read the published state, so a long
checkpoint does not delay heartbeats.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.replay.store import ReplayStore
from qfleet.training.evaluation import NoEvaluator
from qfleet.training.learner_core import Components, LearnerCore
from qfleet.training.learner_run import Acting
from qfleet.training.loop import TrainingPlan, Worker, drive, idle
from qfleet.training.timers import TimeShares
from qfleet.transport.fleet_pb2 import ExchangeRequest, Part
from qfleet.transport.inbox import MAX_STEPS, DecodedMessage, Inbox, decode_message
from qfleet.transport.message_rules import MAX_TAGS, expected_weights, require_allowed, require_sound
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import ACTOR, EVALUATOR, Registry

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 32
"""Messages to apply between two updates; the rate limiter would block further ones."""

MIN_STEP_LIMIT = 1 << 16
"""Lower bound of the limit on the environment steps in one message."""

MEMBERS_PERIOD_S = 1.0
"""Period of writing the member list."""

ACTORS, INBOX, POLICY_LAG = "fleet/actors", "fleet/inbox", "fleet/policy_lag"
"""Metrics of a learner's actors: live actors, queued messages, mean policy lag in updates."""

EVALUATOR_GRACE_S = 60.0
"""Time that a finished run waits for the last evaluation without a heartbeat of the evaluator."""


@dataclass(frozen=True)
class MemberHandlers:
    """What to do with the checkpoint parts and the metrics (means) of members, by index, and after every round."""

    take_part: Callable[[int, Part], None] = lambda index, part: None
    take_metrics: Callable[[int, Mapping[str, float]], None] = lambda index, metrics: None
    on_round: Callable[[], None] = lambda: None


def merge_actor_metrics(learners: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the actors of all learners, from those of each; empty if no learner has remote actors."""
    found = [metrics for metrics in learners if ACTORS in metrics]
    if not found:
        return {}
    actors = sum(metrics[ACTORS] for metrics in found)
    merged = {ACTORS: actors, INBOX: sum(metrics.get(INBOX, 0.0) for metrics in found)}
    if actors:
        merged[POLICY_LAG] = sum(metrics[ACTORS] * metrics.get(POLICY_LAG, 0.0) for metrics in found) / actors
    return merged


class MessageHandler:
    """Applies the messages in the inbox, each exactly once; pauses while the rate limiter does not allow inserts.

    After `close`, training has ended: experience is dropped, and evaluations and metrics are still taken.
    `shares` records the time for which messages were held back (`fleet/backpressure_share`). `handlers` receive what
    further learners send.
    """

    def __init__(self, core: LearnerCore, registry: Registry, inbox: Inbox, shares: TimeShares,
                 handlers: MemberHandlers | None = None) -> None:
        self.core, self.registry, self.inbox, self.shares = core, registry, inbox, shares
        self.handlers = handlers or MemberHandlers()
        self.closing = False
        self.evaluated_version = -1
        self.member_steps: Counter[int] = Counter()  # environment steps by sender
        self._tags: set[str] = set()  # of metrics and counters; bounded: members choose them
        self._held_since: float | None = None
        # An actor blocks with two chunks per lane unconfirmed; `inbox.steps` is an eighth of a chunk per lane.
        self._max_steps = min(MAX_STEPS, max(MIN_STEP_LIMIT, 64 * inbox.steps))
        self._expected = expected_weights(core.learner.flat.state())

    def close(self) -> None:
        self.closing = True

    def step(self) -> bool:
        """Apply up to `MESSAGES_PER_TURN` messages; returns whether there were any."""
        now = time.perf_counter()
        self.shares.add_seconds("fleet/backpressure_share", 0.0 if self._held_since is None else now - self._held_since)
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
                decoded = self._decode(message, role)
            except ValueError as error:
                self.core.meter.count("fault/bad_messages")
                log.warning("a message of member %d was rejected: %s", message.index, error)
                if role == EVALUATOR:  # the end of the run must not wait for a rejected evaluation
                    self.evaluated_version = max(
                        [self.evaluated_version, *(judgement.version for judgement in message.judgements)]
                    )
                continue
            self._apply(message.index, decoded)
        return True

    def _decode(self, message: ExchangeRequest, role: str) -> DecodedMessage:
        """Decode and validate a message; ValueError if any part of it is invalid."""
        require_allowed(message, role, self._max_steps)
        decoded = decode_message(message, self.core.layout)
        for score, weights in decoded.evaluations:
            require_sound(score, weights, self._expected)
        return decoded

    def _apply(self, index: int, decoded: DecodedMessage) -> None:
        experience, meter = self.core.experience, self.core.meter
        if not self.closing:
            self.core.clock.count_steps(decoded.steps)
            self.member_steps[index] += decoded.steps
            for packed, priority in decoded.chunks:
                if experience.add_packed(packed, priority) is None:
                    meter.count("fault/bad_messages")
                    log.warning("a chunk of member %d was dropped: it does not decode", index)
            for episode in decoded.episodes:
                meter.episode(episode)
        self.handlers.take_metrics(index, {tag: total / max(1, count)
                                            for tag, (total, count) in decoded.metrics.items()})
        for tag, (total, count) in decoded.metrics.items():
            if self._accepts(tag):
                meter.add(tag, total, count)
        for tag, by in decoded.counters.items():
            if self._accepts(tag):
                meter.count(tag, by)
        if decoded.member_state:
            self.registry.set_member_state(index, decoded.member_state)
        if decoded.checkpoint_part is not None:
            self.handlers.take_part(index, decoded.checkpoint_part)
        for score, weights in decoded.evaluations:
            if score.version > self.core.learner.updates:
                continue  # from before a restart: this learner has not reached that update again
            self.core.record_evaluation(score, weights)
            self.evaluated_version = score.version

    def _accepts(self, tag: str) -> bool:
        if len(self._tags) < MAX_TAGS:
            self._tags.add(tag)
        return tag in self._tags


@dataclass(frozen=True)
class RemoteActorsSetup:
    """Implements `RunSetup` for actors and evaluator in other processes, which send messages to `inbox`.

    `ends_members`: when the learner is done, the run is over for its members, too. A coordinator decides that for the
    workers of a parameter server: until it has saved, it may die and go back to an earlier checkpoint.
    """

    agent: Agent
    spec: EnvSpec
    published: PublishedState
    registry: Registry
    inbox: Inbox
    ends_members: bool = True

    @property
    def weights(self) -> PublishedState:
        return self.published

    def components(self, plan: TrainingPlan, components: Components) -> Components:
        """Messages are handled between two updates, and actors wait for a learner that falls behind."""
        return replace(components, max_updates_per_step=1, slack_samples=plan.slack_samples)

    def batches_ahead(self, plan: TrainingPlan, replay: ReplayStore[Any]) -> int | None:
        """Unknown: messages arrive between two updates."""
        return None

    def acting(self, core: LearnerCore, shares: TimeShares) -> RemoteActors:
        return RemoteActors(self, core, shares)

    def evaluator(self, core: LearnerCore, acting: Acting) -> EvaluatorMember:
        assert isinstance(acting, RemoteActors)
        return EvaluatorMember(acting)


class RemoteActors:
    """Implements `Acting` with actors in other processes: their messages, and the state published for them."""

    evaluates = False

    def __init__(self, setup: RemoteActorsSetup, core: LearnerCore, shares: TimeShares,
                 handlers: MemberHandlers | None = None) -> None:
        self.core, self.shares = core, shares
        self.published, self.registry, self.ends_members = setup.published, setup.registry, setup.ends_members
        self.message_handler = MessageHandler(core, setup.registry, setup.inbox, shares, handlers)
        self._incarnations: dict[tuple[int, str], int] = {}
        self._members_written_at = -MEMBERS_PERIOD_S

    def begin(self) -> None:
        """Nothing to do: the actors start by themselves."""

    def turns(self, learner: Worker) -> list[Worker]:
        return [self.shares.timed("time/inbox_share", self.message_handler), learner]

    def serve(self, sleep_s: float) -> None:
        """Publish progress, call the callback of a round, write the member list, sleep."""
        self.published.update_progress(*self.core.progress(), "ending" if self.message_handler.closing else "training")
        self.message_handler.handlers.on_round()
        self._write_members()
        if sleep_s:
            since = time.perf_counter()
            idle(sleep_s)
            self.shares.add_seconds("time/idle_share", time.perf_counter() - since)

    def finish(self, all_updates: bool) -> None:
        self.message_handler.close()
        while all_updates and not self.core.stop.is_external and self.core.learner.step():
            self.serve(0)

    def end(self) -> None:
        """Tell members that the run is over.

        Not after a signal or an exception: members that have left would be missing when the run is resumed.
        """
        if self.ends_members and not self.core.stop.is_external:
            self.published.stop()

    def before_checkpoint(self, index: int) -> None:
        """Nothing to do: runs with remote actors do not resume exactly."""

    def before_write(self) -> None:
        """Publish the phase for members that wait meanwhile."""
        self.published.update_progress(*self.core.progress(), "saving a checkpoint")

    def await_evaluation(self) -> None:
        await_evaluation(self.core, self.message_handler, self.registry, self.published, self.serve)

    def state_dict(self) -> dict[str, Any]:
        return {"actor_registry": self.registry.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """The state may come from a run whose actors were in the learner's process."""
        if "actor_registry" in state:
            self.registry.load_state_dict(state["actor_registry"])
        return False

    def finish_restore(self, state: Mapping[str, Any]) -> bool:
        self.core.republish()
        self.published.update_progress(*self.core.progress(), "starting")  # before the first member registers
        return False

    def _write_members(self) -> None:
        """Write the list of members every `MEMBERS_PERIOD_S`, for `qfleet top`."""
        now, live_s = time.monotonic(), self.registry.live_s
        if now - self._members_written_at < MEMBERS_PERIOD_S:
            return
        self._members_written_at = now
        self.core.hooks.write_members(
            [
                {
                    "name": member.name, "role": member.role, "host": member.host, "pid": member.pid,
                    "incarnation": member.incarnation, "steps": member.steps, "version": member.version,
                    "silent_s": now - member.heard, "live_s": live_s}
                for member in self.registry.members()
            ]
        )

    def metrics(self) -> dict[str, float]:
        """Gauge: live actors, queued messages and mean policy lag in updates. Also counts restarts of members."""
        now, updates, members = time.monotonic(), self.core.learner.updates, self.registry.members()
        actors = [member for member in members if member.role == ACTOR and now - member.heard < self.registry.live_s]
        for member in members:
            before = self._incarnations.get((member.index, member.name), member.incarnation)
            if member.incarnation > before:  # not when first seen: resuming a run restarts all members
                self.core.meter.count("fleet/restarts", member.incarnation - before)
            self._incarnations[member.index, member.name] = member.incarnation
        metrics = {ACTORS: float(len(actors)), INBOX: float(len(self.message_handler.inbox))}
        present = {(member.index, member.name) for member in members}
        if len(self._incarnations) > 2 * len(present) + self.registry.most:
            self._incarnations = {key: number for key, number in self._incarnations.items() if key in present}
        if lags := [max(0, updates - max(0, member.version)) for member in actors]:
            metrics[POLICY_LAG] = sum(lags) / len(lags)
        return metrics


class EvaluatorMember(NoEvaluator):
    """The evaluator of a run with remote actors: a member that fetches the newest weights when an evaluation is due."""

    def __init__(self, acting: RemoteActors) -> None:
        self._acting = acting

    def request(self) -> None:
        """Publish the newest weights and ask the member to evaluate them."""
        self._acting.core.learner.publish()
        self._acting.published.request_evaluation()

    def evaluate(self) -> None:
        """Wait until the published weights are evaluated."""
        self._acting.await_evaluation()


def await_evaluation(core: LearnerCore, handler: MessageHandler, registry: Registry, published: PublishedState,
                     serve: Callable[[float], None]) -> None:
    """Wait until the evaluator process has evaluated the last weights: as long as it sends heartbeats."""
    published.request_final_evaluation()
    last_heard = time.monotonic()

    def finished() -> bool:
        nonlocal last_heard
        last_heard = max([last_heard, *(member.heard for member in registry.members() if member.role == "evaluator")])
        if time.monotonic() - last_heard > EVALUATOR_GRACE_S:
            log.warning("the last weights were not evaluated: no heartbeat of the evaluator for %.0f s; "
                        "run `qfleet eval` to evaluate them", EVALUATOR_GRACE_S)
            return True
        return core.stop.is_external or handler.evaluated_version >= core.learner.updates

    drive([handler], finished, serve)
