"""From a batch to a gradient in parts, one in each hand: the mean over a batch is the mean of its parts' means.

What a run learns depends on the number of parts, and not on which of them is ready first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from qfleet.agent import Agent
from qfleet.maths.hands import Hands
from qfleet.roles.derive import Derivative, Derive
from qfleet.roles.flat import Flat, pour
from qfleet.roles.optimizer import slices
from qfleet.types import Sample, UserError


def require_divisible(agent: Agent, net: nn.Module, parts: int) -> None:
    """Batches may be learnt in parts where items are learnt one by one and passes write nothing."""
    buffer = next((name for name, _ in net.named_buffers()), None)
    if not agent.itemwise:
        why = "what this agent, or a torso that is not qfleet's, makes of an item may depend on others or on chance"
    elif buffer is not None:
        why = f"this network may write to {buffer} when it computes"
    else:
        return
    raise UserError(f"learner.parts={parts}: {why}; set learner.parts=1")


class Parted:
    """Derives the parts of a batch by what `deriving` makes for each of them, with a generator of its own.

    The gradient is added up in the vector of `flat`, in float32 and always in the same order. What parts draw at random
    depends on the learner's generator `rng` alone, which gives each of them a new seed for every batch: noise that an
    undivided batch would share is drawn for each part.
    """

    def __init__(self, deriving: Callable[[torch.Generator], Derive], flat: Flat, rng: torch.Generator,
                 hands: Hands) -> None:
        self.flat, self.rng, self.hands = flat, rng, hands
        self._rngs = [torch.Generator() for _ in range(hands.count)]
        self._derive = [deriving(each) for each in self._rngs]
        self._grads = [flat.grad, *(torch.zeros_like(flat.grad) for _ in self._rngs[1:])]
        self._rooms = [list(flat.named(grad).values()) for grad in self._grads]
        self._pieces = slices(len(flat.grad), hands.count)

    def __call__(self, sample: Sample) -> Derivative:
        count, items = self.hands.count, len(sample.weight)
        borders = [items * part // count for part in range(count + 1)]
        seeds = torch.randint(1 << 62, (count,), generator=self.rng).tolist()
        found = self.hands([partial(self._part, index, seeds[index], _cut(sample, slice(*border)), items)
                            for index, border in enumerate(pairwise(borders))])
        self.hands([partial(self._add, piece) for piece in self._pieces])
        shares = [(end - begin) / items for begin, end in pairwise(borders)]
        metrics = {tag: _mean([part.metrics[tag] for part in found], shares) for tag in found[0].metrics}
        return Derivative(_mean([part.total for part in found], shares), torch.cat([part.per_item for part in found]),
                          self.flat.rooms, torch.cat([part.priority for part in found]), metrics, {})

    def _part(self, index: int, seed: int, sample: Sample, items: int) -> Derivative:
        self._rngs[index].manual_seed(seed)
        found = self._derive[index](sample)
        if found.buffers:
            raise ValueError(f"an agent whose loss writes {', '.join(found.buffers)} is not itemwise")
        with torch.no_grad():
            pour(found.grads, self._rooms[index])
            self._grads[index].mul_(len(sample.weight) / items)
        return found

    def _add(self, piece: slice) -> None:
        with torch.no_grad():
            for grad in self._grads[1:]:
                self._grads[0][piece].add_(grad[piece])


def _cut(sample: Sample, part: slice) -> Sample:
    return Sample(sample.keys[part], sample.weight[part], {name: rows[part] for name, rows in sample.rows.items()},
                  sample.peak)


def _mean(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Of the items of all parts, or nearly so where a part tells the mean of some of its rows."""
    return torch.stack([value.mean() * share for value, share in zip(values, shares, strict=True)]).sum()
