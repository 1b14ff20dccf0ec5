"""A process's line to its fleet: one thread that ships messages in order, each of them until it has arrived.

    main thread:    tick, add, episode, ... ─▶ Outbox                       never touches the network
    link's thread:  seal ─▶ send ─▶ TAKEN: next · WAIT: ask for room · lost: the same again · ABORTED: hello again

A message keeps its sequence however often it is sent, and a session its count whatever happens to the learner: the
other side can tell a repetition from news, so whatever is confirmed is stored once.
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
"""An actor speaks 10 times a second, and 50 times if it has much to say: a call costs both sides more CPU time than an
Atari emulator needs for a step. Many actors speak more rarely, so that all together the cell hears 200."""

PROBE_S = (0.01, 0.1)
RETRY_S = (0.1, 1.0)
LOG_S = 10.0
PARTING_S = 0.2


class ConnectionLost(Exception):
    """The fleet did not answer for longer than our patience."""


class Superseded(ProcessFault):
    """A newer process has this name: that of a supervisor that took us for dead. It is no user's mistake."""


class Backoff:
    """Waits that double from the first to the longest, with some chance in them so that not all come back at once."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first, self._longest, self._next = first_s, longest_s, first_s

    def reset(self) -> None:
        self._next = self._first

    def draw(self) -> float:
        now, self._next = self._next, min(self._longest, 2 * self._next)
        return now * random.uniform(0.75, 1.0)


class FleetConnection:
    """`hello`, then `start`, then the stubs may be used; `stopped` or `failed` say that it is over.

    `metrics` and `weights` serve the roles of this process, `replay(layout)` its recorder, `judge` its evaluator.
    """

    def __init__(self, caller: Channel, name: str, role: str = ACTOR, patience_s: float = 600.0,
                 claim: str = "") -> None:
        self.address, self.name, self.role, self.patience_s = caller.address, name, role, patience_s
        self.stopped = self.final = False
        self.remote_steps = self.requested_checkpoint = self.saved_checkpoint = (
            0  # for one of several cells, as the other side says
        )
        self.failed: Exception | None = None
        self.stop_waiting: Callable[[], bool] = lambda: (
            False
        )  # asked while an evaluator waits for weights: should it not?
        self.metrics = Outbox()
        self.welcome = Welcome()
        self._caller = caller
        self.weights: RemoteWeights | NewestWeights = RemoteWeights(self._wake)
        if role != ACTOR:
            self.weights = NewestWeights(self._caller, lambda: self._over or self.stop_waiting())
        self._session, self._claim = secrets.token_hex(16), claim
        self._sequence = 0
        self._heard = (Progress(0, 0), -1)
        self._message: ExchangeRequest | None = None
        self._data = b""
        self._probing = self._must_say_hello = False
        self._probe, self._retry = Backoff(*PROBE_S), Backoff(*RETRY_S)
        self._waiting = Stopwatch(self.metrics, "wire/wait_ms")
        self._answered_at = self._said_at = self._sealed_at = self._not_before = self._logged_at = 0.0
        self._closing: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"link {name}", daemon=True)

    # ---- For the main thread ----

    def hello(self) -> Welcome:
        """Introduce this process; asks until somebody answers or patience ends. UserError if we are not wanted."""
        since, pause, logged = time.monotonic(), Backoff(*RETRY_S), 0.0
        while True:
            try:
                return self._say_hello()
            except grpc.RpcError as error:
                if (fatal := fatal_error(error, self.address)) is not None:
                    raise fatal from None
                now = time.monotonic()
                if now - since >= self.patience_s:
                    raise UserError(
                        f"nobody answered at {self.address} for {self.patience_s:g} s ({summarize_error(error)}): is "
                        "the fleet running, is the address right, does it use TLS (--tls-ca), and ask for a "
                        "certificate of yours (--tls-cert), exactly if you do?"
                    ) from None
                if now - logged >= LOG_S:
                    logged = now
                    log.warning(
                        "no answer from %s yet (%s); asking for %.0f s more", self.address,
                        summarize_error(error), self.patience_s - (now - since))
            time.sleep(pause.draw())

    def start(self) -> None:
        """Begin to ship, and to show that we live."""
        self._answered_at = time.monotonic()
        self._thread.start()

    def replay(self, layout: Layout, lanes: int) -> RemoteReplay:
        """Where an actor with so many lanes puts its experience: about one chunk of each may be on its way."""
        self.metrics.most_steps = lanes * layout.chunk_steps
        return RemoteReplay(self.metrics, layout)

    @property
    def clock(self) -> RemoteClock:
        """The run's step clock for an actor of this process."""
        return RemoteClock(self.metrics, lambda: self.progress().steps)

    def progress(self) -> Progress:
        """The run's clocks as last heard, with the steps taken here that are still under way."""
        heard = self._heard[0]
        return Progress(heard.steps + self.metrics.unconfirmed_steps, heard.updates)

    @property
    def newest_version(self) -> int:
        """The version of the fleet's newest weights, as last heard."""
        return self._heard[1]

    def send_evaluation(self, score: Score, state: Mapping[str, torch.Tensor]) -> None:
        self.metrics.add_evaluation(score, state)

    def close(self, flush_s: float = 0.0) -> None:
        """Ship what is left, for at most `flush_s` seconds, say good-bye and hang up."""
        with self.metrics.changed:
            self._closing = time.monotonic() + flush_s
            self.metrics.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(flush_s + PARTING_S)
        if not self._thread.is_alive() and self.welcome.epoch and not (self.stopped or self.failed):
            self._deregister()
        if isinstance(self.weights, RemoteWeights):
            self.weights.close()
        self._caller.close()  # a call under way ends with it
        if self._thread.is_alive():
            self._thread.join()

    # ---- For the link's own thread ----

    @property
    def _over(self) -> bool:
        return self.stopped or self.failed is not None or self._closing is not None

    def _wake(self) -> None:
        with self.metrics.changed:
            self.metrics.changed.notify_all()

    def _run(self) -> None:
        try:
            while not self.stopped and not self._flushed():
                self._turn()
        except Exception as error:  # whatever it is: the main thread must hear of it, or would wait for ever
            if self._closing is None:
                self.failed = error

    def _flushed(self) -> bool:
        if self._closing is None:
            return False
        return (self._message is None and self.metrics.empty) or time.monotonic() >= self._closing

    def _turn(self) -> None:
        """Say one thing, if there is anything to be said now, and take in the answer."""
        if isinstance(self.weights, RemoteWeights):
            self.weights.poll(self._caller, self._heard[1])
        now = time.monotonic()
        if (wait := self._rest(now)) > 0:
            with self.metrics.changed:
                if self._rest(time.monotonic()) > 0:
                    self.metrics.changed.wait(wait)
            return
        try:
            if self._must_say_hello:
                self._say_hello()
            news = self._compose(now)
            self._said_at = now
            reply = self._caller.exchange(self._data if news else self._signed(ExchangeRequest()))
        except grpc.RpcError as error:
            self._missed(error)
        else:
            self._answered(reply, news)

    def _rest(self, now: float) -> float:
        """Seconds until there is something to be said."""
        due = self._said_at + HEARTBEAT_S
        if self._message is not None:
            due = now
        elif not self.metrics.empty:
            due = now if self.metrics.full else min(due, self._sealed_at + self._period)
        return max(due, self._not_before) - now

    @property
    def _period(self) -> float:
        return max(
            PERIOD_S if self.metrics.should_send_soon else CALM_PERIOD_S, PERIOD_PER_ACTOR_S * self.welcome.actors
        )

    def _compose(self, now: float) -> bool:
        """Have a message ready to be sent; False if a heartbeat will do."""
        if self._message is None and not self.metrics.empty and (
                self.metrics.full or now - self._sealed_at >= self._period or self._closing is not None):
            self._message, self._sealed_at = self.metrics.take_message(), now
            self._sequence += 1
            self._waiting.begin()
            self._address()
        return self._message is not None and not self._probing

    def _address(self) -> None:
        """Write the sender's place on the message; a new place, a new envelope."""
        if self._message is None:
            return
        self._message.sequence = self._sequence
        self._data = self._signed(self._message)

    def _signed(self, message: ExchangeRequest) -> bytes:
        message.epoch, message.index = self.welcome.epoch, self.welcome.index
        message.incarnation, message.session = self.welcome.incarnation, self._session
        message.total_steps, message.version = self.metrics.total_steps, self.weights.version
        return message.SerializeToString()

    def _answered(self, reply: ExchangeReply, news: bool) -> None:
        now = time.monotonic()
        if self._logged_at:
            log.info("the fleet at %s answers again after %.1f s", self.address, now - self._answered_at)
        self._answered_at, self._logged_at, self._not_before = now, 0.0, 0.0
        self._retry.reset()
        if reply.verdict == STOP:
            self.stopped = True
            return
        if news:
            self.metrics.count_transport("wire/bytes", len(self._data))
        if news and reply.verdict != WAIT:
            self._message = None
            self._waiting.end()
            self.metrics.mark_delivered()
        self._heard, self.final = (Progress(reply.steps, reply.updates), reply.version), reply.final
        self.remote_steps, self.saved_checkpoint, self.requested_checkpoint = reply.elsewhere, reply.saved, reply.save
        self._probing = self._message is not None and reply.verdict == WAIT
        if self._probing:
            self._not_before = now + self._probe.draw()
        else:
            self._probe.reset()

    def _missed(self, error: grpc.RpcError) -> None:
        now = time.monotonic()
        if (fatal := fatal_error(error, self.address)) is not None:
            raise fatal from None
        if error.code() == grpc.StatusCode.ABORTED:
            self._must_say_hello, self._answered_at, self._not_before = True, now, now + self._retry.draw()
            return
        if error.code() == grpc.StatusCode.ALREADY_EXISTS:
            raise Superseded(error.details()) from None
        self.metrics.count_transport("wire/retries", 1)
        self._not_before = now + self._retry.draw()
        if now - self._answered_at >= self.patience_s:
            raise ConnectionLost(f"the fleet at {self.address} has not answered for {now - self._answered_at:.0f} s "
                                 f"({summarize_error(error)})") from None
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            log.warning("no answer from %s (%s); trying again for %.0f s", self.address, summarize_error(error),
                        self.patience_s - (now - self._answered_at))

    def _say_hello(self) -> Welcome:
        request = HelloRequest(
            protocol=PROTOCOL, version=qfleet.__version__, torch=torch.__version__, python=platform.python_version(),
            name=self.name, role=self.role, host=socket.gethostname(), pid=os.getpid(), session=self._session,
            claim=self._claim)
        welcome = self._caller.hello(request)
        if self.welcome.epoch and welcome.epoch != self.welcome.epoch:
            self.weights.rewind()
        self._heard = (Progress(welcome.steps, welcome.updates), welcome.version)
        self.remote_steps = welcome.elsewhere
        self.welcome, self._must_say_hello = (
            welcome, False)  # after the clocks: who sees another epoch sees its clocks, too
        self.metrics.limit(welcome.max_message_bytes)
        self._address()
        return welcome

    def _deregister(self) -> None:
        try:
            self._caller.exchange(self._signed(ExchangeRequest(leaving=True)), timeout_s=1.0)
        except grpc.RpcError as error:
            log.debug("left %s without an answer: %s", self.address, summarize_error(error))
        except UserError as error:  # another fleet has the address by now
            log.debug("left %s without an answer: %s", self.address, error)
