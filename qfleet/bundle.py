"""What the processes around a parameter server run: its shards, and cells with actors, learner and replay in one.

A cell pushes to the shards and pulls from them by itself; the registrar (see bureau.py) hears what it has done, and
tells it how far the others are, when to give its part of a checkpoint, and when it is over.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qfleet import recipe
from qfleet.assemble import cast_of, make_agent, make_env, plan_of
from qfleet.bureau import shard_socket, shelves_of
from qfleet.cellhost import Orders
from qfleet.members import Contact, Member, Way, beating
from qfleet.roles.checkpointer import Snapshot
from qfleet.roles.flat import is_finite
from qfleet.roles.learner import Diverged
from qfleet.roles.optimizer import Part, parts_of, slices, within
from qfleet.roles.policy import Policy
from qfleet.roles.seeds import seed_for
from qfleet.roles.server import Shard
from qfleet.roles.viaserver import ViaServer
from qfleet.runs.checkpoint import Checkpoint, Checkpoints
from qfleet.runs.directory import RunDirectory
from qfleet.runs.parts import Stage, pack_state
from qfleet.runtime.cell import Outside
from qfleet.runtime.inline import Inline
from qfleet.runtime.plan import Plan, Stop
from qfleet.runtime.rank import OWN, part_name, take_part
from qfleet.runtime.signals import heeded
from qfleet.runtime.supervise import VAIN
from qfleet.runtime.tether import Tether, Tie
from qfleet.runtime.threads import usable_cores
from qfleet.runtime.wire.address import parse_address
from qfleet.runtime.wire.registry import CELL
from qfleet.runtime.wire.security import read_token
from qfleet.runtime.wire.shard_pb2 import State
from qfleet.runtime.wire.shards import RemoteShard, ShardServer, ShardService, pack_shard, unpack_shard
from qfleet.session import EXIT_CODES, memory_advised
from qfleet.settings import RunConfig
from qfleet.types import EnvSpec, Segment, VectorEnv

log = logging.getLogger(__name__)

TALK_S = 0.1
GAUGES_S = 1.0
PAUSE_S = 0.005
QUIET_S = 2.0
"""A shard that is told to leave stays until nobody has called for so long: a checkpoint may need it."""


# ---- A shard ----

def run_shard(private: Path, index: int) -> int:
    config = _config_of(private)

    def serve(service: ShardService) -> ShardServer:
        return ShardServer(service, shard_socket(private, index), read_token(private / Orders.TOKEN),
                           config.fleet.max_message_bytes)

    return hold(config, Orders.read(private).spec, index, private, Tether.from_env(), serve)


def hold(config: RunConfig, spec: Mapping[str, Any], index: int, folder: Path, tether: Tie | None,
         serve: Callable[[ShardService], AbstractContextManager[object]]) -> int:
    """Hold a slice of the weights until the run ends; after a death, the slice as it was last copied to the folder."""
    torch.set_num_threads(1)
    copy, optimizer, server = folder / f"shard-{index}.state", config.learner, config.server
    parts = _parts_of(config, EnvSpec.from_json(spec), index)
    writing = threading.Lock()

    def build(state: Mapping[str, Any]) -> Shard:
        shard = Shard(f"shard {index}", state["weights"], optimizer, server, parts)
        shard.load_state_dict(state)
        return shard

    def keep(state: State) -> None:
        fresh = copy.with_suffix(".new")
        with writing:
            fresh.write_bytes(state.SerializeToString())
            os.replace(fresh, copy)

    service = ShardService(build, keep)
    if copy.exists():
        service.shard = build(unpack_shard(State.FromString(copy.read_bytes())))
        log.info("restored at version %d", service.shard.version)
    told = threading.Event()
    if tether is not None:
        tether.on_orphan(told.set)
    with heeded(told.set), serve(service):
        copier = Copier(service, server.copy_period_updates, keep)
        while not service.leaving and not (told.is_set() and time.monotonic() - service.called_at > QUIET_S):
            if tether is not None:
                tether.beat()
            copier.step()
            time.sleep(0.02)
    return 0 if service.leaving else EXIT_CODES["preempted"]


def _parts_of(config: RunConfig, spec: EnvSpec, index: int) -> tuple[Part, ...]:
    """Which numbers of a shard's slice move at rates of their own, as the agent says."""
    agent = make_agent(config, spec)
    if not agent.rates:
        return ()
    net = agent.network()
    size = sum(parameter.numel() for parameter in net.parameters())
    return within(parts_of(net, agent.rates), slices(size, config.server.shards)[index])


class Copier:
    """Copies a shard to the disk every so many updates. One that was just loaded is there already."""

    def __init__(self, service: ShardService, period: int, keep: Callable[[State], None]) -> None:
        self.service, self.period, self.keep = service, period, keep
        self._epoch, self._version = "", 0

    def step(self) -> None:
        shard = self.service.shard
        if shard is None:
            return
        if shard.epoch != self._epoch:
            self._epoch, self._version = shard.epoch, shard.version
        if shard.version - self._version < self.period:
            return
        self._version = shard.version
        held = shard.state_dict()
        if not is_finite(held["weights"]):  # a shard that dies is restored from the copy before
            return
        state = pack_shard(held)
        try:
            if self.service.shard is shard:  # and not another, which was loaded meanwhile
                self.keep(state)
        except OSError as error:
            log.warning("the shard could not be copied to the disk (%s); if it dies, it forgets more", error)


