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

from qfleet.config import to_yaml
from qfleet.core.clock import Schedule
from qfleet.core.env import EnvSpec
from qfleet.core.errors import ProcessFault, UserError
from qfleet.launch import attempt
from qfleet.launch.actor_node import GrpcEndpoint
from qfleet.launch.attempt import TrainResult
from qfleet.launch.driver import heartbeat_timeout_of
from qfleet.launch.learner_node import RunRequest
from qfleet.process.handle import child_environment
from qfleet.process.supervisor import ChildSpec, RestartPolicy, Supervisor
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.training.evaluation import Evaluator
from qfleet.training.learner_core import LearnerCore
from qfleet.training.loop import idle
from qfleet.training.meter import Sink
from qfleet.training.remote_actors import MessageHandler, await_evaluation
from qfleet.training.single_process import SingleProcessRun
from qfleet.training.timers import TimeShares
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.fleet_server import FleetServer
from qfleet.transport.inbox import Inbox
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import Registry
from qfleet.transport.security import read_token, write_token

log = logging.getLogger(__name__)

NAME = "evaluator"
GRACE_S = 5.0


ServeEvaluator = Callable[
    [PublishedState, Registry, Inbox, RunConfig], AbstractContextManager[Callable[[], object] | None]
]
"""How the evaluator comes to the desk while the context is open; what it yields is called at every turn."""


def supervised_evaluator(directory: RunDirectory) -> ServeEvaluator:
    """An evaluator that this process starts and looks after."""

    @contextmanager
    def opened(
        desk: PublishedState, registry: Registry, inbox: Inbox, config: RunConfig
    ) -> Iterator[Callable[[], object]]:
        fleet = config.fleet
        with ExitStack() as stack:
            private = Path(tempfile.mkdtemp(prefix="qfleet-"))
            stack.callback(shutil.rmtree, private, ignore_errors=True)
            token, socket = private / RunRequest.TOKEN_FILE, private / RunRequest.SOCKET_FILE
            write_token(token)
            server = FleetServer(desk, registry, inbox, FleetConfig(max_message_mb=fleet.max_message_mb), socket,
                                 [read_token(token)])
            stack.callback(server.close, 0.0)
            server.start()
            films = ["--videos", str(directory.videos.resolve())] if config.eval.video_period else []
            contact = GrpcEndpoint(f"unix:{socket}", NAME, str(token), fleet.patience_s)
            child = ChildSpec(
                NAME, [sys.executable, "-m", "qfleet", "_member", NAME, *contact.to_argv(), *films],
                child_environment(), directory.path / "logs" / f"{NAME}.log",
                silence_s=heartbeat_timeout_of(config))
            patience = RestartPolicy(heartbeat_timeout_s=fleet.heartbeat_timeout_s, max_restarts=fleet.max_restarts)
            supervisor = Supervisor([child], log.warning, patience, lambda name: None, private)
            stack.callback(supervisor.terminate, GRACE_S)

            def look() -> None:
                supervisor.step()
                if (failure := supervisor.failure) is not None:
                    raise UserError(failure.text) if failure.code == 2 else ProcessFault(failure.text)

            yield look

    return opened


