"""What the actors and the evaluator of a fleet run. Each enters through the command line, a fresh interpreter.

They know nothing but where their fleet is: config and environment come with the welcome.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
from qfleet.training.evaluation import Evaluator
from qfleet.training.loop import Worker, drive, idle
from qfleet.transport.address import parse_address
from qfleet.transport.client import FleetConnection
from qfleet.transport.grpc_channel import GrpcChannel
from qfleet.transport.inbox import MAX_MEMBER_STATE_BYTES
from qfleet.transport.security import ChannelCredentials, channel_credentials, read_token

log = logging.getLogger(__name__)

FLUSH_S = 2.0
STATE_PERIOD_S = 1.0
LOOK_S = 0.1
BUILDING_S = 120.0
"""How long the environment and the network of a member may take to be built."""


class Endpoint(Protocol):
    """How a process finds its fleet, whatever carries their messages. `tie`: to whoever watches the process."""

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


@dataclass(frozen=True)
class GrpcEndpoint:
    """Where a fleet is, and by what it knows its own."""

    address: str
    name: str
    token_file: str
    patience_s: float = 600.0
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    siblings: int = 1  # actors that share this host's cores
    trust: bool = False
    claim_file: str | None = None  # of a member that joins: the secret behind its name

    def credentials(self) -> ChannelCredentials | None:
        if self.tls_ca is not None:
            return channel_credentials(self.tls_ca, self.tls_cert, self.tls_key)
        if self.tls_cert is not None or self.tls_key is not None:
            raise UserError("--tls-cert and --tls-key without --tls-ca: the connection would not be secure; name the "
                            "authority that signed the fleet's certificate, or leave them out")
        return None

    @property
    def trusted(self) -> bool:
        """Whether the config that comes over this line may name modules to import.

        The other side has always proved that it knows the token before its config is read. On this host, that is
        enough; over the network every member that knows the token could answer in the fleet's place, unless a
        certificate says who it is.
        """
        address = parse_address(self.address)
        return self.trust or self.tls_ca is not None or bool(address.path) or address.is_loopback

    @property
    def cores(self) -> int:
        """Of this host, for each of the actors here."""
        return max(1, usable_cores() // self.siblings)

    def heartbeat(self) -> Heartbeat | None:
        return HeartbeatSender.from_env()

    def connect(self, role: str) -> FleetConnection:
        caller = GrpcChannel(parse_address(self.address), read_token(self.token_file), self.credentials())
        claim = "" if self.claim_file is None else read_token(self.claim_file)
        return FleetConnection(caller, self.name, role, self.patience_s, claim)

    def to_argv(self) -> list[str]:
        """The same on a command line."""
        given = {"--token-file": self.token_file, "--patience": f"{self.patience_s:g}", "--tls-ca": self.tls_ca,
                 "--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--siblings": str(self.siblings),
                 "--claim-file": self.claim_file}
        words = [self.address, self.name, *(word for key, value in given.items() if value for word in (key, value))]
        return [*words, "--trust"] if self.trust else words


def heartbeat_thread(
    tether: Heartbeat | None, limit_s: float, alive: Callable[[], bool] = lambda: True
) -> threading.Event:
    """Show life from a thread until the event is set, for things that take long; at most so long, and while `alive`."""
    over, deadline = threading.Event(), time.monotonic() + limit_s

    def beat() -> None:
        while not over.wait(0.5) and time.monotonic() < deadline:
            if tether is not None and alive():
                tether.beat()

    threading.Thread(target=beat, name="beat", daemon=True).start()
    return over


class FleetClient:
    """A process that takes part in somebody's run: its line, and the config that came over it."""

    def __init__(self, contact: Endpoint, role: str) -> None:
        self.heartbeat = contact.heartbeat()
        self.connection = contact.connect(role)
        # The fleet may take its time to answer, and an environment to be built; the loop then beats by itself.
        self._ready = heartbeat_thread(self.heartbeat, contact.patience_s + BUILDING_S)
        welcome = self.connection.hello()
        where = f"the config of the fleet at {contact.address}"
        config = parse_mapping(welcome.config_yaml, where)
        if not contact.trusted:
            refuse_imports(config, f"the fleet at {contact.address}",
                           "without TLS any member that knows the token could answer there")
        self.config = validate(RunConfig, config, where)
        self.spec = EnvSpec.from_json(json.loads(welcome.spec_json))
        self.index, self.incarnation = welcome.index, welcome.incarnation
        self._stop_requested = threading.Event()
        self.connection.stop_waiting = (
            self.is_over
        )  # an evaluator waits for the newest weights, and shows life meanwhile
        torch.set_num_threads(1)
        retain_freed_memory()
        self.on_orphan: Callable[[], object] = self._stop_requested.set
        if self.heartbeat is not None:
            self.heartbeat.on_orphan(lambda: self.on_orphan())

    def require_spec(self, spec: EnvSpec) -> None:
        require_same_spaces(f"the fleet at {self.connection.address} plays", self.spec, "on this host", spec)

    @contextmanager
    def deregister_on_error(self) -> Iterator[None]:
        """Who cannot take part after all says so, or would be counted until it has been silent for long."""
        try:
            yield
        except BaseException:
            self.connection.close()
            raise

    def restore_state(self, load: Callable[[Any], None]) -> None:
        """What our predecessor has learnt, if there was one; it may have explored in another way."""
        if not self.connection.welcome.memory:
            return
        try:
            load(unpack_state(self.connection.welcome.memory))
        except Exception as error:  # any member may have left it: nothing in it may end this process
            log.warning("what this place had learnt before cannot be used here (%s): it begins anew", error)

    def policy(self, purpose: str, *index: int) -> Policy:
        agent = make_agent(self.config, self.spec)
        return Policy(agent, seed_for(self.config.seed, purpose, *index), torch.device("cpu"),
                      acting_precision(self.config))

    def run(self, *workers: Worker) -> int:
        """Work until the fleet says that it is over, or this process is told to leave; the exit code.

        Who left before the end is not done: unless our supervisor asked us to, it starts another in our place.
        """
        with self.running():
            drive(workers, self.is_over, idle)
        self.connection.close(FLUSH_S)
        if self.connection.failed is not None:
            raise self.connection.failed
        return 0 if self.connection.stopped else EXIT_CODES["preempted"]

    @contextmanager
    def running(self) -> Iterator[None]:
        """While inside, whoever works shows life by asking whether it is over, and signals are heeded."""
        self.is_over()
        self._ready.set()
        with exit_on_signal(self._stop_requested.set):
            yield

    def is_over(self) -> bool:
        """Asked at every turn, and by an evaluation at every step: a good place to show that we live."""
        if self.heartbeat is not None:
            self.heartbeat.beat()
        return self.connection.stopped or self.connection.failed is not None or self._stop_requested.is_set()