def _config_of(private: Path) -> RunConfig:
    return recipe.resolve(str(RunDirectory(Path(Orders.read(private).directory)).config), []).config


# ---- A cell ----

class Over(Exception):
    """The run ended while somebody was waited for."""


class Ordered(Stop):
    """Ends with the run's clocks, or when the registrar, or whoever started this process, says so."""

    def __init__(self, plan: Plan, inline: Inline, member: Member) -> None:
        super().__init__(plan, inline.cell.progress)
        self.member, self.epoch = member, member.link.welcome.epoch
        self.asked_at = time.monotonic()

    @property
    def gone(self) -> bool:
        """Another registrar has taken over, and the run is back at its last checkpoint: so must we be."""
        self.asked_at = time.monotonic()
        return self.member.over() or self.member.link.welcome.epoch != self.epoch

    def __call__(self) -> bool:
        if self.gone:
            self.reason = "preempted"
        return super().__call__()


class Unjudged:
    """In the place of an evaluator, where another process evaluates."""

    count = 0

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def step(self) -> bool:
        return False

    def judge(self) -> None: ...
    def resume(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Clerk:
    """A worker between a cell and the registrar: tells what was done, hears how far the others are, obeys orders."""

    def __init__(self, inline: Inline, member: Member, stop: Ordered, folder: Path) -> None:
        self.inline, self.link, self.index, self.stop = inline, member.link, member.index, stop
        self.stage = Stage(folder, member.index)
        self._written: tuple[int, set[str]] = (0, set())
        self._spoke_at = self._gauged_at = 0.0
        self._told = self._base = 0

    def begin(self) -> None:
        """From now on the run's clock is what the registrar knew when it greeted us, and what came on top of it."""
        pace, welcome = self.inline.cell.replay.pace, self.link.welcome
        self._told = pace.steps
        self._base = welcome.steps - pace.steps - welcome.elsewhere
        self._hear()

    def step(self) -> bool:
        self._hear()
        if time.monotonic() - self._spoke_at >= TALK_S:
            self.talk()
        if self.link.save > self._written[0]:
            self._give(self.link.save)
        return False

    def _hear(self) -> None:
        self.inline.cell.replay.elsewhere = self._base + self.link.elsewhere

    def talk(self, stand: bool = False) -> None:
        """Tell what is new; how things stand only now and then, unless `stand` asks for it."""
        cell, outbox = self.inline.cell, self.link.metrics
        now = self._spoke_at = time.monotonic()
        if stand or (cell.stop.reason is None and now - self._gauged_at >= GAUGES_S):
            self._gauged_at = now
            for gauge in cell.gauges:
                cell.meter.write(gauge())
        handed = cell.meter.hand_over()
        for tag, (total, count) in handed["sums"].items():
            outbox.add(tag, total, count)
        for tag, by in handed["counters"].items():
            if by:
                outbox.count(tag, by)
        for ret, length in handed["episodes"]:
            outbox.episode(0, ret, length)
        if steps := cell.replay.pace.steps - self._told:
            self._told += steps
            outbox.tick(steps)

    def _give(self, save: int) -> None:
        """Our part of a checkpoint; then wait until everybody has given theirs. It may be the last that is heard."""
        self.talk(stand=True)
        snapshot = self.inline.snapshot()
        segments = [Segment(part_name(self.index, segment.name), segment.blocks) for segment in snapshot.segments]
        before, names = self._written
        self.stage.kept = names if before == self.link.saved else set()
        self._written = (save, {segment.name for segment in segments})
        try:
            self.stage.write(segments)
        except OSError as error:
            log.warning("this cell's part of a checkpoint could not be written (%s)", error)
        buffers = dict(self.inline.cell.learner.flat.net.named_buffers())
        self.link.metrics.part(save, pack_state(_part(snapshot, self.index, buffers)),
                               [segment.name for segment in segments])
        while self.link.save == save and not self.stop.gone:
            since = time.monotonic()
            time.sleep(10 * PAUSE_S)
            self.link.metrics.count("server/hold_ms", round(1000 * (time.monotonic() - since)))


def _part(snapshot: Snapshot, index: int, buffers: Iterable[str]) -> dict[str, Any]:
    """What this cell remembers for itself; the first one's target network and running figures stand for all."""
    learner = snapshot.state["learner"]
    common = {"target": learner["target"], "buffers": {name: learner["net"][name] for name in buffers}}
    return {name: snapshot.state[name] for name in OWN} | {"learner": {"rng": learner["rng"]} | (
        {} if index else common)}


def run_bundle(contact: Contact) -> int:
    private = Path(parse_address(contact.address).path).parent
    return push(contact, Path(Orders.read(private).directory), lambda config: shelves_of(config, private))


def push(contact: Way, run: Path, shelves: Callable[[RunConfig], list[RemoteShard]]) -> int:
    """Act, learn and push until the run is over."""
    member = Member(contact, CELL)
    member.on_orphan = lambda: setattr(member.link, "patience_s", 1.0)  # the registrar may still want our part
    config, directory = member.config, RunDirectory(run)
    torch.set_num_threads(config.run.threads or 1)
    try:
        with member.polite(), memory_advised(config), _playing(config) as env, ExitStack() as stack:
            member.require(env.spec)
            checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest(set_aside=False)
            inline, stop = _assembled(config, env, member, checkpoint is None, stack)
            clerk = Clerk(inline, member, stop, directory.path / "parts")
            _meet(config, inline, member, shelves(config), stop)
            _go_on(config, inline, member, checkpoint)
            member.link.start()
            clerk.begin()
            inline.beside.append(clerk)
            # The first update may take long: code is recorded and compiled; a loop that hangs is another matter.
            stall_s = config.run.stall_timeout_s
            stack.callback(beating(member.tether, math.inf, lambda: time.monotonic() - stop.asked_at < stall_s).set)
            with member.at_work():
                _work(inline, clerk, stop)
    except Diverged as error:
        log.error("training failed: %s", error)
        return VAIN
    member.link.close()  # nobody has to hear what was done after the last checkpoint
    if member.link.failed is not None:
        raise member.link.failed
    return 0 if member.link.stopped else EXIT_CODES["preempted"]


def _work(inline: Inline, clerk: Clerk, stop: Ordered) -> None:
    try:
        inline.run()
        clerk.talk(stand=True)
        while not stop.gone:  # the others are still at it, or the registrar has to save
            clerk.step()
            time.sleep(PAUSE_S)
    except Over:
        pass


@contextmanager
def _playing(config: RunConfig) -> Iterator[VectorEnv]:
    with closing(make_env(_shared(config).env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s)) as env:
        yield env


def _shared(config: RunConfig) -> RunConfig:
    """Cells share the cores."""
    threads = config.env.threads or max(1, usable_cores() // config.cells)
    return config.model_copy(update={"env": config.env.model_copy(update={"threads": threads})})


def _assembled(config: RunConfig, env: VectorEnv, member: Member, anew: bool,
               stack: ExitStack) -> tuple[Inline, Ordered]:
    """The roles of a cell. Nothing is drawn from the same numbers in two cells, nor in two lives of one that begin
    without a checkpoint; the first life of the first cell draws as a run of one process would."""
    cast = cast_of(_shared(config), env, member.index, judged=False)
    stack.callback(cast.close)
    plan = plan_of(config)
    seed = seed_for(plan.seed, "rank", member.index) if member.index else plan.seed
    if anew and member.incarnation > 1:
        seed = seed_for(seed, "life", member.incarnation)
    never = {"period_steps": None, "period_updates": None}
    plan = replace(plan, seed=seed, stop_at=None, log_period_steps=0, log_period_updates=None,
                   checkpoint=plan.checkpoint.model_copy(update=never))
    quiet = Outside((), lambda snapshot: None, lambda score, progress, weights: True, lambda sample, update: None)
    inline = Inline(cast, plan, quiet)
    inline.evaluator = Unjudged(inline.evaluator.policy)
    stop = inline.cell.stop = Ordered(plan, inline, member)
    return inline, stop


def _meet(config: RunConfig, inline: Inline, member: Member, shelves: Sequence[RemoteShard], stop: Ordered) -> None:
    """The learner's weights are the server's from now on; so is its count of updates."""
    learner = inline.cell.learner

    def wait(seconds: float) -> None:
        if stop.gone:
            raise Over
        time.sleep(seconds)

    for shelf in shelves:
        shelf.wait = wait
    rule = ViaServer(f"{member.link.name}, life {member.incarnation}", shelves, config.server, inline.cell.meter,
                     first=member.index == 0)
    learner.meet(rule)
    learner.advance = rule.advance
    learner.target.follow(learner.flat)
    learner.updates = rule.updates
    if config.server.outlier_deviations is not None:
        learner.doubt(config.server.outlier_deviations)
    inline.cell.gauges.append(rule.figures)


def _go_on(config: RunConfig, inline: Inline, member: Member, checkpoint: Checkpoint | None) -> None:
    """With our part of the newest checkpoint, as far as there is one."""
    welcome = member.link.welcome
    if checkpoint is None:
        inline.cell.republish()
        return
    state = checkpoint.state()
    net = state["learner"]["net"]
    state |= {"weights": {"version": welcome.updates, "state": net}, "evaluator": {}}
    take_part(inline, state, checkpoint.segments(), member.index, config.cells, welcome.steps)
    learner = inline.cell.learner
    learner.updates = learner.advance(learner.updates)
    inline.cell.republish()
