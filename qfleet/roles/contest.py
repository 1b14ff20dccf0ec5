"""Which numbers an agent learns faster with on this CPU: tried out once, before the first step.

That a processor knows bfloat16 does not make a network faster: small ones lose more by conversions than they win.
"""

from __future__ import annotations

from time import process_time

import torch

from qfleet.agent import Agent
from qfleet.replay.layout import Layout
from qfleet.roles.derive import Eager
from qfleet.roles.flat import Flat
from qfleet.roles.policy import PRECISIONS, seeded_network
from qfleet.types import Sample

ROUNDS = 4
MARGIN = 1.15
"""How much faster bfloat16 must be. Near a tie the choice would change from run to run, and with it the numbers."""


def faster_precision(agent: Agent, layout: Layout, batch_size: int, threads: int) -> str:
    """The name of the precision. Updates of both take turns, and each has the CPU time of its best."""
    sample, before = _empty_batch(layout, batch_size), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        contenders = {name: _update_of(agent, dtype) for name, dtype in PRECISIONS.items()}
        spent = dict.fromkeys(contenders, float("inf"))
        for round in range(1 + ROUNDS):  # the first is for warming up
            for name, update in contenders.items():
                since = process_time()
                update(sample)
                if round:
                    spent[name] = min(spent[name], process_time() - since)
    finally:
        torch.set_num_threads(before)
    return "bf16" if spent["fp32"] > MARGIN * spent["bf16"] else "fp32"


def _update_of(agent: Agent, dtype: torch.dtype) -> Eager:
    net, target = Flat(seeded_network(agent, 0), dtype), Flat(seeded_network(agent, 0).requires_grad_(False), dtype)
    return Eager(agent, net.net, target.net, torch.Generator().manual_seed(0))


def _empty_batch(layout: Layout, size: int) -> Sample:
    """A batch of the right shape; the time does not depend on what is seen."""
    rows = {column.name: torch.zeros((size, layout.window.length, *column.stacked_shape),
                                     dtype=getattr(torch, column.dtype)) for column in layout.columns}
    rows |= {column.name: torch.zeros((size, len(layout.marks), *column.shape), dtype=getattr(torch, column.dtype))
             for column in layout.marked}
    return Sample(torch.arange(size).numpy(), torch.ones(size), rows)
