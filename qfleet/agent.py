"""An algorithm as a frozen bundle of functions: it says what to compute, never when or where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qfleet.types import Sample, Window

Tensors = dict[str, torch.Tensor]
Columns = Mapping[str, tuple[tuple[int, ...], str]]
Memory = Any
"""Recurrent state carried from step to step; None for agents that have none."""


@dataclass(frozen=True)
class Arm:
    """What exploration varies: ε [N] per lane, and whether networks that have noise of their own use it."""

    epsilon: torch.Tensor
    noise: bool = True


@dataclass(frozen=True)
class Decision:
    """What to do in every lane, and what to remember of the choice (`extras`: more columns of the row)."""

    action: torch.Tensor
    memory: Memory = None
    extras: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """One number per item, unreduced and unweighted; `priority` [B]; `extra` is added to the weighted mean."""

    per_item: torch.Tensor
    priority: torch.Tensor
    extra: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """`network()` builds the module that is trained; `act` and `loss` are pure in it.

    `act(net, obs, memory, arm, rng) -> Decision`; `loss(net, target, batch, rng) -> Loss`. `columns` declares what
    `Decision.extras` adds to every row: name -> (shape, dtype). `hints` are such columns, too, but never stored: from
    them, and from reward, discount, last and action, `priority(rows) -> [S]` tells an actor how urgent its fresh
    windows are, rows being [S, T, ...]. Without it they begin with the largest priority seen.
    """

    network: Callable[[], nn.Module]
    act: Callable[[nn.Module, Tensors, Memory, Arm, torch.Generator], Decision]
    loss: Callable[[nn.Module, nn.Module, Sample, torch.Generator], Loss]
    window: Window
    columns: Columns = field(default_factory=dict)
    hints: Columns = field(default_factory=dict)
    priority: Callable[[Tensors], torch.Tensor] | None = None


def epsilon_greedy(q_NA: torch.Tensor, arm: Arm, rng: torch.Generator) -> torch.Tensor:
    """The best action, or with probability ε any action, lane by lane: [N]."""
    lanes, actions = q_NA.shape
    chance = torch.rand(lanes, generator=rng, device=q_NA.device)
    random = torch.randint(actions, (lanes,), generator=rng, device=q_NA.device)
    return torch.where(chance < arm.epsilon, random, q_NA.argmax(1))
