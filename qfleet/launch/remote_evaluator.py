"""Evaluator in a separate process, for runs whose actors share the learner's process.

Used by rank 0 of an allreduce run, and by a single-process run with `eval.process=true`. They serve it, and usually
start it as well.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from qfleet.config import to_yaml
from qfleet.core.clock import Schedule
from qfleet.core.env import EnvSpec
from qfleet.core.errors import ProcessFault, UserError
from qfleet.launch.endpoint import GrpcEndpoint
from qfleet.launch.run_request import RunRequest
from qfleet.launch.serving import Serving
from qfleet.launch.topology import heartbeat_timeout_of
from qfleet.process.handle import child_environment
from qfleet.process.supervisor import ChildSpec, RestartPolicy, Supervisor
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.training.evaluation import Evaluator, EvaluatorSlot
from qfleet.training.learner_core import LearnerCore
from qfleet.training.loop import idle
from qfleet.training.remote_actors import MessageHandler, await_evaluation
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


def supervised_evaluator(directory: RunDirectory) -> Serving:
    """`Serving` that also starts and supervises the evaluator process."""

    @contextmanager
    def serve(
        published: PublishedState, registry: Registry, inbox: Inbox, config: RunConfig
    ) -> Iterator[Callable[[], object]]:
        fleet = config.fleet
        with ExitStack() as stack:
            private = Path(tempfile.mkdtemp(prefix="qfleet-"))
            stack.callback(shutil.rmtree, private, ignore_errors=True)
            token, socket = private / RunRequest.TOKEN_FILE, private / RunRequest.SOCKET_FILE
            write_token(token)
            server = FleetServer(published, registry, inbox, FleetConfig(max_message_mb=fleet.max_message_mb), socket,
                                 [read_token(token)])
            stack.callback(server.close, 0.0)
            server.start()
            video_args = ["--videos", str(directory.videos.resolve())] if config.eval.video_period else []
            endpoint = GrpcEndpoint(f"unix:{socket}", NAME, str(token), fleet.reconnect_timeout_s)
            child = ChildSpec(
                NAME, [sys.executable, "-m", "qfleet", "_member", NAME, *endpoint.to_argv(), *video_args],
                child_environment(), directory.path / "logs" / f"{NAME}.log",
                silence_s=heartbeat_timeout_of(config))
            policy = RestartPolicy(heartbeat_timeout_s=fleet.heartbeat_timeout_s, max_restarts=fleet.actor_restarts)
            supervisor = Supervisor([child], log.warning, policy, private)
            stack.callback(supervisor.terminate, GRACE_S)

            def check() -> None:
                supervisor.step()
                if (failure := supervisor.failure) is not None:
                    raise failure.error()

            yield check

    return serve


class RemoteEvaluator:
    """Implements `EvaluatorSlot`: training continues during an evaluation; only the final one is awaited.

    Weights are published whenever an evaluation is due and `promising()`; the evaluator takes the newest.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, core: LearnerCore, serving: Serving,
                 promising: Callable[[], bool] = lambda: True) -> None:
        self.core, self.promising = core, promising
        self.schedule = Schedule(config.eval.period_steps, config.eval.period_updates)
        self.published = PublishedState(to_yaml(config), json.dumps(spec.to_json()), 0)
        self.registry = Registry(0, config.fleet.heartbeat_timeout_s)
        inbox = Inbox(config.fleet.inbox_messages)
        self.message_handler = MessageHandler(core, self.registry, inbox, TimeShares())
        self._serving = serving(self.published, self.registry, inbox, config)
        self._open = ExitStack()
        self._check: Callable[[], object] | None = None
        self._started = False
        self._pending = False  # an evaluation was in progress when the run stopped

    def step(self) -> bool:
        """Publish the newest weights if an evaluation is due, and process received scores."""
        if not self._started:
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
        """Evaluate the final weights; waits for the score."""
        learner = self.core.learner
        self.published.publish(learner.finite_state(learner.flat), learner.updates)
        await_evaluation(self.core, self.message_handler, self.registry, self.published, self._serve)

    def request(self) -> None:
        """Publish the newest weights at the next step."""
        self._pending = True

    def resume(self) -> None:
        """Nothing to do: the first step sets the schedule."""

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
        if not self._started:
            self._started = True
            self._check = self._open.enter_context(self._serving)
        if self._check is not None:
            self._check()
        if nap_s:
            idle(nap_s)


class RemoteEvaluatorSlot:
    """Implements `EvaluatorSlot` by a `RemoteEvaluator`; `evaluator` keeps the state for a run that does without it.

    If it fails, the run stops with a checkpoint, as after a signal, and `failure` holds the error.
    """

    def __init__(self, evaluator: Evaluator, remote: RemoteEvaluator) -> None:
        self.evaluator, self.remote, self.resume = evaluator, remote, evaluator.resume
        self.failure: UserError | ProcessFault | None = None

    def step(self) -> bool:
        return self._stop_on_failure(self.remote.step)

    def evaluate(self) -> None:
        self._stop_on_failure(self.remote.evaluate)

    def request(self) -> None:
        self.remote.request()

    def state_dict(self) -> dict[str, Any]:
        return self.evaluator.state_dict() | {"process": self.remote.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluator.load_state_dict(state)
        if "process" in state:
            self.remote.load_state_dict(state["process"])

    def _stop_on_failure(self, work: Callable[[], object]) -> bool:
        try:
            return bool(work())
        except (UserError, ProcessFault) as error:
            self.failure = error
            self.remote.core.stop.request("preempted")
            return False


def evaluator_process(config: RunConfig, directory: RunDirectory, stack: ExitStack, evaluator: EvaluatorSlot,
                      core: LearnerCore) -> EvaluatorSlot:
    """Evaluator of a single-process run in a process of its own, which the stack ends; replaces `evaluator`."""
    assert isinstance(evaluator, Evaluator)
    remote = RemoteEvaluator(
        config, core.layout.spec, core, supervised_evaluator(directory), evaluator.reached_from_return)
    stack.callback(remote.close)
    return RemoteEvaluatorSlot(evaluator, remote)
