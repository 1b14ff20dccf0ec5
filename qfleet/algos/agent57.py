"""Agent57 (Badia et al. 2020b): NGU with separate value networks, longer horizons and a bandit over its arms.

Differences from NGU: extrinsic and intrinsic returns are learned by separate networks, each from its own reward, and
arm j acts on Q_e + β_j Q_i; discounts reach up to 0.9999; and the arm of each episode is chosen by a bandit
(`explore.kind=bandit`).
Shapes: B items, N lanes, T rows of a window, U trained rows, A actions.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from qfleet.algos import ngu, r2d2
from qfleet.algos.curiosity import CuriosityConfig, inactive_options
from qfleet.algos.value_based import reject_unused_options
from qfleet.config import Fraction
from qfleet.core.agent import Agent, Decision, ExplorationParams, Loss, Memory, RecurrentState, Tensors, epsilon_greedy
from qfleet.core.env import EnvSpec
from qfleet.core.replay import Sample, Window
from qfleet.maths.policy_family import MixtureTable, agent57_gammas, betas
from qfleet.maths.sequences import masked_mean, mixed_priority
from qfleet.maths.value_rescaling import h, h_inverse

INTRINSIC_STATE = {"state.h": "second.h", "state.c": "second.c"}
"""LSTM state names of the extrinsic network -> those of the intrinsic network."""


class Config(CuriosityConfig, r2d2.Config):
    """Agent section for Agent57."""

    algo: Literal["agent57"] = Field(  # type: ignore[assignment]
        "agent57", description="algorithm, by name; changing it resets the recipe's other agent keys")
    gamma: Fraction = Field(0.9999, description="discount factor of arm 0")
    gamma_middle: Fraction = Field(0.997, description="discount factor of arm 7; later arms fall from it to gamma_min")
    gamma_min: Fraction = Field(0.99, description="discount factor of the last arm")

    def inactive(self) -> dict[str, str]:
        few = {} if self.arms >= 10 else {"gamma_middle": "with agent.arms below 10"}
        return inactive_options(self, super().inactive()) | few

    @property
    def window(self) -> Window:
        return Window(future=self.n_step) if self.memory == "none" else super().window


class Network(nn.Module):
    """Two value networks, the curiosity networks, and the best arm (`arm`, written by an evaluator)."""

    def __init__(self, cfg: Config, spec: EnvSpec) -> None:
        super().__init__()
        self.extrinsic = ngu.value_network(cfg, spec)
        self.intrinsic = ngu.value_network(cfg, spec)
        self.curiosity = ngu.make_curiosity(cfg, spec)
        self.kept = ngu.make_eval_buffers()
        self.register_buffer("arm", torch.zeros((), dtype=torch.int64))


class PolicyFamily:
    """β and γ of every arm, and the mixture of both networks' values."""

    def __init__(self, cfg: Config) -> None:
        self.rescale = cfg.rescale
        self.beta = MixtureTable(betas(cfg.arms, cfg.beta))
        self.gamma = MixtureTable(agent57_gammas(cfg.arms, cfg.gamma, cfg.gamma_middle, cfg.gamma_min))

    def mix(self, extrinsic: torch.Tensor, intrinsic: torch.Tensor, arm: torch.Tensor) -> torch.Tensor:
        """h(h⁻¹(Q_e) + β_j h⁻¹(Q_i)); `arm` [B] belongs to the first axis."""
        beta = self.beta.at(arm, extrinsic).view(-1, *[1] * (extrinsic.ndim - 1))
        if not self.rescale:
            return extrinsic + beta * intrinsic
        return h(h_inverse(extrinsic) + beta * h_inverse(intrinsic))

    def q_values(self, extras: Tensors) -> torch.Tensor:
        """Mixed values [N, A] of a decision, in units of the return."""
        mixed = self.mix(extras["q_e"], extras["q_i"], extras["arm"].long())
        return h_inverse(mixed) if self.rescale else mixed


