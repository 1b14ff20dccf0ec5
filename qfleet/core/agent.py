"""Agent: an algorithm as a frozen set of functions, independent of processes, devices and schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from qfleet.core.replay import Sample, Window

Tensors = dict[str, torch.Tensor]
Columns = Mapping[str, tuple[tuple[int, ...], str]]
RowValues = Callable[[Mapping[str, np.ndarray]], np.ndarray]
Memory = Any
"""Recurrent state of N lanes: tensors by name, [N, ...]; None for agents without recurrent state."""

LAST_REWARD = "state.reward"
"""Entry of `Agent.greedy_state` that the caller of an exported policy sets: the reward of the last step."""

ROW_MOMENTS = ("row_count", "row_mean", "row_square")
"""Network buffers (float64) of an agent with `row_values`: the number of rows that all learners have received, and the
mean [K] and the sum of squared deviations [K] of their values."""


@dataclass(frozen=True, eq=False)
class NoiseProcess:
    """Noise on continuous actions: the sum of K independent first-order processes.

    With ξ ~ N(0, 1), component k is x′ = decay_k · x + gain_k · σ · ξ, and start_k · σ · ξ at the
    first step of an episode. All fields are [K], K ≤ `NOISE_COMPONENTS`.
    """

    decay: torch.Tensor
    gain: torch.Tensor
    start: torch.Tensor

    def __post_init__(self) -> None:
        if not 1 <= len(self.decay) <= NOISE_COMPONENTS:
            raise ValueError(f"a NoiseProcess has 1 to {NOISE_COMPONENTS} components, not {len(self.decay)}")

    def to(self, device: torch.device) -> NoiseProcess:
        return NoiseProcess(self.decay.to(device), self.gain.to(device), self.start.to(device))


NOISE_COMPONENTS = 5
"""Components of the action noise in the recurrent state of agents for continuous actions."""


def first_order_noise(theta: float) -> NoiseProcess:
    """x′ = (1 − θ) x + σ ξ from x = 0: white noise for θ = 1."""
    return NoiseProcess(torch.tensor([1 - theta]), torch.ones(1), torch.ones(1))


WHITE_NOISE = first_order_noise(1.0)


@dataclass(frozen=True)
class ExplorationParams:
    """Exploration parameters of N lanes.

    `epsilon` [N] is the probability of a random action. `network_noise` turns on the noise of
    networks that have their own (noisy nets).

    `index` [N] selects one of an agent's `count` policies, for agents with a family of policies;
    None selects the one for evaluation. `count` is 0 if unknown.

    `sigma` [N] is the scale of the noise added to continuous actions, None = no noise. `process`
    defines its correlation in time; the default is white noise.

    `choice` [N] selects the random discrete actions: action ⌊choice · A⌋ of A; None draws them
    uniformly.
    """

    epsilon: torch.Tensor
    network_noise: bool = True
    index: torch.Tensor | None = None
    sigma: torch.Tensor | None = None
    process: NoiseProcess = WHITE_NOISE
    count: int = 0
    choice: torch.Tensor | None = None

    def to(self, device: torch.device) -> ExplorationParams:
        index, sigma, choice = (
            None if x is None else x.to(device) for x in (self.index, self.sigma, self.choice))
        process = self.process if sigma is None else self.process.to(device)
        return replace(
            self, epsilon=self.epsilon.to(device), index=index, sigma=sigma, process=process, choice=choice)


@dataclass(frozen=True)
class RecurrentState:
    """Functions that manage an agent's recurrent state.

    `initial(lanes, device)` returns the state before the first episode, `observe(memory, reward)`
    adds the reward [N] of the last step, and `reset(memory, over)` clears the lanes [N] whose
    episode ended. Keys in `persistent` survive episodes and are checkpointed. Names, shapes and
    dtypes never change. All functions return new tensors, since the old ones may not have been
    stored yet.
    """

    initial: Callable[[int, torch.device], Memory]
    observe: Callable[[Memory, torch.Tensor], Memory]
    reset: Callable[[Memory, torch.Tensor], Memory]
    persistent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Actions [N, ...], the next recurrent state, and `extras`: additional columns of the row.

    `extras` must not be modified afterwards.
    """

    action: torch.Tensor
    memory: Memory = None
    extras: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """Unreduced, unweighted loss [B] and new priorities [B] of a batch.

    `extra` is added to the weighted mean. `buffers` are new values of network buffers (running
    statistics) by name, applied only if the update is applied.
    """

    per_item: torch.Tensor
    priority: torch.Tensor
    extra: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ParamGroup:
    """Optimizer settings of some parameters: `lr_factor` × learning rate, stepped every `period`-th update."""

    lr_factor: float
    period: int = 1


@dataclass(frozen=True)
class Agent:
    """An algorithm: `network()` builds the trained module; `act` and `loss` are pure functions of it.

    `act(net, obs, memory, params, rng) -> Decision`; `loss(net, target, batch, rng) -> Loss`.

    `columns` declares the columns that `Decision.extras` adds to every row: name -> (shape, dtype).

    `priority_inputs` are columns of the same form that are not stored. From these and from reward,
    discount, last and action, `priority(rows) -> [S]` computes the initial priorities of new
    windows; `rows` are [S, T, ...]. Without `priority`, windows start with the largest priority
    seen so far. `evaluate_actions(net, obs, action)` returns the priority inputs that `act` does
    not; it is called only where they are needed.

    `recurrent_state` is set for recurrent agents. `stored_states` are columns of recurrent state
    needed for training. They are stored only at `state_rows`, counted from the start of a window,
    and are [B, M, ...] in a batch.

    `q_values(extras)` returns the values [N, A] of all actions, in units of the return, from the
    extras of a decision; None if an action has no value of its own, as with continuous actions.

    An agent with several `arms` is evaluated with the best one: its network has a buffer `arm`,
    which the evaluator sets to that index. `eval_buffers` names all buffers that the evaluator
    writes. They are saved with the weights, and policies that load the weights start from them;
    buffer `kept.NAME` holds entry NAME of `RecurrentState.persistent`.

    `param_groups` maps prefixes of parameter names to their optimizer settings. `loss_when_frozen`
    is the loss for updates in which all groups with a period are frozen; it omits the terms that
    train only these groups.

    `greedy(net, obs, memory) -> Decision` are the actions without exploration, for export to other
    runtimes: it draws no random numbers, depends on no value of a tensor in Python, and returns the
    values [N, A] of discrete actions as `extras["q"]`. It reads the entries `greedy_state` of the
    recurrent state and returns those that change.

    `row_values(columns)` returns the values [R, K] of the rows of a chunk, columns [R, ...], whose
    moments the learner keeps in the network's buffers `ROW_MOMENTS`. Every row in which an action was
    taken counts once.
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
    greedy: Callable[[nn.Module, Tensors, Memory], Decision] | None = None
    greedy_state: tuple[str, ...] = ()
    q_values: Callable[[Tensors], torch.Tensor] | None = None
    row_values: RowValues | None = None


def epsilon_greedy(q_NA: torch.Tensor, params: ExplorationParams, rng: torch.Generator) -> torch.Tensor:
    """ε-greedy actions [N]: the argmax, or with probability ε a uniformly random action, per lane."""
    lanes, actions = q_NA.shape
    chance = torch.rand(lanes, generator=rng, device=q_NA.device)
    random = torch.randint(actions, (lanes,), generator=rng, device=q_NA.device)
    if params.choice is not None:  # below 1, but float32 rounds up
        random = (params.choice * actions).long().clamp(max=actions - 1)
    return torch.where(chance < params.epsilon, random, q_NA.argmax(1))