@contextmanager
def _advise_on_oom(config: RunConfig) -> Iterator[None]:
    """Say beside a lack of memory which keys ask for that of an actor."""
    try:
        yield
    except MemoryError as error:
        error.add_note(f"lower env.lanes={config.env.lanes} or actors={config.actors}")
        raise


def run_actor(contact: Endpoint) -> int:
    """Play until the run is over."""
    member = FleetClient(contact, "actor")
    config, link = member.config, member.connection
    threads = config.env.threads or contact.cores
    with member.deregister_on_error(), _advise_on_oom(config), closing(
            make_env(config.env.model_copy(update={"threads": threads}), config.env.lanes,
                     stall_timeout_s=config.run.stall_timeout_s)) as env:
        member.require_spec(env.spec)
        policy = member.policy("actor", member.index, member.incarnation)
        layout = make_layout(config, env.spec)
        recorder = Recorder(policy.agent, layout, env.lanes, link.replay(layout, env.lanes), config.replay.alpha > 0)
        explorer = make_explorer(config, member.index)
        actor = Actor(policy, env, explorer, link.metrics, link.weights, recorder, link.clock)
        workers: list[Worker] = [actor]
        if isinstance(explorer, AdaptiveExplorer):
            member.restore_state(explorer.load_state_dict)
            workers.append(ExplorerStateSaver(link, explorer))
        link.start()
        actor.begin(lane_seeds(config.seed, env.lanes, "member", member.index, member.incarnation))
        return member.run(*workers)