def make_recurrent_state(cfg: Config, spec: EnvSpec) -> RecurrentState:
    """NGU's recurrent state plus the LSTM state of the intrinsic network."""
    first = ngu.make_recurrent_state(cfg, spec)

    def initial(lanes: int, device: torch.device) -> Memory:
        memory = first.initial(lanes, device)
        return memory | {own: memory[name].clone() for name, own in INTRINSIC_STATE.items() if name in memory}

    def reset(memory: Memory, over: torch.Tensor) -> Memory:
        episodic = {own: memory[own] for own in INTRINSIC_STATE.values() if own in memory}
        return first.reset(memory, over) | r2d2.reset_lanes(episodic, over)

    return RecurrentState(initial, first.observe, reset, first.persistent)


def with_intrinsic_state(tensors: Tensors) -> Tensors:
    """The same tensors, with the intrinsic network's LSTM state under the names that `r2d2` reads."""
    return tensors | {name: tensors[own] for name, own in INTRINSIC_STATE.items() if own in tensors}


def act(
    net: nn.Module, obs: Tensors, memory: Memory, explore: ExplorationParams, rng: torch.Generator, *,
    cfg: Config, family: PolicyFamily, actions: int) -> Decision:
    """Compute the intrinsic reward, then act on the mixture of the lane's arm; without an arm, of the best one."""
    bonus, after = ngu.intrinsic_reward(net.get_submodule("curiosity"), obs, memory, cfg)
    index = net.get_buffer("arm").expand(len(bonus)) if explore.index is None else explore.index
    states = {name: memory[name] for name in (*r2d2.STATE_DTYPES, *INTRINSIC_STATE.values()) if name in memory}
    last_step = r2d2.last_action_reward(states["state.action"], states["state.reward"], actions) if states else None
    side = ngu.side_inputs(cfg, last_step, bonus, index)
    q_e, state = ngu.step_q_values(net.get_submodule("extrinsic"), obs, side, memory, cfg)
    q_i, other = ngu.step_q_values(net.get_submodule("intrinsic"), obs, side, with_intrinsic_state(memory), cfg)
    mixed = family.mix(q_e, q_i, index)
    action = epsilon_greedy(mixed, explore, rng)
    if states:
        after |= (
            state
            | {INTRINSIC_STATE[name]: value for name, value in other.items()}
            | {"state.action": (action + 1).int()}
        )
    return Decision(action, after, states | {"q_e": q_e, "q_i": q_i, "bonus": bonus, "arm": index.int(),
                                             "mu": ngu.behaviour_probability(mixed, action, explore)})


def greedy(
    net: nn.Module, obs: Tensors, memory: Memory, *, cfg: Config, family: PolicyFamily, actions: int
) -> Decision:
    """Act as the best arm without exploration; the caller sets the reward in the next state."""
    side, index, after = ngu.greedy_inputs(net, obs, memory, net.get_buffer("arm"), cfg, actions)
    q_e, state = ngu.step_q_values(net.get_submodule("extrinsic"), obs, side, memory, cfg)
    q_i, other = ngu.step_q_values(net.get_submodule("intrinsic"), obs, side, with_intrinsic_state(memory), cfg)
    mixed = family.mix(q_e, q_i, index)
    action = mixed.argmax(1)
    if state:
        after |= state | {INTRINSIC_STATE[name]: value for name, value in other.items()}
        after["state.action"] = (action + 1).int()
    return Decision(action, after, {"q": r2d2.in_return_units(mixed, cfg)})


ExtrinsicIntrinsic = tuple[torch.Tensor, torch.Tensor]
"""Tensors of the extrinsic and of the intrinsic network."""


def window_q_values(net: nn.Module, batch: Sample, cfg: Config, actions: int) -> ExtrinsicIntrinsic:
    """q [B, U + n, A] of both networks from the first trained row on."""
    inner = dataclasses.replace(batch, rows=with_intrinsic_state(batch.rows))
    return (ngu.window_q_values(net.get_submodule("extrinsic"), batch, cfg, actions),
            ngu.window_q_values(net.get_submodule("intrinsic"), inner, cfg, actions))


