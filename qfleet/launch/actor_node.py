"""Main functions of actor and evaluator processes, each started through the command line in a new interpreter.

They are given only the endpoint of their learner; config and environment spec arrive in its Welcome message.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from qfleet.accel.threads import evaluator_threads, usable_cores
from qfleet.actor.actor import Actor, Recorder
from qfleet.actor.policy import Policy
from qfleet.config import parse_mapping, validate
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.evaluation import Score
from qfleet.core.exploration import AdaptiveExplorer
from qfleet.core.seeds import lane_seeds, seed_for
from qfleet.core.weights import WeightSource
from qfleet.launch.attempt import EXIT_CODES, require_same_spaces
from qfleet.process.heartbeat import Heartbeat, HeartbeatSender
from qfleet.process.memory import retain_freed_memory
from qfleet.process.signals import exit_on_signal
from qfleet.report.eval_video import EvalVideoRecorder
from qfleet.runconfig.auto import acting_precision
from qfleet.runconfig.build import make_agent, make_env, make_eval_env, make_explorer, make_layout
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint_parts import pack_state, unpack_state
from qfleet.runs.find import refuse_imports
from qfleet.training.evaluation import Evaluator, EvaluatorHooks
from qfleet.training.loop import Worker, drive, idle
from qfleet.transport.address import Address, parse_address
from qfleet.transport.client import FleetConnection
from qfleet.transport.fleet_pb2 import Welcome
from qfleet.transport.grpc_channel import GrpcChannel
from qfleet.transport.inbox import MAX_MEMBER_STATE_BYTES
from qfleet.transport.security import ChannelCredentials, channel_credentials, read_token

log = logging.getLogger(__name__)

FLUSH_S = 2.0
STATE_PERIOD_S = 1.0
POLL_S = 0.1
BUILDING_S = 120.0
"""Seconds that building the environment and the network may take."""


class Endpoint(Protocol):
    """Address and credentials of the learner, for gRPC or Ray. `heartbeat` connects to the process's supervisor."""

    @property
    def address(self) -> str: ...
    @property
    def patience_s(self) -> float: ...
    @property
    def trusted(self) -> bool: ...
    @property
    def cores(self) -> int: ...
    def heartbeat(self) -> Heartbeat | None: ...
    def connect(self, role: str) -> FleetConnection: ...
    def at_port(self, port: int) -> Endpoint: ...


