"""The rule that moves weights: Adam or RMSProp on one vector, or on a slice of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import nn

from qfleet.accel.kernels.kernel_compiler import MAX_RESIDENT_THREADS, compile_kernel
from qfleet.config import Config, NonNegative, Positive
from qfleet.core.agent import ParamGroup

BETAS = (0.9, 0.999)
RMS_DECAY = 0.95
SLICE_ALIGNMENT = 64
"""Borders of slices lie at multiples of this. Kernels round the last few elements of an array, which fill no vector
register, another way: only slices that end where the whole has no remainder move bit by bit as the whole would."""


def split_evenly(size: int, parts: int) -> list[slice]:
    """A vector in `parts` pieces of nearly the same length, in order; the last ones of a short vector are empty."""
    grains = -(-size // SLICE_ALIGNMENT)
    borders = [min(size, grains * part // parts * SLICE_ALIGNMENT) for part in range(parts)] + [size]
    return [slice(begin, end) for begin, end in pairwise(borders)]


class OptimizerConfig(Config):
    """Optimizer, learning rate and gradient clipping."""

    optimizer: Literal["adam", "rmsprop"] = Field(
        "adam", description="adam, or rmsprop (centred, as in Mnih et al. 2015)")
    learning_rate: Positive = Field(1e-4, description="learning rate of the optimizer; lower it if training diverges")
    optimizer_eps: Positive = Field(
        1e-8, description="ε of the optimizer, added to the denominator (adam) or under its root (rmsprop)")
    clip_norm: NonNegative = Field(10.0, description="clip the global gradient norm to this value; 0 = no clipping")


@dataclass(frozen=True)
class ParamSlice:
    """Numbers of a vector, all of one layer or of several, that do not move like the others."""

    span: slice
    group: ParamGroup


def param_slices_of(net: nn.Module, rates: Mapping[str, ParamGroup]) -> tuple[ParamSlice, ...]:
    """Where in the vector of a network's parameters those lie whose names begin as `rates` say."""
    found, at = [], 0
    for name, parameter in net.named_parameters():
        found += [ParamSlice(slice(at, at + parameter.numel()), rate) for prefix, rate in rates.items()
                  if name.startswith(prefix)]
        at += parameter.numel()
    return tuple(found)


def slices_within(parts: Sequence[ParamSlice], piece: slice) -> tuple[ParamSlice, ...]:
    """What of these parts lies in a slice of the vector, counted from its beginning."""
    found = [ParamSlice(slice(max(part.span.start, piece.start) - piece.start,
                              min(part.span.stop, piece.stop) - piece.start), part.group) for part in parts]
    return tuple(part for part in found if part.span.start < part.span.stop)


def all_frozen(parts: Sequence[ParamSlice], count: int) -> bool:
    """Whether the parts that rest at times do so in step `count`, all of them."""
    periods = {part.group.period for part in parts if part.group.period > 1}
    return bool(periods) and all(count % period for period in periods)


class OptimizerPlan(NamedTuple):
    """What a step moves while some parts rest: `stretches` of the vector that begin and end at multiples of GRAIN, and
    which numbers in these rest nevertheless."""

    stretches: list[slice]
    resting: torch.Tensor


