"""Client connection of an actor, evaluator or worker to its learner: one thread sends messages in order, with retries.

    main thread:        count_steps, add_chunk, episode, ... ─▶ Outbox        never touches the network
    connection thread:  take_message ─▶ exchange ─▶ TAKEN: next · WAIT: ask for room · lost: resend · ABORTED: hello

A message keeps its sequence number when it is resent, and a session keeps its count when the learner restarts. The
server can therefore recognise a repetition, and everything that was confirmed is stored exactly once.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping

import grpc
import torch

import qfleet
from qfleet.core.clock import Progress
from qfleet.core.errors import ProcessFault, UserError
from qfleet.core.evaluation import Score
from qfleet.replay.layout import Layout
from qfleet.transport.fleet_pb2 import STOP, WAIT, ExchangeReply, ExchangeRequest, HelloRequest, Welcome
from qfleet.transport.grpc_channel import PROTOCOL, Channel, fatal_error, summarize_error
from qfleet.transport.outbox import Outbox, Stopwatch
from qfleet.transport.registry import ACTOR
from qfleet.transport.remote import NewestWeights, RemoteClock, RemoteReplay, RemoteWeights

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
PERIOD_S = 0.02
CALM_PERIOD_S = 0.1
PERIOD_PER_ACTOR_S = 0.005
"""An actor sends 10 messages a second, or 50 if it has much to send: a call costs both sides more CPU time than a step
of an Atari emulator. With many actors each sends fewer, so that the learner receives at most 200 a second.
"""

PROBE_S = (0.01, 0.1)
RETRY_S = (0.1, 1.0)
LOG_S = 10.0
DEREGISTER_S = 0.2


class ConnectionLost(Exception):
    """The fleet did not answer for longer than `patience_s`."""


class Superseded(ProcessFault):
    """A newer process has this name: a supervisor considered this one dead. Not a user error."""


class Backoff:
    """Exponential backoff between two limits, with jitter so that clients do not retry at the same time."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first, self._longest, self._next = first_s, longest_s, first_s

    def reset(self) -> None:
        self._next = self._first

    def draw(self) -> float:
        now, self._next = self._next, min(self._longest, 2 * self._next)
        return now * random.uniform(0.75, 1.0)