class RemoteEvaluator:
    """Implements `rank.Bench`: training goes on while others watch. Only the last weights are waited for.

    Weights are handed out whenever an evaluation is due, while they are `promising`; the newest of these is judged.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, cell: LearnerCore, opening: ServeEvaluator,
                 promising: Callable[[], bool] = lambda: True) -> None:
        self.core, self.promising = cell, promising
        self.schedule = Schedule(config.eval.period_steps, config.eval.period_updates)
        self.published = PublishedState(to_yaml(config), json.dumps(spec.to_json()), 0)
        self.registry = Registry(0, config.fleet.heartbeat_timeout_s)
        inbox = Inbox(config.fleet.inbox_messages)
        self.message_handler = MessageHandler(cell, self.registry, inbox, TimeShares())
        self._serving = opening(self.published, self.registry, inbox, config)
        self._open = ExitStack()
        self._look: Callable[[], object] | None = None
        self._begun = False
        self._pending = False  # an evaluation that was under way when the run was left

    def step(self) -> bool:
        """Hand out the newest weights if they are to be judged, and book what was."""
        if not self._begun:
            self.schedule.resume(self.core.progress())
        learner = self.core.learner
        if self._pending or (self.promising() and self.schedule.due(self.core.progress())):
            self._pending = False
            if learner.updates > self.published.weights.version:
                self.published.publish(learner.finite_state(learner.flat), learner.updates)
        self._serve(0)
        self.message_handler.step()
        return False

    def evaluate(self) -> None:
        """The last weights; waits for the score."""
        learner = self.core.learner
        self.published.publish(learner.finite_state(learner.flat), learner.updates)
        await_evaluation(self.core, self.message_handler, self.registry, self.published, self._serve)

    def state_dict(self) -> dict[str, Any]:
        return {"registry": self.registry.state_dict(),
                "owed": self._pending or self.published.weights.version > self.message_handler.evaluated_version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.registry.load_state_dict(state["registry"])
        self._pending = state["owed"]

    def close(self) -> None:
        self.published.stop()
        self._open.close()

    def _serve(self, nap_s: float) -> None:
        self.published.update_progress(*self.core.progress(), "training")
        if not self._begun:
            self._begun = True
            self._look = self._open.enter_context(self._serving)
        if self._look is not None:
            self._look()
        if nap_s:
            idle(nap_s)


class RemoteEvaluatorSlot:
    """Implements `inline.Judge`: what `Evaluator` would do in the loop of the run, a gallery does beside it.

    If it cannot, the run stops as if it were told to, with a checkpoint, and `failure` says why.
    """

    def __init__(self, evaluator: Evaluator, gallery: RemoteEvaluator) -> None:
        self.evaluator, self.remote = evaluator, gallery
        self.policy, self.count, self.resume = evaluator.policy, evaluator.count, evaluator.resume
        self.failure: UserError | ProcessFault | None = None

    def step(self) -> bool:
        return self._tried(self.remote.step)

    def evaluate(self) -> None:
        self._tried(self.remote.evaluate)

    def state_dict(self) -> dict[str, Any]:
        return self.evaluator.state_dict() | {"beside": self.remote.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluator.load_state_dict(state)
        if "beside" in state:
            self.remote.load_state_dict(state["beside"])

    def _tried(self, work: Callable[[], object]) -> bool:
        try:
            return bool(work())
        except (UserError, ProcessFault) as error:
            self.failure = error
            self.remote.core.stop.reason = "preempted"
            return False


class RemoteEvaluatorInstaller:
    """Puts a run's evaluator beside it; afterwards `checked` raises what kept it from its work."""

    def __init__(self) -> None:
        self.slot: RemoteEvaluatorSlot | None = None

    def __call__(self, config: RunConfig, inline: SingleProcessRun, directory: RunDirectory, stack: ExitStack) -> None:
        evaluator = inline.evaluator
        assert isinstance(evaluator, Evaluator)
        spec = inline.setup.actor_specs[0].env.spec
        gallery = RemoteEvaluator(
            config, spec, inline.core, supervised_evaluator(directory), evaluator.reached_from_return
        )
        stack.callback(gallery.close)
        self.slot = inline.evaluator = RemoteEvaluatorSlot(evaluator, gallery)

    def check_result(self, result: TrainResult) -> TrainResult:
        if self.slot is not None and (failure := self.slot.failure) is not None:
            RunDirectory(result.directory).conclude("failed", str(failure).partition("\n")[0])
            raise failure
        return result


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run in one process, with an evaluator beside it."""
    seating = RemoteEvaluatorInstaller()
    return seating.check_result(attempt.start(config, sinks, provenance, seating))


def resume(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue one."""
    seating = RemoteEvaluatorInstaller()
    return seating.check_result(attempt.resume(directory, config, sinks, seating))