def td_losses(
    rows: Tensors, q: ExtrinsicIntrinsic, target: ExtrinsicIntrinsic, selector: ExtrinsicIntrinsic,
    cfg: Config, family: PolicyFamily) -> tuple[ExtrinsicIntrinsic, torch.Tensor]:
    """Losses [B, U] of both networks, and |δ_e| + β_j |δ_i| [B, U]; greedy actions are those of the mixture."""
    arm = rows["arm"][:, cfg.burn_in].long()
    best, gamma = family.mix(*selector, arm).argmax(2), family.gamma.at(arm, q[0]).unsqueeze(1)
    losses, errors = [], []
    for values, q_target, reward in zip(q, target, (rows["reward"], ngu.next_intrinsic_reward(rows)), strict=True):
        with torch.no_grad():
            y = ngu.make_targets(rows | {"reward": reward}, q_target, best, cfg, gamma)
        q_t = r2d2.q_of_actions(rows, values, cfg)
        losses.append(r2d2.td_loss(q_t, y, cfg))
        errors.append((y - q_t.detach()).abs())
    return (losses[0], losses[1]), errors[0] + family.beta.at(arm, q[0]).unsqueeze(1) * errors[1]


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the Agent57 agent."""
    reject_unused_options(cfg, spec)
    window, family = cfg.window, PolicyFamily(cfg)
    if cfg.memory == "none":
        cfg = cfg.model_copy(update={"burn_in": 0, "unroll": 1})

    def loss(net: nn.Module, target: nn.Module, batch: Sample, rng: torch.Generator) -> Loss:
        batch = ngu.relabel_arms(batch, cfg, rng)
        rows, trained = batch.rows, r2d2.trained_mask(batch.rows, cfg)
        q = window_q_values(net, batch, cfg, spec.num_actions)
        with torch.no_grad():
            q_target = window_q_values(target, batch, cfg, spec.num_actions)
        selector = (q[0].detach(), q[1].detach()) if cfg.double else q_target
        (extrinsic, intrinsic), td_abs = td_losses(rows, q, q_target, selector, cfg, family)
        priority = mixed_priority(td_abs, trained, cfg.eta)
        extra, metrics, buffers = ngu.curiosity_loss(net.get_submodule("curiosity"), batch, cfg, rng)
        metrics |= {"train/q_mean": masked_mean(r2d2.q_of_actions(rows, q[0].detach(), cfg), trained),
                    "train/td_abs": masked_mean(td_abs, trained), "train/intrinsic_reward": rows["bonus"].mean(),
                    "train/priority": priority}
        per_item = ((extrinsic + intrinsic) * trained).sum(1) / cfg.unroll
        return Loss(per_item, priority, extra, metrics, buffers)

    def priority(rows: Tensors) -> torch.Tensor:
        q = rows["q_e"][:, cfg.burn_in:], rows["q_i"][:, cfg.burn_in:]
        return mixed_priority(td_losses(rows, q, q, q, cfg, family)[1], r2d2.trained_mask(rows, cfg), cfg.eta)

    q_column = ((spec.num_actions,), "float32")
    states = r2d2.state_columns(cfg.units) if cfg.memory == "lstm" else {}
    return Agent(
        network=lambda: Network(cfg, spec),
        act=partial(act, cfg=cfg, family=family, actions=spec.num_actions), loss=loss, window=window,
        columns=ngu.stored_columns(cfg), priority_inputs={"q_e": q_column, "q_i": q_column}, priority=priority,
        recurrent_state=make_recurrent_state(cfg, spec), arms=cfg.arms,
        eval_buffers=("arm", *ngu.EVAL_BUFFERS),
        stored_states=states | {own: states[name] for name, own in INTRINSIC_STATE.items() if name in states},
        q_values=family.q_values, greedy=partial(greedy, cfg=cfg, family=family, actions=spec.num_actions),
        greedy_state=(*ngu.greedy_state(cfg), *(INTRINSIC_STATE.values() if states else ())))
