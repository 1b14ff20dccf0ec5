"""Synchronous data parallelism: each rank computes the gradient of its batch, all apply the mean.

The gradient is one vector. Small networks reduce it in a few messages after the backward pass,
which may be a CUDA graph; large ones send it in buckets during the backward pass
(`OverlappedAllReduce`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from qfleet.config import Config, Count, Positive, PositiveCount
from qfleet.optim.flat_params import Flat
from qfleet.optim.optimizer import all_frozen, shapes_within, slices_within, split_evenly, vectors_of
from qfleet.optim.optimizer_config import OptimizerConfig
from qfleet.optim.torch_optimizer import make_optimizer
from qfleet.sync.gradient_sync import Grads, norm_of
from qfleet.sync.overlap import OverlappedAllReduce

RankRows = list[list[float]]
"""One row of numbers per rank."""


class AllReduceConfig(Config):
    """The allreduce section: learners that average their gradients synchronously (sync=allreduce)."""

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
    """Collective operations between ranks. Every call returns once all ranks have made the same call.

    `sent_bytes` counts the bytes sent by this rank, assuming ring algorithms.
    """

    rank: int
    size: int
    sent_bytes: float

    def all_gather(self, row: Sequence[float]) -> RankRows:
        """Gather rows of equal length from all ranks."""

    def start_allreduce(self, vector: torch.Tensor) -> Callable[[], None]:
        """Start a sum over all ranks, in place; the returned function waits for it."""

    def all_gather_slices(self, vector: torch.Tensor, slices: Sequence[slice]) -> None:
        """Distribute each rank's slice of `vector` to all ranks."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the tensor of rank 0 to all ranks, in place."""


@dataclass(frozen=True)
class RankLink:
    """Connection of a rank's gradient synchronisation to the other ranks.

    Attributes:
        peers: Collective operations between the ranks.
        piggyback: Returns values to send to the other ranks with every vote.
        on_piggyback: Receives those of all ranks.
        batches_ahead: Returns the exact number of further batches, all with the same `max_weight`, that this rank will
            have before its replay changes in any other way; one vote then decides on all of them. None = unknown, and
            there is a vote for every update.
    """

    peers: Collectives
    piggyback: Callable[[], Sequence[float]] = tuple
    on_piggyback: Callable[[RankRows], None] = lambda rows: None
    batches_ahead: Callable[[], int | None] = lambda: None


class AllReduce:
    """Implements `GradientSync`. With one rank it equals `Solo` bit by bit.

    `overlap` sends gradients during the backward pass, which must not be a CUDA graph.
    """

    def __init__(self, cfg: OptimizerConfig, link: RankLink, sharded: bool = False, overlap: bool = False) -> None:
        self.cfg, self.peers, self.sharded, self.overlap = cfg, link.peers, sharded, overlap and link.peers.size > 1
        self.piggyback, self.on_piggyback, self.batches_ahead = link.piggyback, link.on_piggyback, link.batches_ahead
        self._granted: int | None = None  # updates voted on but not made yet

    def attach(self, flat: Flat) -> None:
        parts = self.peers.size if self.sharded else 1
        self.flat, self.rank_slices = flat, split_evenly(len(flat.master), parts)
        self.own_slice = self.rank_slices[self.peers.rank if self.sharded else 0]
        self.optimizer = make_optimizer(
            self.cfg, flat.master[self.own_slice], slices_within(flat.param_slices, self.own_slice),
            shapes_within(flat.param_shapes, self.own_slice), divided=self.sharded)
        self._overlapped = OverlappedAllReduce(flat, self.peers.start_allreduce) if self.overlap else None

    def update_count(self, before: int, made: int) -> int:
        """All ranks make the same updates."""
        return before + made

    @property
    def local_optimizer(self) -> None:
        """None: gradients are synchronised."""

    def agree(self, max_weight: float | None) -> float | None:
        """Vote on the next update: all ranks make it or none.

        A rank without a batch delays the others instead of deadlocking them. Importance weights are
        normalised by the maximum of their own batch; the factor normalises them by that of all
        batches.
        """
        if self._granted is not None:
            return self._continue_granted(max_weight)
        batches_ahead = self.batches_ahead() if max_weight is not None else 0
        rows = self.peers.all_gather([
            -1.0 if max_weight is None else max_weight,
            -1.0 if batches_ahead is None else batches_ahead,
            *self.piggyback(),
        ])
        self.on_piggyback([row[2:] for row in rows])
        max_weights = [row[0] for row in rows]
        if max_weight is None or min(max_weights) < 0:
            return None
        granted = int(min(row[1] for row in rows))
        self._granted = granted if granted >= 0 else None
        return max_weight / max(max_weights)

    def _continue_granted(self, max_weight: float | None) -> float | None:
        """Use the remaining updates of an earlier vote; None once when they are used up."""
        if not self._granted:
            self._granted = None
            return None
        if max_weight is None:
            raise RuntimeError(f"rank {self.peers.rank} is out of step: a batch that it announced is missing")
        self._granted -= 1
        return 1.0

    def skips_frozen(self) -> bool:
        return self.cfg.clip_norm == 0 and all_frozen(self.flat.param_slices, self.optimizer.count + 1)

    def apply(self, grads: Grads | None) -> float:
        """Apply the mean gradient. If it is non-finite on one rank, the sum is too, and all ranks skip it."""
        gradient = self._sum(grads)
        if self.peers.size > 1:
            gradient.div_(self.peers.size)
        norm = norm_of(gradient)
        if math.isfinite(norm):
            self.optimizer.step(gradient[self.own_slice], norm)
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
        """The full state in the format of `Solo`, so that any number of ranks can resume from it.

        With a sharded optimizer all ranks must call this at the same time.
        """
        state = self.optimizer.state_dict()
        own = vectors_of(state, self.own_slice.stop - self.own_slice.start) if self.sharded else {}
        for name, vector in own.items():
            full = torch.zeros_like(self.flat.master, dtype=vector.dtype)
            full[self.own_slice] = vector
            self.peers.all_gather_slices(full, self.rank_slices)
            state[name] = full
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vectors = vectors_of(state, len(self.flat.master))
        self.optimizer.load_state_dict(
            {**state, **{name: vector[self.own_slice] for name, vector in vectors.items()}})
