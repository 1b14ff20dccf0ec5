"""R2D2 (Kapturowski et al. 2019): recurrent DQN trained on replayed sequences.

Differences from DQN: an LSTM between torso and head, which also receives the last action and reward; sequences start
from the actor's recurrent state (stored state), refreshed over some rows that are not trained on (burn-in); n-step
double Q-learning at every row, values rescaled by h; and a priority of η max |δ| + (1 − η) mean |δ|.
Shapes: B items, N lanes, T rows of a window, U trained rows, A actions, H units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from qfleet.algos.value_based import inactive_encoder_options, reject_unused_options, unused_options
from qfleet.config import Config as Section
from qfleet.config import Count, Fraction, Positive, PositiveCount
from qfleet.core.agent import Agent, Decision, ExplorationParams, Loss, Memory, RecurrentState, Tensors, epsilon_greedy
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample, Window
from qfleet.maths.bellman import huber, n_step, squared
from qfleet.maths.sequences import drift, masked_mean, mixed_priority, previous, real_rows
from qfleet.maths.value_rescaling import h, h_inverse
from qfleet.networks import recurrent
from qfleet.networks.custom_encoder import EncoderName, EncoderOptions
from qfleet.networks.encoder import encoder_factory
from qfleet.networks.heads import MLP, DuelingHead, Head
from qfleet.networks.norms import Norm
from qfleet.networks.torsos import Torso


class Config(Section):
    """Agent section for R2D2."""

    algo: Literal["r2d2"] = Field(
        "r2d2", description="algorithm, by name; changing it resets the recipe's other agent keys")
    gamma: Fraction = Field(0.997, description="discount factor per step")
    n_step: PositiveCount = Field(5, description="n of n-step returns: rewards summed before bootstrapping, steps")
    burn_in: Count = Field(40, description="steps at the start of a sequence that only warm up the recurrent state")
    unroll: PositiveCount = Field(80, description="trained steps per sequence")
    stride: PositiveCount = Field(
        40, description="steps between the starts of consecutive sequences, at most agent.unroll")
    state: Literal["stored", "zero"] = Field(
        "stored", description="recurrent state at the start of a sequence: stored (the actor's) or zero")
    eta: Fraction = Field(
        0.9, description="η of the sequence priority: weight of the largest absolute TD error; the mean has 1 − η")
    double: bool = Field(
        True, description="double Q-learning: the online network selects the bootstrap action, the target network "
                          "evaluates it")
    dueling: bool = Field(True, description="dueling network: separate streams for state value and advantages")
    loss: Literal["huber", "mse"] = Field("mse", description="loss of the TD error: huber, or mse (squared error)")
    huber_delta: Positive = Field(1.0, description="absolute TD error above which the Huber loss is linear")
    rescale: bool = Field(
        True, description="value rescaling: learn h(return) instead of the return; for large rewards that are not "
                          "clipped")
    measure_drift: bool = Field(
        False, description="log ΔQ, the effect of stale recurrent states on Q; stores three states per sequence")
    encoder: EncoderName = "auto"
    encoder_kwargs: EncoderOptions = Field(default_factory=dict)
    torso: Torso = "auto"
    features: tuple[PositiveCount, ...] = Field((512,), description="widths of the dense layers before the LSTM")
    units: PositiveCount = Field(512, description="hidden units of the LSTM")
    hidden: tuple[PositiveCount, ...] = Field((512,), description="widths of the dense layers after the LSTM")
    norm: Norm = Field(
        "none", description="normalisation before each ReLU: none, group (GroupNorm, convolutions only) or layer "
                            "(LayerNorm)")

    def inactive(self) -> dict[str, str]:
        idle = {"huber_delta": "with agent.loss=mse"} if self.loss == "mse" else {}
        return idle | inactive_encoder_options(self)

    def unused_for(self, spec: EnvSpec) -> dict[str, str]:
        return unused_options(self, spec)

    @property
    def window(self) -> Window:
        if self.stride > self.unroll:
            raise UserError(f"agent.stride={self.stride} exceeds agent.unroll={self.unroll}: steps between "
                            "sequences would never be trained on; lower agent.stride")
        return Window(past=self.burn_in, unroll=self.unroll, future=self.n_step, stride=self.stride)


class Network(nn.Module):
    """Sequences of observations and side inputs `side` [B, T, ...] -> q [B, T, A]."""

    def __init__(self, cfg: Config, spec: EnvSpec, side: int) -> None:
        super().__init__()
        self.encoder = encoder_factory(cfg)(spec.observation)
        self.features = MLP(self.encoder.features, cfg.features, cfg.norm)
        width = cfg.features[-1] if cfg.features else self.encoder.features
        self.memory = recurrent.LSTMCore(width + side, cfg.units)
        self.head = (DuelingHead if cfg.dueling else Head)(cfg.units, cfg.hidden, (spec.num_actions,), cfg.norm)

    def forward(self, obs: Mapping[str, torch.Tensor], side: torch.Tensor, real_BT: torch.Tensor,
                state: recurrent.LSTMState) -> tuple[torch.Tensor, recurrent.LSTMState]:
        dtype, shape = self.head.dtype, real_BT.shape
        seen = self.features(self.encoder({name: leaf.flatten(0, 1) for name, leaf in obs.items()}, dtype))
        out, state = self.memory(torch.cat([seen.view(*shape, -1), side.to(dtype)], 2), real_BT, state)
        return self.head(out.flatten(0, 1)).view(*shape, -1), state


def last_action_reward(action: torch.Tensor, reward: torch.Tensor, actions: int) -> torch.Tensor:
    """Side input [..., A + 1] of a row: the previous action (0 = none, else a + 1), one-hot, and its reward.

    Actions are clamped: stored states may come from other hosts, and an invalid one must not crash the learner.
    """
    known = action.long().clamp(0, actions)
    return torch.cat([F.one_hot(known, actions + 1)[..., 1:], reward.unsqueeze(-1)], -1)


STATE_DTYPES = {"state.h": "float32", "state.c": "float32", "state.action": "int32", "state.reward": "float32"}
"""Recurrent state of an actor, and initial state of a sequence: zeros at the start of an episode."""


def state_columns(units: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: ((units,) if name in ("state.h", "state.c") else (), dtype) for name, dtype in STATE_DTYPES.items()}


def make_recurrent_state(units: int) -> RecurrentState:
    """Recurrent state that is reset entirely at the end of an episode."""

    def initial(lanes: int, device: torch.device) -> Memory:
        return {name: torch.zeros(lanes, *shape, dtype=getattr(torch, dtype), device=device)
                for name, (shape, dtype) in state_columns(units).items()}

    return RecurrentState(initial, lambda memory, reward: memory | {"state.reward": reward}, reset_lanes)


def reset_lanes(memory: Memory, over: torch.Tensor) -> Memory:
    """Zero the state in the lanes [N] whose episode is over."""
    return {name: torch.where(over.view(-1, *[1] * (value.ndim - 1)), 0, value) for name, value in memory.items()}


def single_step(net: nn.Module, obs: Tensors, side: torch.Tensor, memory: Memory) -> tuple[torch.Tensor, Tensors]:
    """q [N, A] of one row per lane, and the LSTM state after it."""
    row = {name: leaf.unsqueeze(1) for name, leaf in obs.items()}
    real = torch.ones_like(side[:, :1], dtype=torch.bool)
    q_N1A, (hidden, cell) = net(row, side.unsqueeze(1), real, (memory["state.h"], memory["state.c"]))
    return q_N1A[:, 0], {"state.h": hidden.float(), "state.c": cell.float()}


def act(
    net: nn.Module, obs: Tensors, memory: Memory, explore: ExplorationParams, rng: torch.Generator, *, actions: int
) -> Decision:
    """Act on one row per lane; the state before the row is stored with it."""
    side = last_action_reward(memory["state.action"], memory["state.reward"], actions)
    q_NA, state = single_step(net, obs, side, memory)
    action = epsilon_greedy(q_NA, explore, rng)
    after = memory | state | {"state.action": (action + 1).int()}
    return Decision(action, after, {name: memory[name] for name in STATE_DTYPES} | {"q": q_NA})


def greedy(net: nn.Module, obs: Tensors, memory: Memory, *, cfg: Config, actions: int) -> Decision:
    """Act without exploration, with values in units of the return; the caller sets the reward in the next state."""
    side = last_action_reward(memory["state.action"], memory["state.reward"], actions)
    q_NA, state = single_step(net, obs, side, memory)
    action = q_NA.argmax(1)
    return Decision(action, state | {"state.action": (action + 1).int()}, {"q": in_return_units(q_NA, cfg)})


def in_return_units(q: torch.Tensor, cfg: Config) -> torch.Tensor:
    return h_inverse(q) if cfg.rescale else q


def q_values(cfg: Any) -> Callable[[Tensors], torch.Tensor]:
    """`Agent.q_values` of an agent whose decisions have the column `q`."""
    return lambda extras: in_return_units(extras["q"], cfg)


def window_last_action_reward(rows: Tensors, actions: int) -> torch.Tensor:
    """Previous action and reward of each row of a window, [B, T, A + 1]."""
    return last_action_reward(previous(rows["action"] + 1, rows["last"], rows["state.action"][:, 0]),
                              previous(rows["reward"], rows["last"], rows["state.reward"][:, 0]), actions)


def unroll_q(net: nn.Module, batch: Sample, side: torch.Tensor, cfg: Config) -> torch.Tensor:
    """q [B, U + n, A] from the first trained row on; no gradient flows into the burn-in."""
    state = batch.rows["state.h"][:, 0], batch.rows["state.c"][:, 0]
    if cfg.state == "zero":
        state = torch.zeros_like(state[0]), torch.zeros_like(state[1])
    leaves, real = batch.leaves, real_rows(batch.rows["last"])

    def rows_of(rows: slice) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        return {name: leaf[:, rows] for name, leaf in leaves.items()}, side[:, rows], real[:, rows]

    if cfg.burn_in:
        with torch.no_grad():
            _, state = net(*rows_of(slice(None, cfg.burn_in)), state)
    q: torch.Tensor = net(*rows_of(slice(cfg.burn_in, None)), state)[0]
    return q


def q_of_actions(rows: Tensors, q_BTA: torch.Tensor, cfg: Config) -> torch.Tensor:
    """q [B, U] of the actions taken, given the values of all rows from the first trained one on."""
    action = rows["action"][:, cfg.burn_in:cfg.burn_in + cfg.unroll].long().unsqueeze(2)
    return q_BTA[:, :cfg.unroll].gather(2, action).squeeze(2)


def trained_mask(rows: Tensors, cfg: Config) -> torch.Tensor:
    """Bool [B, U]: rows that are real and not final."""
    return ~rows["last"][:, cfg.burn_in:cfg.burn_in + cfg.unroll]


def n_step_targets(rows: Tensors, v_BT: torch.Tensor, cfg: Config, gamma: float | torch.Tensor) -> torch.Tensor:
    """n-step targets [B, U], given the values [B, U + n] of all rows from the first trained one on."""
    reward, discount, last = (rows[name][:, cfg.burn_in:] for name in ("reward", "discount", "last"))
    step = n_step(reward, discount, last, gamma, cfg.n_step)
    v = v_BT.gather(1, step.row)
    return h(step.ret + step.discount * h_inverse(v)) if cfg.rescale else step.ret + step.discount * v


def td_loss(q: torch.Tensor, y: torch.Tensor, cfg: Config) -> torch.Tensor:
    return huber(q, y, cfg.huber_delta) if cfg.loss == "huber" else squared(q, y)


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the R2D2 agent."""
    reject_unused_options(cfg, spec)

    def loss(net: nn.Module, target: nn.Module, batch: Sample, rng: torch.Generator) -> Loss:
        rows, trained, side = (
            batch.rows, trained_mask(batch.rows, cfg),
            window_last_action_reward(batch.rows, spec.num_actions))
        q_BTA = unroll_q(net, batch, side, cfg)
        q_t = q_of_actions(rows, q_BTA, cfg)
        with torch.no_grad():
            q_target = unroll_q(target, batch, side, cfg)
            best = (q_BTA if cfg.double else q_target).argmax(2, keepdim=True)
            y_t = n_step_targets(rows, q_target.gather(2, best).squeeze(2), cfg, cfg.gamma)
        errors = td_loss(q_t, y_t, cfg)
        td_abs, q_t = (y_t - q_t.detach()).abs(), q_t.detach()
        priority = mixed_priority(td_abs, trained, cfg.eta)
        metrics = {"train/q_mean": masked_mean(q_t, trained), "train/td_abs": masked_mean(td_abs, trained),
                   "train/priority": priority}
        if cfg.measure_drift:
            metrics |= _drifts(net, batch, q_BTA.detach(), cfg, spec.num_actions)
        return Loss((errors * trained).sum(1) / cfg.unroll, priority, metrics=metrics)

    def priority(rows: Tensors) -> torch.Tensor:
        """The learner's formula, with the actor's values at acting time as online and target network."""
        q_BTA = rows["q"][:, cfg.burn_in:]
        td_abs = (n_step_targets(rows, q_BTA.amax(2), cfg, cfg.gamma) - q_of_actions(rows, q_BTA, cfg)).abs()
        return mixed_priority(td_abs, trained_mask(rows, cfg), cfg.eta)

    first, last = cfg.burn_in, cfg.burn_in + cfg.unroll - 1
    return Agent(
        network=lambda: Network(cfg, spec, spec.num_actions + 1), act=partial(act, actions=spec.num_actions),
        loss=loss, window=cfg.window, priority_inputs={"q": ((spec.num_actions,), "float32")},
        priority=priority, recurrent_state=make_recurrent_state(cfg.units),
        stored_states=state_columns(cfg.units), state_rows=(0, first, last) if cfg.measure_drift else (0,),
        q_values=q_values(cfg),
        greedy=partial(greedy, cfg=cfg, actions=spec.num_actions), greedy_state=tuple(STATE_DTYPES))


@torch.no_grad()
def _drifts(net: nn.Module, batch: Sample, q_BTA: torch.Tensor, cfg: Config, actions: int) -> Tensors:
    """ΔQ at the first and the last trained row: values from the replayed state against those from the actor's state."""
    metrics = {}
    for index, tag in ((1, "train/drift_first"), (2, "train/drift_last")):
        row = cfg.burn_in + (cfg.unroll - 1) * (index - 1)
        memory = {name: batch.rows[name][:, index] for name in STATE_DTYPES}
        side = last_action_reward(memory["state.action"], memory["state.reward"], actions)
        q_actor, _ = single_step(net, batch.obs(row), side, memory)
        change = drift(q_BTA[:, row - cfg.burn_in], q_actor, q_actor.amax(1))
        metrics[tag] = masked_mean(change, ~batch.rows["last"][:, row])
    return metrics
