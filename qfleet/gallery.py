"""An evaluator as a process of its own, for those who play for themselves: the first rank of a crew, or a run that is
one process otherwise (`eval.beside`). They listen to it, and mostly start it."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from qfleet import session
from qfleet.cellhost import Orders
from qfleet.config import to_yaml
from qfleet.head import silence_s
from qfleet.members import Contact
from qfleet.roles.evaluator import Evaluator
from qfleet.roles.metrics import Sink
from qfleet.roles.schedule import Schedule
from qfleet.runs.directory import RunDirectory
from qfleet.runtime.cell import Cell
from qfleet.runtime.fleet import Intake, await_evaluation
from qfleet.runtime.inline import Inline
from qfleet.runtime.life import surroundings
from qfleet.runtime.plan import rest
from qfleet.runtime.shares import Shares
from qfleet.runtime.supervise import Child, Patience, Supervisor
from qfleet.runtime.wire.config import FleetConfig
from qfleet.runtime.wire.desk import Desk
from qfleet.runtime.wire.inbox import Inbox
from qfleet.runtime.wire.registry import Registry
from qfleet.runtime.wire.security import read_token, write_token
from qfleet.runtime.wire.server import Server
from qfleet.session import TrainResult
from qfleet.settings import RunConfig
from qfleet.types import EnvSpec, ProcessFault, UserError

log = logging.getLogger(__name__)

NAME = "evaluator"
GRACE_S = 5.0


Opening = Callable[[Desk, Registry, Inbox, RunConfig], AbstractContextManager[Callable[[], object] | None]]
"""How the evaluator comes to the desk while the context is open; what it yields is called at every turn."""


def beside(directory: RunDirectory) -> Opening:
    """An evaluator that this process starts and looks after."""

    @contextmanager
    def opened(desk: Desk, registry: Registry, inbox: Inbox, config: RunConfig) -> Iterator[Callable[[], object]]:
        fleet = config.fleet
        with ExitStack() as stack:
            private = Path(tempfile.mkdtemp(prefix="qfleet-"))
            stack.callback(shutil.rmtree, private, ignore_errors=True)
            token, socket = private / Orders.TOKEN, private / Orders.SOCKET
            write_token(token)
            server = Server(desk, registry, inbox, FleetConfig(max_message_mb=fleet.max_message_mb), socket,
                            [read_token(token)])
            stack.callback(server.close, 0.0)
            server.start()
            films = ["--videos", str(directory.videos.resolve())] if config.eval.video_period else []
            contact = Contact(f"unix:{socket}", NAME, str(token), fleet.patience_s)
            child = Child(NAME, [sys.executable, "-m", "qfleet", "_member", NAME, *contact.words(), *films],
                          surroundings(), directory.path / "logs" / f"{NAME}.log", silence_s=silence_s(config))
            patience = Patience(heartbeat_timeout_s=fleet.heartbeat_timeout_s, max_restarts=fleet.max_restarts)
            supervisor = Supervisor([child], log.warning, patience, lambda name: None, private)
            stack.callback(supervisor.terminate, GRACE_S)

            def look() -> None:
                supervisor.step()
                if (failure := supervisor.failure) is not None:
                    raise UserError(failure.text) if failure.code == 2 else ProcessFault(failure.text)

            yield look

    return opened


class Gallery:
    """Implements `rank.Bench`: training goes on while others watch. Only the last weights are waited for.

    Weights are handed out whenever an evaluation is due, while they are `promising`; the newest of these is judged.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, cell: Cell, opening: Opening,
                 promising: Callable[[], bool] = lambda: True) -> None:
        self.cell, self.promising = cell, promising
        self.schedule = Schedule(config.eval.period_steps, config.eval.period_updates)
        self.desk = Desk(to_yaml(config), json.dumps(spec.to_json()), 0)
        self.registry = Registry(0, config.fleet.heartbeat_timeout_s)
        inbox = Inbox(config.fleet.inbox_messages)
        self.intake = Intake(cell, self.registry, inbox, Shares())
        self._door = opening(self.desk, self.registry, inbox, config)
        self._open = ExitStack()
        self._look: Callable[[], object] | None = None
        self._begun = False
        self._owed = False  # an evaluation that was under way when the run was left

    def step(self) -> bool:
        """Hand out the newest weights if they are to be judged, and book what was."""
        if not self._begun:
            self.schedule.resume(self.cell.progress())
        learner = self.cell.learner
        if self._owed or (self.promising() and self.schedule.due(self.cell.progress())):
            self._owed = False
            if learner.updates > self.desk.bundle.version:
                self.desk.publish(learner.finite_state(learner.flat), learner.updates)
        self._serve(0)
        self.intake.step()
        return False

    def judge(self) -> None:
        """The last weights; waits for the score."""
        learner = self.cell.learner
        self.desk.publish(learner.finite_state(learner.flat), learner.updates)
        await_evaluation(self.cell, self.intake, self.registry, self.desk, self._serve)

    def state_dict(self) -> dict[str, Any]:
        return {"registry": self.registry.state_dict(),
                "owed": self._owed or self.desk.bundle.version > self.intake.judged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.registry.load_state_dict(state["registry"])
        self._owed = state["owed"]

    def close(self) -> None:
        self.desk.stop()
        self._open.close()

    def _serve(self, nap_s: float) -> None:
        self.desk.tell(*self.cell.progress(), "training")
        if not self._begun:
            self._begun = True
            self._look = self._open.enter_context(self._door)
        if self._look is not None:
            self._look()
        if nap_s:
            rest(nap_s)


class Audience:
    """Implements `inline.Judge`: what `Evaluator` would do in the loop of the run, a gallery does beside it.

    If it cannot, the run stops as if it were told to, with a checkpoint, and `failure` says why.
    """

    def __init__(self, evaluator: Evaluator, gallery: Gallery) -> None:
        self.evaluator, self.gallery = evaluator, gallery
        self.policy, self.count, self.resume = evaluator.policy, evaluator.count, evaluator.resume
        self.failure: UserError | ProcessFault | None = None

    def step(self) -> bool:
        return self._tried(self.gallery.step)

    def judge(self) -> None:
        self._tried(self.gallery.judge)

    def state_dict(self) -> dict[str, Any]:
        return self.evaluator.state_dict() | {"beside": self.gallery.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluator.load_state_dict(state)
        if "beside" in state:
            self.gallery.load_state_dict(state["beside"])

    def _tried(self, work: Callable[[], object]) -> bool:
        try:
            return bool(work())
        except (UserError, ProcessFault) as error:
            self.failure = error
            self.gallery.cell.stop.reason = "preempted"
            return False


class Seating:
    """Puts a run's evaluator beside it; afterwards `checked` raises what kept it from its work."""

    def __init__(self) -> None:
        self.audience: Audience | None = None

    def __call__(self, config: RunConfig, inline: Inline, directory: RunDirectory, stack: ExitStack) -> None:
        evaluator = inline.evaluator
        assert isinstance(evaluator, Evaluator)
        spec = inline.cast.seats[0].env.spec
        gallery = Gallery(config, spec, inline.cell, beside(directory), evaluator.promising)
        stack.callback(gallery.close)
        self.audience = inline.evaluator = Audience(evaluator, gallery)

    def checked(self, result: TrainResult) -> TrainResult:
        if self.audience is not None and (failure := self.audience.failure) is not None:
            RunDirectory(result.directory).conclude("failed", str(failure).partition("\n")[0])
            raise failure
        return result


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run in one process, with an evaluator beside it."""
    seating = Seating()
    return seating.checked(session.start(config, sinks, provenance, seating))


def go_on(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue one."""
    seating = Seating()
    return seating.checked(session.go_on(directory, config, sinks, seating))
