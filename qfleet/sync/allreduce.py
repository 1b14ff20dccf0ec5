"""Learners that meet at every update: each derives the gradient of its own batch, all apply the mean (data parallel).

The gradient is one vector. A small network's is added up at once, in a few messages, when `derive` has played back its
recording of the whole update; a large one's leaves in parts while backward is still at the others (`early.Early`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from qfleet.config import Config, Count, Positive, PositiveCount
from qfleet.learner.flat_params import Flat
from qfleet.learner.optimizer import Optimizer, OptimizerConfig, all_frozen, slices_within, split_evenly
from qfleet.sync.gradient_sync import Grads, norm_of
from qfleet.sync.overlap import OverlappedAllReduce

RankRows = list[list[float]]
"""What every rank said, rank by rank."""


class AllReduceConfig(Config):
    """The allreduce section: learners that average their gradients synchronously (gradients=allreduce)."""

    batch: Literal["per_rank", "global"] = Field(
        "global", description="learner.batch_size is global (the sum over all ranks) or per_rank")
    rate_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="learning rate with n ranks and batch=per_rank: none (unchanged), linear (× n) or sqrt (× "
                            "√n)")
    scaled_for: PositiveCount | None = Field(
        None, description="number of ranks that batch size, learning rate, updates and replay are stated for; written "
                          "by qfleet. null = not divided yet")
    shard_optimizer: bool = Field(False, description="shard the optimizer state over the ranks (ZeRO-1) to save memory")
    overlap: bool = Field(False, description="overlap the allreduce with the backward pass; for large networks")
    timeout_s: Positive = Field(60.0, description="restart all ranks if one does not answer for this long, seconds")
    max_restarts: Count = Field(3, description="restarts of all ranks in total, each from the newest checkpoint")

    def inactive(self) -> dict[str, str]:
        return {"rate_scaling": "with allreduce.batch=global the batch does not grow"} if self.batch == "global" else {}


class Collectives(Protocol):
    """The other ranks. Every call is answered when all ranks have made the same one.

    `sent_bytes` counts what this rank sends if messages go round a ring, as they do.
    """

    rank: int
    size: int
    sent_bytes: float

    def all_gather(self, row: Sequence[float]) -> RankRows:
        """Rows of the same length, one of each rank."""

    def start_allreduce(self, vector: torch.Tensor) -> Callable[[], None]:
        """Begin to add up over all ranks, in place; what is returned waits until that is done."""

    def all_gather_slices(self, vector: torch.Tensor, cuts: Sequence[slice]) -> None:
        """Each rank has brought its slice up to date; afterwards every rank has all of them."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """What the first rank has, in place."""


class AllReduce:
    """Implements `Gradients`. With one rank it is `Solo`, bit by bit.

    `say` gives what else this rank tells the others with every vote, and `hear` gets what all of them told. `ahead`
    says how many batches more, exactly, this rank will have before anything else happens to its replay, all of the
    same peak; then one vote decides on all of them. None = unknown, and every update is voted on. `overlap` sends
    gradients while backward runs, which must then be autograd's own and no recording.
    """

    def __init__(
        self, cfg: OptimizerConfig, peers: Collectives, sharded: bool = False,
        piggyback: Callable[[], Sequence[float]] = tuple,
        on_piggyback: Callable[[RankRows], None] = lambda told: None,
        batches_ahead: Callable[[], int | None] = lambda: None, overlap: bool = False) -> None:
        self.overlap = overlap and peers.size > 1
        self.cfg, self.peers, self.sharded, self.piggyback, self.on_piggyback, self.batches_ahead = (
            cfg, peers, sharded, piggyback, on_piggyback, batches_ahead)
        self._granted: int | None = None  # updates that have been voted on and not been made yet

    def attach(self, flat: Flat) -> None:
        parts = self.peers.size if self.sharded else 1
        self.flat, self.rank_slices = flat, split_evenly(len(flat.master), parts)
        self.mine = self.rank_slices[self.peers.rank if self.sharded else 0]
        self.optimizer = Optimizer(self.cfg, flat.master[self.mine], slices_within(flat.param_slices, self.mine))
        self._overlapped = OverlappedAllReduce(flat, self.peers.start_allreduce) if self.overlap else None

    def agree(self, max_weight: float | None) -> float | None:
        """All or nobody: a rank whose replay is empty, or behind, makes the others wait and not hang.

        Weights were divided by the largest of their own batch; the factor makes that the largest of all batches.
        """
        if self._granted is not None:
            return self._go_on(max_weight)
        batches_ahead = self.batches_ahead() if max_weight is not None else 0
        told = self.peers.all_gather(
            [
                -1.0 if max_weight is None else max_weight, -1.0 if batches_ahead is None else batches_ahead,
                *self.piggyback()]
        )
        self.on_piggyback([row[2:] for row in told])
        peaks = [row[0] for row in told]
        if max_weight is None or min(peaks) < 0:
            return None
        more = int(min(row[1] for row in told))
        self._granted = more if more >= 0 else None
        return max_weight / max(peaks)

    def _go_on(self, peak: float | None) -> float | None:
        """A vote whose outcome is known: yes as long as everybody has batches left, then once no."""
        if not self._granted:
            self._granted = None
            return None
        if peak is None:
            raise RuntimeError(f"rank {self.peers.rank} has lost step: a batch that it promised did not come")
        self._granted -= 1
        return 1.0

    def skips_frozen(self) -> bool:
        return self.cfg.clip_norm == 0 and all_frozen(self.flat.param_slices, self.optimizer.count + 1)

    def apply(self, grads: Grads | None) -> float:
        """A gradient that is not finite, anywhere, is contagious: the sum is not finite either, and all skip it."""
        gradient = self._sum(grads)
        if self.peers.size > 1:
            gradient.div_(self.peers.size)
        norm = norm_of(gradient)
        if math.isfinite(norm):
            self.optimizer.step(gradient[self.mine], norm)
            if self.sharded:
                self.peers.all_gather_slices(self.flat.master, self.rank_slices)
            self.flat.copy_to_network()
        return norm

    def _sum(self, grads: Grads | None) -> torch.Tensor:
        if self._overlapped is not None:
            return self._overlapped.finish(grads)
        gradient = self.flat.grad.fill_(math.nan) if grads is None else self.flat.gather(grads)
        if self.peers.size > 1:
            self.peers.start_allreduce(gradient)()
        return gradient

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as `Solo` has it, so that any number of ranks can go on with it. With a sharded optimizer
        all ranks must ask at the same time."""
        state = self.optimizer.state_dict()
        for name in ("mean", "square") if self.sharded else ():
            whole = torch.zeros_like(self.flat.master)
            whole[self.mine] = state[name]
            self.peers.all_gather_slices(whole, self.rank_slices)
            state[name] = whole
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict({"steps": state["steps"], "mean": state["mean"][self.mine],
                                        "square": state["square"][self.mine]})


def bytes_per_update(parameters: int, ranks: int, sharded: bool, words: int) -> float:
    """What a rank sends for one update that was voted on by itself: the gradient twice round a ring, less its own part,
    the vote (a row of `words` numbers to everybody), and, if the optimizer is sharded, its part of the new weights to
    everybody."""
    around = 4.0 * parameters * (ranks - 1) / ranks
    return (3 if sharded else 2) * around + 8.0 * words * (ranks - 1)
