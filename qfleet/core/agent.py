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

    Attributes:
        epsilon: Probability of a random action [N].
        network_noise: Turns on the noise of networks that have their own (noisy nets).
        index: Policy of each lane [N], for agents with a family of policies; None = the one for evaluation.
        sigma: Scale of the noise added to continuous actions [N]; None = no noise.
        process: Correlation of that noise in time; white noise by default.
        count: Number of policies of the family; 0 = unknown.
        choice: Selects the random discrete actions [N]: action ⌊choice · A⌋ of A; None draws them uniformly.
    """

    epsilon: torch.Tensor
    network_noise: bool = True
    index: torch.Tensor | None = None
    sigma: torch.Tensor | None = None
    process: NoiseProcess = WHITE_NOISE
    count: int = 0
    choice: torch.Tensor | None = None

    def to(self, device: torch.device) -> ExplorationParams:
        """Copy the parameters to a device.

        Args:
            device: Target device.

        Returns:
            Parameters with tensors on that device.
        """
        index, sigma, choice = (
            None if x is None else x.to(device) for x in (self.index, self.sigma, self.choice))
        process = self.process if sigma is None else self.process.to(device)
        return replace(
            self, epsilon=self.epsilon.to(device), index=index, sigma=sigma, process=process, choice=choice)


@dataclass(frozen=True)
class RecurrentState:
    """Functions that manage an agent's recurrent state.

    Names, shapes and dtypes never change. All functions return new tensors, since the old ones may not have been
    stored yet.

    Attributes:
        initial: `initial(lanes, device)` returns the state before the first episode.
        observe: `observe(memory, reward)` adds the reward [N] of the last step.
        reset: `reset(memory, over)` clears the lanes [N] whose episode ended.
        persistent: Entries that survive episodes and are checkpointed.
    """

    initial: Callable[[int, torch.device], Memory]
    observe: Callable[[Memory, torch.Tensor], Memory]
    reset: Callable[[Memory, torch.Tensor], Memory]
    persistent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Result of `Agent.act`.

    Attributes:
        action: Actions [N, ...].
        memory: Next recurrent state; None for agents without one.
        extras: Additional columns of the row, by name. They must not be modified afterwards.
    """

    action: torch.Tensor
    memory: Memory = None
    extras: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """Result of `Agent.loss`. The learner multiplies it by the importance weights and averages it.

    Attributes:
        per_item: Unreduced, unweighted loss [B].
        priority: New priorities [B].
        extra: Scalar that is added to the weighted mean; None = nothing.
        metrics: Values to log, by tag, averaged over the batch.
        buffers: New values of network buffers (running statistics) by name, applied only if the update is applied.
    """

    per_item: torch.Tensor
    priority: torch.Tensor
    extra: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ParamGroup:
    """Optimizer settings of some parameters.

    Attributes:
        lr_factor: Factor of the learning rate.
        period: The parameters change at every `period`-th update.
    """

    lr_factor: float
    period: int = 1


@dataclass(frozen=True)
class Agent:
    """An algorithm. `act` and `loss` are pure functions of the network.

    Attributes:
        network: `network()` builds the trained module.
        act: `act(net, obs, memory, params, rng) -> Decision` chooses actions.
        loss: `loss(net, target, batch, rng) -> Loss`; `target` is the target network.
        window: Rows of one training item.
        columns: Columns that `Decision.extras` adds to every row: name -> (shape, dtype).
        priority_inputs: Columns of the same form from which `priority` is computed. They are not stored.
        priority: `priority(rows) -> [S]` computes the initial priorities of new windows from `priority_inputs`,
            reward, discount, last and action; `rows` are [S, T, ...]. None = the largest priority seen so far.
        evaluate_actions: `evaluate_actions(net, obs, action)` returns the priority inputs that `act` does not. It is
            called only where they are needed.
        recurrent_state: Functions of the recurrent state, for recurrent agents.
        stored_states: Columns of recurrent state needed for training. They are stored only at `state_rows`, and are
            [B, M, ...] in a batch.
        state_rows: Rows of `stored_states`, counted from the start of a window.
        arms: Number of policies of the family. With several, the evaluator sets the network's buffer `arm` to the
            best one.
        eval_buffers: Network buffers that the evaluator writes. They are saved with the weights, and policies that
            load the weights start from them; buffer `kept.NAME` holds entry NAME of `RecurrentState.persistent`.
        param_groups: Prefix of parameter names -> optimizer settings of these parameters.
        loss_when_frozen: Loss for updates in which all groups with a period are frozen. It omits the terms that train
            only these groups.
        greedy: `greedy(net, obs, memory) -> Decision` are the actions without exploration, for export to other
            runtimes. It draws no random numbers, depends on no value of a tensor in Python, and returns the values
            [N, A] of discrete actions as `extras["q"]`.
        greedy_state: Entries of the recurrent state that `greedy` reads. It returns those that change.
        q_values: `q_values(extras)` returns the values [N, A] of all actions, in units of the return, from the extras
            of a decision; None if an action has no value of its own, as with continuous actions.
        row_values: `row_values(columns)` returns the values [R, K] of the rows of a chunk, columns [R, ...]. The
            learner keeps their moments in the network buffers `ROW_MOMENTS`. Every row in which an action was taken
            counts once.
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
    """ε-greedy actions: the argmax, or with probability ε a random action, per lane.

    Args:
        q_NA: Values of all actions [N, A].
        params: Exploration parameters; `epsilon` and `choice` are used.
        rng: Generator of the random draws.

    Returns:
        Actions [N].

    Examples:
        >>> q = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
        >>> epsilon_greedy(q, ExplorationParams(torch.zeros(2)), torch.Generator())
        tensor([1, 0])
    """
    lanes, actions = q_NA.shape
    chance = torch.rand(lanes, generator=rng, device=q_NA.device)
    random = torch.randint(actions, (lanes,), generator=rng, device=q_NA.device)
    if params.choice is not None:  # below 1, but float32 rounds up
        random = (params.choice * actions).long().clamp(max=actions - 1)
    return torch.where(chance < params.epsilon, random, q_NA.argmax(1))