def plan_step(size: int, resting: Sequence[slice]) -> OptimizerPlan:
    moves = torch.ones(-(-size // SLICE_ALIGNMENT) * SLICE_ALIGNMENT, dtype=torch.bool)
    moves[size:] = False
    for where in resting:
        moves[where] = False
    grains = moves.view(-1, SLICE_ALIGNMENT).any(1)
    edges = torch.diff(grains.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero().flatten().tolist()
    stretches = [slice(begin * SLICE_ALIGNMENT, min(size, end * SLICE_ALIGNMENT))
                 for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    return OptimizerPlan(stretches, (grains.repeat_interleave(SLICE_ALIGNMENT) & ~moves)[:size].nonzero().flatten())


class Optimizer:
    """Moves `weights`, a vector, in place. Every rule works element by element, so that `slices` of one vector with an
    optimizer each move as the whole would: bit by bit on one thread. `parts` of them have rates of their own."""

    def __init__(self, cfg: OptimizerConfig, weights: torch.Tensor, parts: Sequence[ParamSlice] = ()) -> None:
        self.cfg, self.weights, self.param_slices = cfg, weights, parts
        self.steps, self.count = torch.zeros((), device=weights.device), 0
        self.mean, self.square = torch.zeros_like(weights), torch.zeros_like(weights)
        self._plans: dict[tuple[bool, ...], OptimizerPlan] = {}
        factor = torch.ones_like(weights)
        for part in parts:
            factor[part.span] = part.group.lr_factor
        self._factor = None if bool((factor == 1).all()) else factor

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, norm: float) -> None:
        """One step. `norm` is that of the whole gradient, of which this may be a slice; it is clipped in place."""
        if 0 < self.cfg.clip_norm < norm:
            gradient.mul_(self.cfg.clip_norm / (norm + 1e-6))
        self.steps += 1
        self.count += 1
        if self.param_slices:
            self._step_parts(gradient)
        else:
            self._move(self.weights, gradient, self.mean, self.square)

    @torch.no_grad()
    def step_if(self, sound: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor,
                rounded: tuple[torch.Tensor, torch.Tensor] | None = None) -> bool:
        """The same step on a device, where nobody waits to hear of `norm`, or of `sound`, without which nothing moves.

        Not for parts that rest in some updates. Whether the weights are `rounded`, too, to where a network reads them.
        """
        self.steps += sound
        if self._at_once(sound, gradient, norm, rounded):
            return rounded is not None
        if self.cfg.clip_norm > 0:
            gradient.mul_((self.cfg.clip_norm / (norm + 1e-6)).clamp(max=1))
        moved = self.weights if self._factor is None else torch.zeros_like(self.weights)
        if self.cfg.optimizer == "adam":
            self._adam(moved, gradient, self.mean, self.square, (~sound).float())
        else:
            kept = [(vector, vector.clone()) for vector in (self.mean, self.square, moved)]
            self._rmsprop(moved, gradient, self.mean, self.square)
            for vector, before in kept:
                vector.copy_(torch.where(sound, vector, before))
        if self._factor is not None:
            self.weights.addcmul_(moved, self._factor)
        return False

    def _at_once(self, sound: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor,
                 rounded: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
        """Clip, move and round in one pass over the memory of a GPU, which is all that a step takes time for there."""
        simple = self.weights.is_cuda and self._factor is None and self.cfg.optimizer == "adam"
        if not simple or (adam := compile_kernel("adam")) is None:
            return False
        cfg, size = self.cfg, len(self.weights)
        data, places = rounded if rounded is not None else (self.weights, self.weights)
        adam(min(-(-size // 4), MAX_RESIDENT_THREADS), [
            self.weights, gradient, self.mean, self.square, self.steps, norm, sound, data, places, size,
            int(rounded is not None), cfg.learning_rate, *BETAS, cfg.optimizer_eps, float(cfg.clip_norm)])
        return True

    def _step_parts(self, gradient: torch.Tensor) -> None:
        """Parts are moved with their neighbours and corrected afterwards: kernels that began at the border of a part
        would round otherwise where a slice of the vector has another part of it."""
        stretches, which = self._plan()
        kept = [(each, each[which]) for each in (self.weights, self.mean, self.square)] if len(which) else []
        for at in stretches:
            weights, mean, square = self.weights[at], self.mean[at], self.square[at]
            if self._factor is None:
                self._move(weights, gradient[at], mean, square)
            else:
                moved = torch.zeros_like(weights)
                self._move(moved, gradient[at], mean, square)
                weights.addcmul_(moved, self._factor[at])
        for each, before in kept:
            each[which] = before

    def _plan(self) -> OptimizerPlan:
        rests = tuple(self.count % part.group.period > 0 for part in self.param_slices)
        if rests not in self._plans:
            stretches, resting = plan_step(len(self.weights), [part.span for part, its in
                                                               zip(self.param_slices, rests, strict=True) if its])
            self._plans[rests] = OptimizerPlan(stretches, resting.to(self.weights.device))
        return self._plans[rests]

    def _move(self, weights: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor) -> None:
        if self.cfg.optimizer == "adam":
            self._adam(weights, gradient, mean, square)
        else:
            self._rmsprop(weights, gradient, mean, square)

    def _adam(self, weights: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor,
              unless: torch.Tensor | None = None) -> None:
        """Kingma & Ba 2015, by the kernel behind torch.optim.Adam(fused=True) without the bookkeeping around it."""
        torch._fused_adam_(
            [weights], [gradient], [mean], [square], [], [self.steps], amsgrad=False,
            lr=self.cfg.learning_rate, beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.0, eps=self.cfg.optimizer_eps,
            maximize=False, grad_scale=None, found_inf=unless)

    def _rmsprop(self, weights: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor) -> None:
        """Centred RMSProp as Mnih et al. 2015 used it: g / √(E[g²] − E[g]² + ε), with ε = 0.01 there."""
        square.mul_(RMS_DECAY).addcmul_(gradient, gradient, value=1 - RMS_DECAY)
        mean.lerp_(gradient, 1 - RMS_DECAY)
        # The variance of a gradient that hardly changes is rounded below zero: clamped, or the root would be NaN.
        variance = square.addcmul(mean, mean, value=-1).clamp_(min=0)
        spread = variance.add_(self.cfg.optimizer_eps).sqrt_()
        weights.addcdiv_(gradient, spread, value=-self.cfg.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps.clone(), "mean": self.mean.clone(), "square": self.square.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps.copy_(state["steps"])
        self.count = int(state["steps"])
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
