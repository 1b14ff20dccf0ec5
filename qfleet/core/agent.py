"""An algorithm as a frozen bundle of functions: it says what to compute, never when or where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qfleet.core.replay import Sample, Window

Tensors = dict[str, torch.Tensor]
Columns = Mapping[str, tuple[tuple[int, ...], str]]
Memory = Any
"""What is carried from step to step, tensors by name, [N, ...]; None for agents that carry nothing."""


@dataclass(frozen=True)
class ExplorationParams:
    """What exploration varies per lane: [N] tensors, and whether networks that have noise of their own use it.

    `index` says which of an agent's `count` policies to follow, where it has a family of them; None = the one to win
    with. A count of 0 is not known.
    `sigma` is the size of the noise that is added to continuous actions, None = none; from step to step the part
    1 − `theta` of it is kept, so that 1 is white noise.
    """

    epsilon: torch.Tensor
    network_noise: bool = True
    index: torch.Tensor | None = None
    sigma: torch.Tensor | None = None
    theta: float = 1.0
    count: int = 0

    def to(self, device: torch.device) -> ExplorationParams:
        index = None if self.index is None else self.index.to(device)
        sigma = None if self.sigma is None else self.sigma.to(device)
        return ExplorationParams(self.epsilon.to(device), self.network_noise, index, sigma, self.theta, self.count)


@dataclass(frozen=True)
class RecurrentState:
    """How an agent remembers: `begin(lanes, device)` before the first episode, `observe(memory, reward)` what a step
    brought [N], `forget(memory, over)` in the lanes [N] whose episode is over. `kept` names what outlives episodes and
    belongs into a checkpoint. A memory has the same names, shapes and dtypes from first to last. All return new
    tensors: those of before may still be waiting to be stored."""

    initial: Callable[[int, torch.device], Memory]
    observe: Callable[[Memory, torch.Tensor], Memory]
    reset: Callable[[Memory, torch.Tensor], Memory]
    persistent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What to do in every lane, and what to remember of the choice (`extras`: more columns of the row, which must not
    be written to afterwards)."""

    action: torch.Tensor
    memory: Memory = None
    extras: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """One number per item, unreduced and unweighted; `priority` [B]; `extra` is added to the weighted mean. `buffers`
    are what running figures of the network become, by name, if the update is made."""

    per_item: torch.Tensor
    priority: torch.Tensor
    extra: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ParamGroup:
    """How a part of a network moves: by `factor` times the learning rate, and in every `period`-th update only."""

    lr_factor: float
    period: int = 1


@dataclass(frozen=True)
class Agent:
    """`network()` builds the module that is trained; `act` and `loss` are pure in it.

    `act(net, obs, memory, arm, rng) -> Decision`; `loss(net, target, batch, rng) -> Loss`. `columns` declares what
    `Decision.extras` adds to every row: name -> (shape, dtype). `hints` are such columns, too, but never stored: from
    them, and from reward, discount, last and action, `priority(rows) -> [S]` tells an actor how urgent its fresh
    windows are, rows being [S, T, ...]. Without it they begin with the largest priority seen. Hints that a choice does
    not bring along are told by `appraise(net, obs, action) -> hints`, which is asked where they are wanted only.

    An agent with `recall` has a memory. What it must know of it to train is in `states`, such columns, too, but stored
    at `marks` only, rows counted from the start of a window: [B, M, ...] in a batch. An agent with several `arms` is
    judged by the best of them: its network has a buffer `arm`, in which an evaluator writes which one that is.
    `notes` names all buffers that an evaluator writes: they are saved with the weights, and policies that load them
    begin with what is there, `kept.NAME` being what `Recall.kept` has as NAME.
    `rates` are those of parameters whose names begin so, where they are not to move like all others; `rested` is the
    loss for updates in which all of them that have a period rest, without what moves nothing else.
    """

    network: Callable[[], nn.Module]
    act: Callable[[nn.Module, Tensors, Memory, ExplorationParams, torch.Generator], Decision]
    loss: Callable[[nn.Module, nn.Module, Sample, torch.Generator], Loss]
    window: Window
    columns: Columns = field(default_factory=dict)
    priority_inputs: Columns = field(default_factory=dict)
    priority: Callable[[Tensors], torch.Tensor] | None = None
    evaluate_actions: Callable[[nn.Module, Tensors, torch.Tensor], Tensors] | None = None
    recurrent_state: RecurrentState | None = None
    stored_states: Columns = field(default_factory=dict)
    state_rows: tuple[int, ...] = (0,)
    arms: int = 1
    eval_buffers: tuple[str, ...] = ()
    param_groups: Mapping[str, ParamGroup] = field(default_factory=dict)
    loss_when_frozen: Callable[[nn.Module, nn.Module, Sample, torch.Generator], Loss] | None = None


def epsilon_greedy(q_NA: torch.Tensor, arm: ExplorationParams, rng: torch.Generator) -> torch.Tensor:
    """The best action, or with probability ε any action, lane by lane: [N]."""
    lanes, actions = q_NA.shape
    chance = torch.rand(lanes, generator=rng, device=q_NA.device)
    random = torch.randint(actions, (lanes,), generator=rng, device=q_NA.device)
    return torch.where(chance < arm.epsilon, random, q_NA.argmax(1))
