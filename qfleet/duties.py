"""What the Ray actors of a run do: each function is a job, in a thread of its `Host`, and calls come to it by Ray.

A cell learns from what actors send (`lead`); ranks play, learn and average their gradients (`average`); cells of a
parameter server play, learn and push (`bundle`) to those who hold its shards (`hold_shard`).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qfleet import recipe
from qfleet.bundle import hold, push
from qfleet.cellhost import Orders, as_text, learn, sole_writer
from qfleet.crew import Post, be_rank
from qfleet.members import beating, run_actor, run_evaluator
from qfleet.roles.learner import Diverged
from qfleet.runs.directory import RunDirectory
from qfleet.runtime.cluster.carrier import RayCaller, RayShard, answering, methods_of
from qfleet.runtime.cluster.host import Host
from qfleet.runtime.cluster.life import LOST
from qfleet.runtime.cluster.session import node_address
from qfleet.runtime.ranks import Place, RankLost, interface_of
from qfleet.runtime.supervise import DONE, VAIN
from qfleet.runtime.tether import Tie
from qfleet.runtime.wire.client import Link
from qfleet.runtime.wire.desk import Desk
from qfleet.runtime.wire.inbox import Inbox
from qfleet.runtime.wire.registry import Registry
from qfleet.runtime.wire.server import Answers
from qfleet.runtime.wire.shards import RemoteShard
from qfleet.session import TrainResult
from qfleet.settings import RunConfig
from qfleet.types import RunLost, UserError

log = logging.getLogger(__name__)

SHARDS = ".shards"


@dataclass(frozen=True)
class Errand:
    """The `Way` of a Ray actor to its cell, which is another."""

    cell: Any
    name: str
    address: str
    patience_s: float
    cores: int
    line: Tie | None = None
    trusted: bool = True  # whoever may call Ray actors may do anything here

    def tie(self) -> Tie | None:
        return self.line

    def link(self, role: str) -> Link:
        return Link(RayCaller(self.cell, self.address), self.name, role, self.patience_s)


class Reception:
    """A cell's: calls come to its Ray actor, which keeps its result for whoever looks."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @contextmanager
    def __call__(self, desk: Desk, registry: Registry, inbox: Inbox, config: RunConfig) -> Iterator[None]:
        with answering(self._host, methods_of(Answers(desk, registry, inbox, config.fleet.max_message_bytes))):
            yield

    def tell(self, result: TrainResult) -> None:
        self._host.word = as_text(result)


def shelves_of(handles: Sequence[Any]) -> Callable[[RunConfig], list[RemoteShard]]:
    return lambda config: [RemoteShard(RayShard(handle, f"shard {index}"), config.fleet.patience_s)
                           for index, handle in enumerate(handles)]


def lead(host: Host, orders: Orders, shards: Sequence[Any] = ()) -> int:
    """What the cell's Ray actor does; or the registrar's, where there are shards."""
    try:
        with sole_writer(_seen(orders)):
            learn(orders, host.line, Reception(host), shelves_of(shards))
    except (Diverged, RunLost) as error:
        host.word = f"training failed: {error}"
        return VAIN
    return DONE


def average(host: Host, orders: Orders, place: Place) -> int:
    """Be a rank. The first one keeps directory, records and checkpoints, and hears the evaluator."""
    first = place.rank == 0
    run, reception = _seen(orders), Reception(host)
    if (name := interface_of(node_address())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # the name of a host may mean another of its addresses
    over = beating(host.line, math.inf)  # that it goes forward, too, the ranks see from each other
    try:
        with sole_writer(run) if first else nullcontext():
            result = be_rank(orders, Post(replace(place, attempt=host.number), host.line, reception if first else None))
        if first:
            reception.tell(result)
    except (Diverged, RunLost) as error:
        host.word = f"training failed: {error}"
        return VAIN
    except RankLost as error:
        host.word = str(error)
        return LOST
    finally:
        over.set()
    return DONE


def _seen(orders: Orders) -> Path:
    run = Path(orders.directory)
    if not run.is_dir():
        raise UserError(f"the node of the learner does not see {run}: with ray.cell_anywhere=true all nodes must share "
                        "the disk of run.root")
    return run


def act(host: Host, errand: Errand) -> int:
    return run_actor(replace(errand, line=host.line))


def hold_shard(host: Host, orders: Orders, index: int) -> int:
    run = Path(orders.directory)
    config = recipe.resolve(str(RunDirectory(run).config), []).config
    return hold(config, orders.spec, index, run / SHARDS, host.line, lambda service: answering(host, service.methods))


def bundle(host: Host, errand: Errand, orders: Orders, shards: Sequence[Any]) -> int:
    return push(replace(errand, line=host.line), Path(orders.directory), shelves_of(shards))


def judge(host: Host, errand: Errand, videos: str | None) -> int:
    return run_evaluator(replace(errand, line=host.line), None if videos is None else Path(videos))


