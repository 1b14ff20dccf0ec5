"""Optimizers given as `module:attribute`: any torch.optim.Optimizer, such as `torch.optim:NAdam` or the user's own.

It gets the network's parameters, as views of the vector or of a slice of it. The step runs operation by operation.
Its state is saved as vectors with one value per element if it consists of such values and of numbers, and can then be
divided among shards and ranks; other state is saved as torch does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qfleet.config import load_attribute
from qfleet.core.agent import ParamGroup
from qfleet.core.errors import UserError
from qfleet.core.tracebacks import first_line
from qfleet.optim.optimizer import LearningRate, Optimizer, ParamShape, ParamSlice, clip_, saved_count
from qfleet.optim.optimizer_config import OptimizerConfig

PREFIX, PRESENT, STATE = "optimizer.", "optimizer.present", "optimizer.state"
"""Names in a saved state: prefix of its vectors; 1 for elements that have a state, else 0; and state saved by torch."""

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class StateKind:
    """Kind of one entry of a parameter's state: one value per element or a single one, as a tensor or a number."""

    per_element: bool
    kind: torch.dtype | type

    @property
    def saved_as(self) -> torch.dtype:
        """A float type that holds the values exactly, integers up to 2^53."""
        narrow = (bool, torch.bool, torch.float32, torch.float16, torch.bfloat16)
        return torch.float32 if self.kind in narrow else torch.float64

    def restore(self, values: torch.Tensor, shape: Sequence[int]) -> Any:
        if not isinstance(self.kind, torch.dtype):
            return self.kind(values[0].item())
        return (values.view(list(shape)) if self.per_element else values[0]).to(self.kind)