@dataclass(frozen=True)
class GrpcEndpoint:
    """Endpoint reached by gRPC: address, member name, token file and TLS files."""

    address: str
    name: str
    token_file: str
    patience_s: float = 600.0
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    siblings: int = 1  # actors that share this host's cores
    trust: bool = False
    claim_file: str | None = None  # of a joining member: the secret that its name is derived from

    def credentials(self) -> ChannelCredentials | None:
        if self.tls_ca is not None:
            return channel_credentials(self.tls_ca, self.tls_cert, self.tls_key)
        if self.tls_cert is not None or self.tls_key is not None:
            raise UserError("--tls-cert and --tls-key without --tls-ca: the connection would not be secure; give the "
                            "CA that signed the fleet's certificate, or leave them out")
        return None

    @property
    def trusted(self) -> bool:
        """True if the received config may name modules to import.

        The server has always proved that it knows the token before its config is read. On this host that is enough;
        over the network any member that knows the token could answer in the learner's place, unless TLS authenticates
        it.
        """
        address = parse_address(self.address)
        return self.trust or self.tls_ca is not None or bool(address.path) or address.is_loopback

    @property
    def cores(self) -> int:
        """CPU cores of this host for each of its actors."""
        return max(1, usable_cores() // self.siblings)

    def heartbeat(self) -> Heartbeat | None:
        return HeartbeatSender.from_env()

    def connect(self, role: str) -> FleetConnection:
        channel = GrpcChannel(parse_address(self.address), read_token(self.token_file), self.credentials())
        claim = "" if self.claim_file is None else read_token(self.claim_file)
        return FleetConnection(channel, self.name, role, self.patience_s, claim)

    def at_port(self, port: int) -> GrpcEndpoint:
        """Endpoint of another learner of the run on the same host."""
        return replace(self, address=str(Address(parse_address(self.address).host, port)))

    def to_argv(self) -> list[str]:
        """Command-line arguments that describe this endpoint."""
        given = {"--token-file": self.token_file, "--patience": f"{self.patience_s:g}", "--tls-ca": self.tls_ca,
                 "--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--siblings": str(self.siblings),
                 "--claim-file": self.claim_file}
        args = [self.address, self.name, *(arg for key, value in given.items() if value for arg in (key, value))]
        return [*args, "--trust"] if self.trust else args


def heartbeat_thread(
    heartbeat: Heartbeat | None, limit_s: float, alive: Callable[[], bool] = lambda: True
) -> threading.Event:
    """Send heartbeats from a thread during long operations, for at most `limit_s` and only while `alive`.

    Set the returned event to stop it.
    """
    over, deadline = threading.Event(), time.monotonic() + limit_s

    def beat() -> None:
        while not over.wait(0.5) and time.monotonic() < deadline:
            if heartbeat is not None and alive():
                heartbeat.beat()

    threading.Thread(target=beat, name="beat", daemon=True).start()
    return over


class FleetClient:
    """A member process of a run: its connection, and the config received over it.

    Without a parent process it stops. With `orphan_patience_s` it waits at most so long for answers instead, since the
    fleet may still need it.
    """

    def __init__(self, endpoint: Endpoint, role: str, orphan_patience_s: float | None = None) -> None:
        self.heartbeat = endpoint.heartbeat()
        # The hello and building the environment may take long; later the main loop beats by itself.
        self._ready = heartbeat_thread(self.heartbeat, endpoint.patience_s + BUILDING_S)
        self.connection, welcome = _register(endpoint, role)
        where = f"the config of the fleet at {endpoint.address}"
        config = parse_mapping(welcome.config_yaml, where)
        if not endpoint.trusted:
            refuse_imports(config, f"the fleet at {endpoint.address}",
                           "without TLS any member that knows the token could answer there")
        self.config = validate(RunConfig, config, where)
        self.spec = EnvSpec.from_json(json.loads(welcome.spec_json))
        self.index, self.incarnation = welcome.index, welcome.incarnation
        self._stop_requested = threading.Event()
        self.connection.stop_waiting = self.is_over  # also beats while an evaluator waits for weights
        torch.set_num_threads(1)
        retain_freed_memory()
        if self.heartbeat is not None:
            self.heartbeat.on_orphan(
                self._stop_requested.set if orphan_patience_s is None
                else lambda: self.connection.shorten_patience(orphan_patience_s))

    def require_spec(self, spec: EnvSpec) -> None:
        require_same_spaces(f"the fleet at {self.connection.address} uses", self.spec, "on this host", spec)

    @contextmanager
    def deregister_on_error(self) -> Iterator[None]:
        """Deregister on an error; otherwise the member would count as alive until its heartbeat timeout."""
        try:
            yield
        except BaseException:
            self.connection.close()
            raise

    def restore_state(self, load: Callable[[Any], None]) -> None:
        """Load the state that the previous process of this index sent, if any; it may have used another explorer."""
        if not self.connection.welcome.memory:
            return
        try:
            load(unpack_state(self.connection.welcome.memory))
        except Exception as error:  # any member may have sent it: its contents must not end this process
            log.warning("the saved state of this member cannot be used (%s): starting without it", error)

    def policy(self, purpose: str, *index: int) -> Policy:
        agent = make_agent(self.config, self.spec)
        return Policy(agent, seed_for(self.config.seed, purpose, *index), torch.device("cpu"),
                      acting_precision(self.config))

    def run(self, *workers: Worker) -> int:
        """Run the workers until the run ends or this process is asked to exit; returns the exit code.

        Exiting before the end is not success: unless the supervisor asked for it, it starts a replacement.
        """
        with self.running():
            drive(workers, self.is_over, idle)
        self.connection.close(FLUSH_S)
        if self.connection.failed is not None:
            raise self.connection.failed
        return 0 if self.connection.stopped else EXIT_CODES["preempted"]

    @contextmanager
    def running(self) -> Iterator[None]:
        """While inside, `is_over` sends the heartbeats, and signals request a stop."""
        self.is_over()
        self._ready.set()
        with exit_on_signal(self._stop_requested.set):
            yield

    def is_over(self) -> bool:
        """True if the run is over or a stop was requested. Polled at every step, so it also sends the heartbeats."""
        if self.heartbeat is not None:
            self.heartbeat.beat()
        return self.connection.stopped or self.connection.failed is not None or self._stop_requested.is_set()


def _register(endpoint: Endpoint, role: str) -> tuple[FleetConnection, Welcome]:
    """Register with the learner of this process, which the one at the endpoint may name."""
    connection = endpoint.connect(role)
    welcome = connection.hello()
    if not welcome.redirect_port:
        return connection, welcome
    connection.close()
    connection = endpoint.at_port(welcome.redirect_port).connect(role)
    return connection, connection.hello()


@contextmanager
def _advise_on_oom(config: RunConfig) -> Iterator[None]:
    """Add the config keys that determine an actor's memory to a MemoryError."""
    try:
        yield
    except MemoryError as error:
        error.add_note(f"lower env.lanes={config.env.lanes} or actors={config.actors}")
        raise


def run_actor(endpoint: Endpoint) -> int:
    """Main function of an actor: act until the run is over."""
    client = FleetClient(endpoint, "actor")
    config, connection = client.config, client.connection
    groups, lanes, first = config.env.groups, config.env.lanes, client.index * config.env.groups
    threads = config.env.threads or endpoint.cores
    with client.deregister_on_error(), _advise_on_oom(config), ExitStack() as stack:
        envs = [make_env(config.env.model_copy(update={"threads": threads}), lanes,
                         stall_timeout_s=config.run.stall_timeout_s) for _ in range(groups)]
        for env in envs:
            stack.callback(env.close)
        client.require_spec(envs[0].spec)
        layout = make_layout(config, envs[0].spec)
        replay, clock = connection.replay(layout, groups * lanes), connection.clock
        weights: WeightSource = SharedWeights(connection.weights) if groups > 1 else connection.weights
        explorers = [make_explorer(config, first + group) for group in range(groups)]
        actors = []
        for group, (env, explorer) in enumerate(zip(envs, explorers, strict=True)):
            policy = client.policy("actor", first + group, client.incarnation)
            recorder = Recorder(policy.agent, layout, lanes, replay, config.replay.alpha > 0)
            actors.append(Actor(policy, env, explorer, connection.metrics, weights, recorder, clock))
        workers: list[Worker] = [*actors]
        if adaptive := [explorer for explorer in explorers if isinstance(explorer, AdaptiveExplorer)]:
            saver = ExplorerStateSaver(connection, adaptive)
            client.restore_state(saver.load_state_dict)
            workers.append(saver)
        connection.start()
        for group, actor in enumerate(actors):
            actor.begin(lane_seeds(config.seed, lanes, "member", first + group, client.incarnation))
        return client.run(*workers)


class SharedWeights:
    """Weights for several actors of one process, received once."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._newest: tuple[int, dict[str, torch.Tensor]] | None = None

    def fetch(self, newer_than: int) -> tuple[int, dict[str, torch.Tensor]] | None:
        held = -1 if self._newest is None else self._newest[0]
        if (received := self._source.fetch(held)) is not None:
            self._newest = received
        if self._newest is None or self._newest[0] == newer_than:
            return None
        return self._newest


class ExplorerStateSaver:
    """Sends the states of adaptive explorers to the learner periodically; a restarted actor continues from them."""

    def __init__(self, connection: FleetConnection, explorers: Sequence[AdaptiveExplorer]) -> None:
        self.connection, self.explorers = connection, explorers
        self._sent_at, self._sent_state = time.monotonic(), b""

    def load_state_dict(self, state: Any) -> None:
        for explorer, explorer_state in zip(self.explorers, state, strict=True):
            explorer.load_state_dict(explorer_state)

    def step(self) -> bool:
        if time.monotonic() - self._sent_at >= STATE_PERIOD_S:
            self._sent_at = time.monotonic()
            state = pack_state([explorer.state_dict() for explorer in self.explorers])
            # A larger state would get the whole message rejected.
            if state != self._sent_state and len(state) <= MAX_MEMBER_STATE_BYTES:
                self._sent_state = state
                self.connection.metrics.set_member_state(state)
        return False


def run_evaluator(endpoint: Endpoint, videos: Path | None = None) -> int:
    """Main function of an evaluator: evaluate the newest weights when due and the final ones, and record videos."""
    client = FleetClient(endpoint, "evaluator")
    config, connection = client.config, client.connection
    if not config.has_driver:
        torch.set_num_threads(evaluator_threads(config.device.startswith("cuda")))
    recorder = None if videos is None else EvalVideoRecorder(config, videos)

    def on_evaluation(score: Score, weights: dict[str, torch.Tensor]) -> None:
        if recorder is not None:  # before the score is sent: after the last one the run does not wait for a video
            recorder.record(evaluator.policy, evaluator.count - 1, connection.progress().steps, client.is_over)
        connection.send_evaluation(score, weights)
        if evaluator.bandit is not None:
            connection.metrics.set_member_state(pack_state(evaluator.bandit.state_dict()))

    with client.deregister_on_error(), closing(make_eval_env(config)) as env:
        client.require_spec(env.spec)
        evaluator = Evaluator(client.policy("evaluator"), env, connection.weights, config.eval, config.seed,
                              EvaluatorHooks(connection.progress, on_evaluation, client.is_over))
        if evaluator.bandit is not None:
            client.restore_state(evaluator.bandit.load_state_dict)
        connection.start()
        evaluator.resume()
        if client.incarnation > 1:
            evaluator.request()
        on_publish = config.learners_act and not config.has_server
        worker = EvaluateOnPublish(evaluator) if on_publish else evaluator
        return client.run(RequestedEvaluation(connection, evaluator), worker)


class EvaluateOnPublish:
    """Evaluates every version it receives; the learner publishes only versions that are due."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self._polled_at = -POLL_S

    def step(self) -> bool:
        if time.monotonic() - self._polled_at < POLL_S:
            return False
        before = self.evaluator.evaluated_version
        self.evaluator.evaluate()
        self._polled_at = time.monotonic()
        return self.evaluator.evaluated_version != before


class RequestedEvaluation:
    """Evaluates once when the learner asks for it: at the end of the run, or for a callback.

    A resumed learner has other weights under the same version numbers, and has received no evaluation of them.
    """

    def __init__(self, connection: FleetConnection, evaluator: Evaluator) -> None:
        self.connection, self.evaluator = connection, evaluator
        self.epoch = connection.welcome.epoch
        self.done = False

    def step(self) -> bool:
        if self.epoch != self.connection.welcome.epoch:
            self.epoch, self.done = self.connection.welcome.epoch, False
            self.evaluator.restart()
        if not self.connection.evaluation_wanted:
            self.done = False
        if not self.connection.evaluation_wanted or self.done:
            return False
        self.evaluator.evaluate()
        self.done = self.evaluator.evaluated_version >= self.connection.newest_version
        return True