class FleetConnection:
    """Connection to a fleet. Call `hello`, then `start`, then use the proxies; `stopped` or `failed` mark the end.

    `metrics` and `weights` serve the roles of this process, `replay(layout)` its recorder, `send_evaluation` its
    evaluator.
    """

    def __init__(self, channel: Channel, name: str, role: str = ACTOR, patience_s: float = 600.0,
                 claim: str = "") -> None:
        self.address, self.name, self.role, self.patience_s = channel.address, name, role, patience_s
        self.stopped = False
        self.wanted_version = -1  # for an evaluator: version that it is asked to evaluate
        # For a parameter-server worker, as the coordinator last replied.
        self.remote_steps = self.requested_checkpoint = self.saved_checkpoint = 0
        self.failed: Exception | None = None
        self._stop_waiting: Callable[[], bool] = lambda: False
        self.metrics = Outbox()
        self.welcome = Welcome()
        self._channel = channel
        self.weights: RemoteWeights | NewestWeights = RemoteWeights(self._wake)
        if role != ACTOR:
            self.weights = NewestWeights(self._channel, lambda: self._is_over or self._stop_waiting())
        self._session, self._claim = secrets.token_hex(16), claim
        self._sequence = 0
        self._latest = (Progress(0, 0), -1)
        self._message: bytes | None = None  # as taken from the outbox, until it is confirmed
        self._data = b""
        self._probing = self._needs_hello = False
        self._probe, self._retry = Backoff(*PROBE_S), Backoff(*RETRY_S)
        self._waiting = Stopwatch(self.metrics, "wire/wait_ms")
        self._answered_at = self._sent_at = self._taken_at = self._not_before = self._logged_at = 0.0
        self._closing: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"connection {name}", daemon=True)

    # ---- For the main thread ----

    def stop_waiting_if(self, condition: Callable[[], bool]) -> None:
        """Poll `condition` while an evaluator waits for weights; if it is true, the evaluator gets none."""
        self._stop_waiting = condition

    def hello(self) -> Welcome:
        """Register this process; retries until `patience_s` has passed. UserError if the fleet rejects it."""
        since, pause, logged = time.monotonic(), Backoff(*RETRY_S), 0.0
        while True:
            try:
                return self._send_hello()
            except grpc.RpcError as error:
                if (fatal := fatal_error(error, self.address)) is not None:
                    raise fatal from None
                now = time.monotonic()
                if now - since >= self.patience_s:
                    raise UserError(
                        f"no answer from {self.address} for {self.patience_s:g} s ({summarize_error(error)}): is "
                        "the fleet running, is the address right, and do both sides agree on TLS (--tls-ca) and on "
                        "client certificates (--tls-cert)?"
                    ) from None
                if now - logged >= LOG_S:
                    logged = now
                    log.warning(
                        "no answer from %s yet (%s); retrying for %.0f s more", self.address,
                        summarize_error(error), self.patience_s - (now - since))
            time.sleep(pause.draw())

    def shorten_patience(self, patience_s: float) -> None:
        """Wait at most this long for an answer from now on."""
        self.patience_s = patience_s

    def start(self) -> None:
        """Start the sending thread, and with it the heartbeats."""
        self._answered_at = time.monotonic()
        self._thread.start()

    def replay(self, layout: Layout, lanes: int) -> RemoteReplay:
        """Remote replay for an actor with `lanes` lanes: about one chunk of each lane may be unconfirmed."""
        self.metrics.limit_unconfirmed(lanes * layout.chunk_steps)
        return RemoteReplay(self.metrics, layout)

    @property
    def clock(self) -> RemoteClock:
        """The run's step clock for an actor of this process."""
        return RemoteClock(self.metrics, lambda: self.progress().steps)

    def progress(self) -> Progress:
        """Global steps and updates as last received, plus local steps that are not confirmed yet."""
        latest = self._latest[0]
        return Progress(latest.steps + self.metrics.unconfirmed_steps, latest.updates)

    def send_evaluation(self, score: Score, state: Mapping[str, torch.Tensor]) -> None:
        self.metrics.add_evaluation(score, state)

    def close(self, flush_s: float = 0.0) -> None:
        """Send the remaining messages for at most `flush_s` seconds, deregister and close the channel."""
        with self.metrics.changed:
            self._closing = time.monotonic() + flush_s
            self.metrics.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(flush_s + DEREGISTER_S)
        if not self._thread.is_alive() and self.welcome.epoch and not (self.stopped or self.failed):
            self._deregister()
        if isinstance(self.weights, RemoteWeights):
            self.weights.close()
        self._channel.close()  # ends a pending call
        if self._thread.is_alive():
            self._thread.join()

    # ---- For the connection's own thread ----

    @property
    def _is_over(self) -> bool:
        return self.stopped or self.failed is not None or self._closing is not None

    def _wake(self) -> None:
        with self.metrics.changed:
            self.metrics.changed.notify_all()

    def _run(self) -> None:
        try:
            while not self.stopped and not self._flushed():
                self._exchange_once()
        except Exception as error:  # of any kind: the main thread must see it, or would wait for ever
            if self._closing is None:
                self.failed = error

    def _flushed(self) -> bool:
        if self._closing is None:
            return False
        return (self._message is None and self.metrics.empty) or time.monotonic() >= self._closing

    def _exchange_once(self) -> None:
        """Send one message if one is due, and process the reply."""
        if isinstance(self.weights, RemoteWeights):
            self.weights.poll(self._channel, self._latest[1])
        now = time.monotonic()
        if (wait := self._seconds_until_due(now)) > 0:
            with self.metrics.changed:
                if self._seconds_until_due(time.monotonic()) > 0:
                    self.metrics.changed.wait(wait)
            return
        try:
            if self._needs_hello:
                self._send_hello()
            has_message = self._compose(now)
            self._sent_at = now
            reply = self._channel.exchange(self._data if has_message else self._request())
        except grpc.RpcError as error:
            self._handle_error(error)
        else:
            self._handle_reply(reply, has_message)

    def _seconds_until_due(self, now: float) -> float:
        """Seconds until the next message is due."""
        due = self._sent_at + HEARTBEAT_S
        if self._message is not None:
            due = now
        elif not self.metrics.empty:
            due = now if self.metrics.full else min(due, self._taken_at + self._period)
        return max(due, self._not_before) - now

    @property
    def _period(self) -> float:
        return max(
            PERIOD_S if self.metrics.should_send_soon else CALM_PERIOD_S, PERIOD_PER_ACTOR_S * self.welcome.actors
        )

    def _compose(self, now: float) -> bool:
        """Prepare a message to be sent; False if a heartbeat is enough."""
        if self._message is None and not self.metrics.empty and (
                self.metrics.full or now - self._taken_at >= self._period or self._closing is not None):
            self._message, self._taken_at = self.metrics.take_message().SerializeToString(), now
            self._sequence += 1
            self._waiting.begin()
            self._stamp_message()
        return self._message is not None and not self._probing

    def _stamp_message(self) -> None:
        """Add the sequence number and the sender's identity to the message; repeated after a new hello."""
        if self._message is not None:
            self._data = self._request(sequence=self._sequence) + self._message  # parsed as one message

    def _request(self, sequence: int = 0, leaving: bool = False) -> bytes:
        """Serialised request with the identity of the sender and no contents."""
        return ExchangeRequest(
            epoch=self.welcome.epoch, index=self.welcome.index, incarnation=self.welcome.incarnation,
            session=self._session, total_steps=self.metrics.total_steps, version=self.weights.version,
            sequence=sequence, leaving=leaving).SerializeToString()

    def _handle_reply(self, reply: ExchangeReply, had_message: bool) -> None:
        now = time.monotonic()
        if self._logged_at:
            log.info("reconnected to the fleet at %s after %.1f s", self.address, now - self._answered_at)
        self._answered_at, self._logged_at, self._not_before = now, 0.0, 0.0
        self._retry.reset()
        if reply.verdict == STOP:
            self.stopped = True
            return
        if had_message:
            self.metrics.count_transport("wire/bytes", len(self._data))
        if had_message and reply.verdict != WAIT:
            self._message = None
            self._waiting.end()
            self.metrics.mark_delivered()
        self._latest = (Progress(reply.steps, reply.updates), reply.version)
        self.wanted_version = reply.wanted
        self.remote_steps, self.saved_checkpoint, self.requested_checkpoint = reply.elsewhere, reply.saved, reply.save
        self._probing = self._message is not None and reply.verdict == WAIT
        if self._probing:
            self._not_before = now + self._probe.draw()
        else:
            self._probe.reset()

    def _handle_error(self, error: grpc.RpcError) -> None:
        now = time.monotonic()
        if (fatal := fatal_error(error, self.address)) is not None:
            raise fatal from None
        if error.code() == grpc.StatusCode.ABORTED:
            self._needs_hello, self._answered_at, self._not_before = True, now, now + self._retry.draw()
            return
        if error.code() == grpc.StatusCode.ALREADY_EXISTS:
            raise Superseded(error.details()) from None
        self.metrics.count_transport("wire/retries", 1)
        self._not_before = now + self._retry.draw()
        if now - self._answered_at >= self.patience_s:
            raise ConnectionLost(f"no answer from the fleet at {self.address} for {now - self._answered_at:.0f} s "
                                 f"({summarize_error(error)})") from None
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            log.warning("no answer from %s (%s); retrying for %.0f s", self.address, summarize_error(error),
                        self.patience_s - (now - self._answered_at))

    def _send_hello(self) -> Welcome:
        request = HelloRequest(
            protocol=PROTOCOL, version=qfleet.__version__, torch=torch.__version__, python=platform.python_version(),
            name=self.name, role=self.role, host=socket.gethostname(), pid=os.getpid(), session=self._session,
            claim=self._claim, again=bool(self.welcome.epoch))
        welcome = self._channel.hello(request)
        if self.welcome.epoch and welcome.epoch != self.welcome.epoch:
            self.weights.rewind()
            self.wanted_version = -1
        self._latest = (Progress(welcome.steps, welcome.updates), welcome.version)
        self.remote_steps = welcome.elsewhere
        # After the clocks: a thread that sees the new epoch must also see its clocks.
        self.welcome, self._needs_hello = welcome, False
        self.metrics.limit(welcome.max_message_bytes)
        self._stamp_message()
        return welcome

    def _deregister(self) -> None:
        try:
            self._channel.exchange(self._request(leaving=True), timeout_s=1.0)
        except grpc.RpcError as error:
            log.debug("deregistered at %s without an answer: %s", self.address, summarize_error(error))
        except UserError as error:  # another fleet uses the address by now
            log.debug("deregistered at %s without an answer: %s", self.address, error)
