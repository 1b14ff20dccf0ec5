"""Adam, AdamW and RMSProp on one vector or on a slice of it, and the schedule of their learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from qfleet.accel.kernels.adam import AdamRule, AdamState, fused_adam
from qfleet.config import load_attribute
from qfleet.core.agent import ParamGroup
from qfleet.core.errors import UserError
from qfleet.optim.optimizer_config import OptimizerConfig

BETAS = (0.9, 0.999)
RMS_DECAY = 0.95
COUNTERS = ("steps", "count")
"""Entries of a saved state that are not divided: the good updates, and the position in the schedule if there is one."""

SLICE_ALIGNMENT = 64
"""Slices begin at multiples of this. Kernels round the last elements of an array, which do not fill
a vector register, differently; slices without such a remainder are updated bit by bit like the
whole vector.
"""


def split_evenly(size: int, parts: int) -> list[slice]:
    """Split a vector into `parts` consecutive slices of nearly equal length; the last may be empty."""
    blocks = -(-size // SLICE_ALIGNMENT)
    borders = [min(size, blocks * part // parts * SLICE_ALIGNMENT) for part in range(parts)] + [size]
    return [slice(begin, end) for begin, end in pairwise(borders)]


@dataclass(frozen=True)
class ParamSlice:
    """A slice of the parameter vector with its own `ParamGroup`."""

    span: slice
    group: ParamGroup


@dataclass(frozen=True)
class ParamShape:
    """A parameter in the vector, or, with one dimension, the part of a parameter that lies in a slice of the vector.

    `decays`: subject to weight decay. Biases, the scales of normalisation layers and frozen parameters are not.
    """

    span: slice
    shape: tuple[int, ...]
    trained: bool = True
    decays: bool = True


def param_shapes_of(net: nn.Module) -> tuple[ParamShape, ...]:
    """Spans and shapes of all parameters, in the order of the vector."""
    found, at = [], 0
    for parameter in net.parameters():
        trained = parameter.requires_grad
        found.append(ParamShape(
            slice(at, at + parameter.numel()), tuple(parameter.shape), trained, trained and parameter.ndim > 1))
        at += parameter.numel()
    return tuple(found)


def shapes_within(shapes: Sequence[ParamShape], piece: slice) -> tuple[ParamShape, ...]:
    """The parameters that lie in `piece`, relative to its start; those at its borders may be cut."""
    found = []
    for each in shapes:
        span = slice(max(each.span.start, piece.start) - piece.start, min(each.span.stop, piece.stop) - piece.start)
        size = span.stop - span.start
        if size > 0:
            whole = size == each.span.stop - each.span.start
            found.append(replace(each, span=span, shape=each.shape if whole else (size,)))
    return tuple(found)


def param_slices_of(net: nn.Module, groups: Mapping[str, ParamGroup]) -> tuple[ParamSlice, ...]:
    """Slices of the parameter vector whose parameter names start with a key of `groups`."""
    found, at = [], 0
    for name, parameter in net.named_parameters():
        found += [ParamSlice(slice(at, at + parameter.numel()), group) for prefix, group in groups.items()
                  if name.startswith(prefix)]
        at += parameter.numel()
    return tuple(found)


def slices_within(param_slices: Sequence[ParamSlice], piece: slice) -> tuple[ParamSlice, ...]:
    """The parts of these slices that lie in `piece`, relative to its start."""
    found = [ParamSlice(slice(max(part.span.start, piece.start) - piece.start,
                              min(part.span.stop, piece.stop) - piece.start), part.group) for part in param_slices]
    return tuple(part for part in found if part.span.start < part.span.stop)


def all_frozen(param_slices: Sequence[ParamSlice], count: int) -> bool:
    """True if there are groups with a period and all of them are frozen in step `count`."""
    periods = {part.group.period for part in param_slices if part.group.period > 1}
    return bool(periods) and all(count % period for period in periods)


class OptimizerPlan(NamedTuple):
    """Elements that a step updates while some groups are frozen.

    `spans` of the vector begin and end at multiples of SLICE_ALIGNMENT; `frozen` are the indices
    within them that must stay unchanged.
    """

    spans: list[slice]
    frozen: torch.Tensor


def plan_step(size: int, frozen: Sequence[slice]) -> OptimizerPlan:
    """Plan a step of a vector of `size` elements in which the slices `frozen` do not change."""
    updated = torch.ones(-(-size // SLICE_ALIGNMENT) * SLICE_ALIGNMENT, dtype=torch.bool)
    updated[size:] = False
    for span in frozen:
        updated[span] = False
    blocks = updated.view(-1, SLICE_ALIGNMENT).any(1)
    edges = torch.diff(blocks.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero().flatten().tolist()
    spans = [slice(begin * SLICE_ALIGNMENT, min(size, end * SLICE_ALIGNMENT))
                 for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    return OptimizerPlan(spans, (blocks.repeat_interleave(SLICE_ALIGNMENT) & ~updated)[:size].nonzero().flatten())


ScheduleFn = Callable[[float], float]
"""Progress from 0 to 1 -> factor of the learning rate."""


class LearningRate:
    """Learning rate of an optimizer by the number of steps that it has made.

    `warmup_updates` steps rise linearly to the full rate; the schedule's progress is 0 until then, and 1 from step
    `schedule_updates` on.
    """

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg, self.peak = cfg, cfg.learning_rate
        self.is_constant = cfg.schedule == "constant" and cfg.warmup_updates == 0
        if cfg.schedule != "constant" and cfg.schedule_updates is None:
            raise UserError(f"learner.schedule={cfg.schedule} needs the number of updates over which the learning rate "
                            "changes: set learner.schedule_updates")

    def at(self, steps: int) -> float:
        """Learning rate of the step after `steps` steps."""
        if self.is_constant:
            return self.peak
        return self.peak * min(1.0, (steps + 1) / max(1, self.cfg.warmup_updates)) * self.factor(self.progress(steps))

    def position(self, steps: int) -> dict[str, torch.Tensor]:
        """Entry of a saved state: `steps` exactly, as the rate depends on it; none for a constant rate."""
        return {} if self.is_constant else {"count": torch.tensor(steps)}

    def progress(self, steps: int) -> float:
        warmup, end = self.cfg.warmup_updates, self.cfg.schedule_updates
        return 0.0 if end is None else min(1.0, max(0.0, (steps - warmup) / max(1, end - warmup)))

    def factor(self, progress: float) -> float:
        """Value of the schedule; UserError if it is not a finite number of at least 0."""
        found = self._function(progress)
        if not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise UserError(f"learner.schedule={self.cfg.schedule}: returned {found} at progress {progress:g}; it must "
                            "return a factor of the learning rate, a number of at least 0")
        return float(found)

    @cached_property
    def _function(self) -> ScheduleFn:
        final = self.cfg.final_rate_fraction
        match self.cfg.schedule:
            case "constant":
                return lambda progress: 1.0
            case "linear":
                return lambda progress: 1 - (1 - final) * progress
            case "cosine":
                return lambda progress: final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
        function: ScheduleFn = load_attribute(self.cfg.schedule)
        if not callable(function):
            raise UserError(f"learner.schedule={self.cfg.schedule}: must be a function of the progress from 0 to 1")
        return function


def clip_(gradient: torch.Tensor, norm: float, clip_norm: float) -> None:
    """Scale `gradient` in place if `norm`, that of the full gradient, exceeds `clip_norm`; 0 = no clipping."""
    if 0 < clip_norm < norm:
        gradient.mul_(clip_norm / (norm + 1e-6))


class Optimizer:
    """Updates the vector `weights` in place.

    All rules are elementwise, so slices of a vector with one optimizer each are updated as the
    whole would be, bit by bit on one thread. `param_slices` have their own `ParamGroup`. `shapes`
    say which elements decay; without them all do.
    """

    def __init__(self, cfg: OptimizerConfig, weights: torch.Tensor, param_slices: Sequence[ParamSlice] = (),
                 shapes: Sequence[ParamShape] = ()) -> None:
        self.cfg, self.weights, self.param_slices = cfg, weights, param_slices
        self.steps, self.count = torch.zeros((), device=weights.device), 0
        self.mean, self.square = torch.zeros_like(weights), torch.zeros_like(weights)
        self.rate = LearningRate(cfg)
        self._device_rate = None if self.rate.is_constant else torch.zeros((), device=weights.device)
        self._plans: dict[tuple[bool, ...], OptimizerPlan] = {}
        factor = torch.ones_like(weights)
        for part in param_slices:
            factor[part.span] = part.group.lr_factor
        self._factor = None if bool((factor == 1).all()) else factor
        self._decay: torch.Tensor | None = None  # weight decay per element, times its factor of the learning rate
        if cfg.optimizer == "adamw" and cfg.weight_decay > 0:
            self._decay = factor * cfg.weight_decay
            for each in shapes:
                self._decay[each.span] *= each.decays

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, norm: float) -> None:
        """One step. `norm` is that of the full gradient, of which this may be a slice; clips it in place."""
        clip_(gradient, norm, self.cfg.clip_norm)
        rate = self.rate.at(self.count)
        self.steps += 1
        self.count += 1
        if self.param_slices:
            self._step_groups(gradient, rate)
        else:
            self._decay_weights(slice(None), rate)
            self._update(self.weights, gradient, self.mean, self.square, rate)

    def prepare(self) -> None:
        """Write the learning rate of the next `step_if`, which may be a CUDA graph, to the device.

        The schedule then counts all updates that were started, also those that turn out not to be finite.
        """
        if self._device_rate is not None:
            self._device_rate.fill_(self.rate.at(self.count))
        self.count += 1

    @torch.no_grad()
    def step_if(self, ok: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor,
                bf16_target: tuple[torch.Tensor, torch.Tensor] | None = None) -> bool:
        """The same step without host synchronisation: `norm` and `ok` stay on the device. Call `prepare` before.

        Nothing changes unless `ok`. Groups with a period are not supported. Returns True if the
        weights were also rounded and written to `bf16_target`, the network's weights.
        """
        self.steps += ok
        rate = self.rate.peak if self._device_rate is None else self._device_rate
        if self._decay is not None:
            self.weights.mul_(1 - self._decay * (ok * rate))
        if self._fused_step(ok, gradient, norm, bf16_target):
            return bf16_target is not None
        if self.cfg.clip_norm > 0:
            gradient.mul_((self.cfg.clip_norm / (norm + 1e-6)).clamp(max=1))
        delta = self.weights if self._factor is None else torch.zeros_like(self.weights)
        if self.cfg.optimizer != "rmsprop":
            self._adam(delta, gradient, self.mean, self.square, rate, (~ok).float())
        else:
            saved = [(vector, vector.clone()) for vector in (self.mean, self.square, delta)]
            self._rmsprop(delta, gradient, self.mean, self.square, rate)
            for vector, before in saved:
                vector.copy_(torch.where(ok, vector, before))
        if self._factor is not None:
            self.weights.addcmul_(delta, self._factor)
        return False

    def _fused_step(self, ok: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor,
                    bf16_target: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
        """Clip, step and round at once, where `fused_adam` can; it takes the learning rate as a number."""
        cfg = self.cfg
        if self._factor is not None or cfg.optimizer == "rmsprop" or self._device_rate is not None:
            return False
        state = AdamState(self.weights, self.mean, self.square, self.steps)
        rule = AdamRule(cfg.learning_rate, *BETAS, cfg.optimizer_eps, float(cfg.clip_norm))
        return fused_adam(state, gradient, norm, ok, rule, bf16_target)

    def _step_groups(self, gradient: torch.Tensor, rate: float) -> None:
        """Step with parameter groups.

        Frozen elements are updated with their neighbours and restored: a kernel that started at the
        border of a group would round differently where a slice of the vector contains another part
        of it.
        """
        spans, frozen = self._plan()
        saved = [(each, each[frozen]) for each in (self.weights, self.mean, self.square)] if len(frozen) else []
        for at in spans:
            weights, mean, square = self.weights[at], self.mean[at], self.square[at]
            self._decay_weights(at, rate)
            if self._factor is None:
                self._update(weights, gradient[at], mean, square, rate)
            else:
                delta = torch.zeros_like(weights)
                self._update(delta, gradient[at], mean, square, rate)
                weights.addcmul_(delta, self._factor[at])
        for each, before in saved:
            each[frozen] = before

    def _plan(self) -> OptimizerPlan:
        frozen_groups = tuple(self.count % part.group.period > 0 for part in self.param_slices)
        if frozen_groups not in self._plans:
            groups = zip(self.param_slices, frozen_groups, strict=True)
            spans, frozen = plan_step(len(self.weights), [part.span for part, is_frozen in groups if is_frozen])
            self._plans[frozen_groups] = OptimizerPlan(spans, frozen.to(self.weights.device))
        return self._plans[frozen_groups]

    def _decay_weights(self, at: slice, rate: float) -> None:
        """Decoupled weight decay, Loshchilov & Hutter 2019: w ← w − rate · decay · w, before the step of Adam."""
        if self._decay is not None:
            self.weights[at].mul_(1 - self._decay[at] * rate)

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor,
                rate: float) -> None:
        if self.cfg.optimizer == "rmsprop":
            self._rmsprop(weights, gradient, mean, square, rate)
        else:
            self._adam(weights, gradient, mean, square, rate)

    def _adam(self, weights: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor,
              rate: float | torch.Tensor, skip: torch.Tensor | None = None) -> None:
        """Kingma & Ba 2015, by the kernel of torch.optim.Adam(fused=True) without its bookkeeping."""
        torch._fused_adam_(
            [weights], [gradient], [mean], [square], [], [self.steps], amsgrad=False,
            lr=rate, beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.0, eps=self.cfg.optimizer_eps,
            maximize=False, grad_scale=None, found_inf=skip)

    def _rmsprop(self, weights: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor,
                 rate: float | torch.Tensor) -> None:
        """Centred RMSProp as in Mnih et al. 2015: g / √(E[g²] − E[g]² + ε), with ε = 0.01 there."""
        square.mul_(RMS_DECAY).addcmul_(gradient, gradient, value=1 - RMS_DECAY)
        mean.lerp_(gradient, 1 - RMS_DECAY)
        # Rounding can make the variance of a nearly constant gradient negative, and its root NaN.
        variance = square.addcmul(mean, mean, value=-1).clamp_(min=0)
        scale = variance.add_(self.cfg.optimizer_eps).sqrt_()
        if isinstance(rate, torch.Tensor):
            weights.addcmul_(gradient / scale, rate, value=-1)
        else:
            weights.addcdiv_(gradient, scale, value=-rate)

    def state_dict(self) -> dict[str, Any]:
        """The counters and vectors as long as the weights."""
        return {"steps": self.steps.clone(), "mean": self.mean.clone(), "square": self.square.clone(),
                **self.rate.position(self.count)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps.copy_(state["steps"])
        self.count = saved_count(state)
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])


def saved_count(state: Mapping[str, Any]) -> int:
    """Number of started steps of a saved state: that of the schedule, else of the good updates."""
    return int(state.get("count", state["steps"]))


def vectors_of(state: Mapping[str, Any], size: int) -> dict[str, torch.Tensor]:
    """The entries of an optimizer's state with one value per element of a vector of `size` elements."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.shape == (size,)}