class ExplorerStateSaver:
    """Has the fleet keep what an actor's explorer has learnt, now and then: whoever takes its place goes on with it."""

    def __init__(self, link: FleetConnection, explorer: AdaptiveExplorer) -> None:
        self.connection, self.explorer = link, explorer
        self._written_at, self._written = time.monotonic(), b""

    def step(self) -> bool:
        if time.monotonic() - self._written_at >= STATE_PERIOD_S:
            self._written_at = time.monotonic()
            state = pack_state(self.explorer.state_dict())
            if (
                state != self._written and len(state) <= MAX_MEMBER_STATE_BYTES
            ):  # a larger one would cost the whole message
                self._written = state
                self.connection.metrics.set_member_state(state)
        return False


def run_evaluator(contact: Endpoint, videos: Path | None = None) -> int:
    """Judge the newest weights whenever that is due, and the last ones when asked to; with a folder, film some."""
    member = FleetClient(contact, "evaluator")
    config, link = member.config, member.connection
    if config.eval.beside:
        torch.set_num_threads(evaluator_threads(config.device.startswith("cuda")))
    films = None if videos is None else EvalVideoRecorder(config, videos)

    def judged(score: Score, weights: dict[str, torch.Tensor]) -> None:
        if films is not None:  # before the score is told: it may be the last, and then nobody waits for a film
            films.record(evaluator.policy, evaluator.count - 1, link.progress().steps, member.is_over)
        link.send_evaluation(score, weights)
        if evaluator.bandit is not None:
            link.metrics.set_member_state(pack_state(evaluator.bandit.state_dict()))

    with member.deregister_on_error(), closing(make_eval_env(config)) as env:
        member.require_spec(env.spec)
        evaluator = Evaluator(member.policy("evaluator"), env, link.weights, config.eval, config.seed, link.progress,
                              judged, member.is_over)
        if evaluator.bandit is not None:
            member.restore_state(evaluator.bandit.load_state_dict)
        link.start()
        evaluator.resume()
        evaluator.pending = member.incarnation > 1  # whatever our predecessor was at
        handed = config.eval.beside or config.gradients == "allreduce"
        return member.run(FinalEvaluation(link, evaluator), EvaluateOnPublish(evaluator) if handed else evaluator)


class EvaluateOnPublish:
    """Judges whatever weights there are that were not judged yet: none are handed out that are not to be."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self._looked_at = -LOOK_S

    def step(self) -> bool:
        if time.monotonic() - self._looked_at < LOOK_S:
            return False
        before = self.evaluator.evaluated_version
        self.evaluator.evaluate()
        self._looked_at = time.monotonic()
        return self.evaluator.evaluated_version != before


class FinalEvaluation:
    """Judges once more when the fleet says that there will be no other weights.

    A learner that was resumed has other weights of the same numbers, and has not heard of any judgement.
    """

    def __init__(self, link: FleetConnection, evaluator: Evaluator) -> None:
        self.connection, self.evaluator = link, evaluator
        self.epoch = link.welcome.epoch
        self.done = False

    def step(self) -> bool:
        if self.epoch != self.connection.welcome.epoch:
            self.epoch, self.done, self.evaluator.evaluated_version = self.connection.welcome.epoch, False, -1
            self.evaluator.resume()
        if not self.connection.final or self.done:
            return False
        self.evaluator.evaluate()
        self.done = self.evaluator.evaluated_version >= self.connection.newest_version
        return True