class TorchOptimizer:
    """Updates the vector `weights` in place by a torch.optim.Optimizer; the interface is that of `Optimizer`.

    A parameter that lies in `weights` as a whole has its shape; of one at the border of a slice the part is a vector.
    `divided`: other slices of the vector have optimizers of their own.
    """

    def __init__(self, cfg: OptimizerConfig, weights: torch.Tensor, param_slices: Sequence[ParamSlice] = (),
                 shapes: Sequence[ParamShape] = (), divided: bool = False) -> None:
        self.cfg, self.weights, self.divided, self.count = cfg, weights, divided, 0
        self.rate, self.kinds = LearningRate(cfg), state_kinds(cfg)
        if divided and self.kinds is None:
            raise UserError(_not_divisible(cfg))
        shapes = shapes or [ParamShape(slice(0, len(weights)), (len(weights),))]
        grouped: dict[ParamGroup, list[ParamShape]] = {}
        for each in shapes:
            if each.trained and each.span.stop > each.span.start:
                grouped.setdefault(_group_of(each, param_slices), []).append(each)
        self.shapes = [each for members in grouped.values() for each in members]  # in the order of torch's state
        self.parameters = [nn.Parameter(weights[each.span].view(each.shape)) for each in self.shapes]
        self.param_groups = list(grouped)
        rest = iter(self.parameters)
        groups = [{"params": [next(rest) for _ in members]} for members in grouped.values()]
        self.optimizer = _build(cfg, groups) if groups else None

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, norm: float) -> None:
        """One step. `norm` is that of the full gradient, of which this may be a slice; clips it in place."""
        clip_(gradient, norm, self.cfg.clip_norm)
        rate = self.rate.at(self.count)
        self.count += 1
        if self.optimizer is None:
            return
        for shape, parameter in zip(self.shapes, self.parameters, strict=True):
            parameter.grad = gradient[shape.span].view(shape.shape)
        for options, group in zip(self.optimizer.param_groups, self.param_groups, strict=True):
            options["lr"] = rate * group.lr_factor
            for parameter in options["params"] if self.count % group.period else ():
                parameter.grad = None
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The counters, and vectors as long as the weights if the state is elementwise."""
        state: dict[str, Any] = {"steps": torch.tensor(float(self.count)), **self.rate.position(self.count)}
        if self.optimizer is not None and (self.kinds is None or not self._is_as_in_trial(self.kinds)):
            if self.divided:
                raise UserError(_not_divisible(self.cfg))
            return state | {STATE: self.optimizer.state_dict()}
        kinds = self.kinds or {}
        state[PRESENT] = torch.zeros_like(self.weights)
        state |= {PREFIX + name: torch.zeros_like(self.weights, dtype=kind.saved_as)
                  for name, kind in kinds.items()}
        for shape, parameter in zip(self.shapes, self.parameters, strict=True):
            held = {} if self.optimizer is None else self.optimizer.state.get(parameter, {})
            state[PRESENT][shape.span] = float(bool(held))
            for name in kinds if held else ():
                value = held[name]
                state[PREFIX + name][shape.span] = value.reshape(-1) if isinstance(value, torch.Tensor) else value
        return state

    def _is_as_in_trial(self, kinds: Mapping[str, StateKind]) -> bool:
        """True if parameters have the entries of the trial step; an optimizer may add others later."""
        assert self.optimizer is not None
        names = [{name for name, value in held.items() if value is not None} for held in self.optimizer.state.values()]
        return all(found == kinds.keys() for found in names if found)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = saved_count(state)
        if self.optimizer is None:
            return
        if STATE in state or self.kinds is None:
            self.optimizer.load_state_dict(state[STATE])
            return
        present = state[PRESENT]
        held = {index: {name: kind.restore(state[PREFIX + name][shape.span].clone(), shape.shape)
                        for name, kind in self.kinds.items()}
                for index, shape in enumerate(self.shapes) if present[shape.span.start]}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": held})


AnyOptimizer = Optimizer | TorchOptimizer


def make_optimizer(cfg: OptimizerConfig, weights: torch.Tensor, param_slices: Sequence[ParamSlice] = (),
                   shapes: Sequence[ParamShape] = (), divided: bool = False) -> AnyOptimizer:
    """The optimizer of a config for a vector; `divided` if it is one of several slices of the parameters."""
    if cfg.has_own_optimizer:
        return TorchOptimizer(cfg, weights, param_slices, shapes, divided)
    return Optimizer(cfg, weights, param_slices, shapes)


def check_optimizer(cfg: OptimizerConfig, divided: bool) -> None:
    """Raise UserError if optimizer or schedule cannot be used; `divided`: each optimizer has a slice of the vector."""
    rate = LearningRate(cfg)
    for progress in (0.0, 0.5, 1.0):
        rate.factor(progress)
    if cfg.has_own_optimizer and state_kinds(cfg) is None and divided:
        raise UserError(_not_divisible(cfg))


def state_kinds(cfg: OptimizerConfig) -> dict[str, StateKind] | None:
    """Entries of the state per parameter, found by trial steps; None if they are not elementwise.

    Raises:
        UserError: The optimizer cannot be made, or cannot make a step with a gradient alone.
    """
    parameters = [nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3)), nn.Parameter(torch.ones(3))]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        optimizer = _build(cfg, [{"params": [each]} for each in parameters])
        before = _hyperparameters(optimizer)
        try:
            for each in parameters:
                each.grad = torch.full_like(each, 0.5)
            optimizer.step()
        except Exception as error:
            raise UserError(f"{_name(cfg)} fails in a trial step with {first_line(error)}; qfleet calls step() with "
                            "dense gradients and without a closure") from error
    if _hyperparameters(optimizer) != before:
        return None  # values that belong to all parameters together
    kinds: dict[str, StateKind] = {}
    for each in parameters:
        for name, value in optimizer.state[each].items():
            kind = _kind(value, each.shape)
            if value is not None and (kind is None or kinds.setdefault(name, kind) != kind):
                return None
    return kinds


def _kind(value: Any, shape: torch.Size) -> StateKind | None:
    if isinstance(value, bool | int | float):
        return StateKind(False, type(value))
    if not isinstance(value, torch.Tensor) or value.is_complex() or (value.shape != shape and value.ndim > 0):
        return None
    return StateKind(value.shape == shape, value.dtype)


def _build(cfg: OptimizerConfig, groups: Groups) -> torch.optim.Optimizer:
    found = load_attribute(cfg.optimizer)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"{_name(cfg)}: must be a class derived from torch.optim.Optimizer")
    if "lr" in cfg.optimizer_options:
        raise UserError("learner.optimizer_options: lr is learner.learning_rate; set that instead")
    make: Any = found
    try:
        optimizer: torch.optim.Optimizer = make(groups, lr=cfg.learning_rate, **cfg.optimizer_options)
    except Exception as error:
        raise UserError(f"{_name(cfg)} cannot be made with learner.learning_rate and learner.optimizer_options: "
                        f"{first_line(error)}") from error
    return optimizer


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Values of the parameter groups, as text: they may be tensors."""
    return [{name: str(value) for name, value in group.items() if name not in ("params", "lr")}
            for group in optimizer.param_groups]


def _group_of(shape: ParamShape, param_slices: Sequence[ParamSlice]) -> ParamGroup:
    """The settings of a parameter; of several groups the last."""
    found = [part.group for part in param_slices
             if part.span.start <= shape.span.start and shape.span.stop <= part.span.stop]
    return found[-1] if found else ParamGroup(1.0)


def _not_divisible(cfg: OptimizerConfig) -> str:
    return (f"{_name(cfg)} keeps values that belong to more than one parameter element, so it cannot be divided among "
            "shards or ranks: use sync=none, or sync=allreduce with allreduce.shard_optimizer=false")


def _name(cfg: OptimizerConfig) -> str:
    return f"learner.optimizer={cfg.optimizer}"

