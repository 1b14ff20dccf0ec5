"""NGU, Never Give Up (Badia et al. 2020a): R2D2, or DQN, with an intrinsic reward for novelty.

Differences from R2D2: an intrinsic reward, large for observations new to the episode (nearest neighbours among the
embeddings of its observations), scaled up for observations rare in the whole run (random network distillation); and a
family of policies in one network: arm j learns r + β_j r_i under a discount γ_j, arm 0 the extrinsic reward alone.
Shapes: B items, N lanes, T rows of a window, U trained rows, A actions; M stored embeddings, D embedding dimensions,
k neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from qfleet.algos import r2d2
from qfleet.algos.curiosity import CuriosityConfig, inactive_options
from qfleet.algos.novelty import frozen_intrinsic_reward, intrinsic_reward
from qfleet.algos.value_based import reject_unused_options
from qfleet.config import Fraction
from qfleet.core.agent import (
    Agent,
    Columns,
    Decision,
    ExplorationParams,
    Loss,
    Memory,
    RecurrentState,
    Tensors,
    epsilon_greedy,
)
from qfleet.core.env import EnvSpec
from qfleet.core.replay import Sample, Window
from qfleet.maths.bellman import retrace
from qfleet.maths.policy_family import MixtureTable, betas, gammas
from qfleet.maths.sequences import masked_mean, mixed_priority
from qfleet.maths.value_rescaling import h, h_inverse
from qfleet.networks.curiosity import Curiosity, Trunk, flatten_parameters
from qfleet.networks.encoder import encoder_factory
from qfleet.networks.heads import DuelingHead, Head

CURIOSITY_ROWS = 5
"""Transitions per window that train curiosity: the last real ones, since neighbouring ones add little information."""


class Config(CuriosityConfig, r2d2.Config):
    """Agent section for NGU."""

    algo: Literal["ngu"] = Field(  # type: ignore[assignment]
        "ngu", description="algorithm, by name; changing it resets the recipe's other agent keys")
    gamma_min: Fraction = Field(0.99, description="discount factor of the last arm; agent.gamma is that of arm 0")

    def inactive(self) -> dict[str, str]:
        return inactive_options(self, super().inactive())

    @property
    def window(self) -> Window:
        return Window(future=self.n_step) if self.memory == "none" else super().window


class FeedForwardNetwork(nn.Module):
    """Like `r2d2.Network` without the LSTM: each row is evaluated independently."""

    def __init__(self, cfg: Any, spec: EnvSpec, side: int) -> None:
        super().__init__()
        self.encoder = encoder_factory(cfg)(spec.observation)
        self.head = (DuelingHead if cfg.dueling else Head)(self.encoder.features + side, cfg.hidden,
                                                           (spec.num_actions,), cfg.norm)

    def forward(self, obs: Mapping[str, torch.Tensor], side: torch.Tensor) -> torch.Tensor:
        """q [B, A] of observations [B, ...]."""
        seen = self.encoder(obs, self.head.dtype)
        q: torch.Tensor = self.head(torch.cat([seen, side.to(seen.dtype)], 1))
        return q


class Network(nn.Module):
    """Value network of all arms, and the curiosity networks."""

    def __init__(self, cfg: Config, spec: EnvSpec) -> None:
        super().__init__()
        self.q = value_network(cfg, spec)
        self.curiosity = make_curiosity(cfg, spec)
        self.kept = make_eval_buffers()


def value_network(cfg: Any, spec: EnvSpec) -> nn.Module:
    """Value network; side inputs are the arm and, for an LSTM, the previous action, reward and intrinsic reward."""
    if cfg.memory == "none":
        return FeedForwardNetwork(cfg, spec, cfg.arms)
    return r2d2.Network(cfg, spec, spec.num_actions + 2 + cfg.arms)


def make_curiosity(cfg: CuriosityConfig, spec: EnvSpec) -> Curiosity:
    encoder = encoder_factory(cfg, norm="none")
    return Curiosity(
        spec.observation, spec.num_actions, encoder, cfg.curious_hidden, cfg.embedding, cfg.surprise_outputs)


def make_embedding(cfg: CuriosityConfig, spec: EnvSpec) -> Trunk:
    """The embedding network of `Curiosity` alone."""
    return Trunk(spec.observation, encoder_factory(cfg, norm="none"), cfg.curious_hidden, cfg.embedding)


# Intrinsic reward and acting.

PERSISTENT = ("distance.mean", "distance.count", "surprise.mean", "surprise.var", "surprise.count")
EVAL_BUFFERS = tuple(f"kept.{name}" for name in PERSISTENT)


def make_eval_buffers() -> nn.Module:
    """Buffers for an evaluator's running statistics, named as in PERSISTENT."""
    buffers = nn.ModuleDict()
    for name in PERSISTENT:
        group, statistic = name.split(".")
        if group not in buffers:
            buffers[group] = nn.Module()
        buffers[group].register_buffer(statistic, torch.zeros(()))
    return buffers


def make_recurrent_state(cfg: Any, spec: EnvSpec) -> RecurrentState:
    """State of an episode (LSTM, embeddings) and, across episodes, running statistics of distance and RND error."""
    lstm = r2d2.make_recurrent_state(cfg.units) if cfg.memory == "lstm" else None
    with torch.random.fork_rng(devices=[]):
        weights = flatten_parameters(make_embedding(cfg, spec)).shape

    def initial(lanes: int, device: torch.device) -> Memory:
        memory = {} if lstm is None else lstm.initial(lanes, device)
        keys = torch.zeros(lanes, cfg.episodic_capacity, cfg.embedding, device=device)
        count = torch.zeros(lanes, dtype=torch.int64, device=device)
        held = {name: torch.zeros(weights, device=device) for name in ("episodic.old", "episodic.new")}
        held["episodic.newer"] = torch.zeros(lanes, dtype=torch.bool, device=device)
        return memory | {"episodic.keys": keys, "episodic.count": count} | held | {
            name: torch.zeros((), device=device) for name in PERSISTENT}

    def observe(memory: Memory, reward: torch.Tensor) -> Memory:
        return memory if lstm is None else lstm.observe(memory, reward)

    def reset(memory: Memory, over: torch.Tensor) -> Memory:
        episodic = {
            name: value for name, value in memory.items() if name in r2d2.STATE_DTYPES or name == "episodic.count"
        }
        return memory | r2d2.reset_lanes(episodic, over)

    return RecurrentState(initial, observe, reset, PERSISTENT)


def side_inputs(cfg: Any, last_step: torch.Tensor | None, bonus: torch.Tensor, arm: torch.Tensor) -> torch.Tensor:
    """Side inputs [..., S] of the value network: previous action and reward and bonus (LSTM only), one-hot arm."""
    one_hot = F.one_hot(arm.long(), cfg.arms)
    return one_hot if last_step is None else torch.cat([last_step, h(bonus).unsqueeze(-1), one_hot], -1)


def step_q_values(net: nn.Module, obs: Tensors, side: torch.Tensor, memory: Memory,
                  cfg: Any) -> tuple[torch.Tensor, Tensors]:
    """q [N, A] of one row per lane, and the LSTM state after it."""
    return (net(obs, side), {}) if cfg.memory == "none" else r2d2.single_step(net, obs, side, memory)


def behaviour_probability(q_NA: torch.Tensor, action: torch.Tensor, explore: ExplorationParams) -> torch.Tensor:
    """Probability [N] that `epsilon_greedy` takes this action."""
    return (action == q_NA.argmax(1)) * (1 - explore.epsilon) + explore.epsilon / q_NA.shape[1]


def stored_columns(cfg: CuriosityConfig) -> Columns:
    """Additional columns per row: the intrinsic reward, the arm, and the behaviour probability if Retrace needs it."""
    columns: dict[str, tuple[tuple[int, ...], str]] = {"bonus": ((), "float32"), "arm": ((), "int32")}
    return columns | ({"mu": ((), "float32")} if cfg.targets == "retrace" and cfg.target_epsilon else {})


def act(net: nn.Module, obs: Tensors, memory: Memory, explore: ExplorationParams, rng: torch.Generator, *, cfg: Config,
        actions: int) -> Decision:
    """Compute the intrinsic reward, then act as the lane's arm; without an arm, as arm 0 (exploitation)."""
    bonus, after = intrinsic_reward(net.get_submodule("curiosity"), obs, memory, cfg)
    index = torch.zeros(len(bonus), dtype=torch.int64, device=bonus.device) if explore.index is None else explore.index
    states = {name: memory[name] for name in r2d2.STATE_DTYPES if name in memory}
    last_step = r2d2.last_action_reward(states["state.action"], states["state.reward"], actions) if states else None
    q_NA, state = step_q_values(net.get_submodule("q"), obs, side_inputs(cfg, last_step, bonus, index), memory, cfg)
    action = epsilon_greedy(q_NA, explore, rng)
    after |= state | ({"state.action": (action + 1).int()} if states else {})
    return Decision(action, after, states | {"q": q_NA, "bonus": bonus, "arm": index.int(),
                                             "mu": behaviour_probability(q_NA, action, explore)})


def greedy_inputs(net: nn.Module, obs: Tensors, memory: Memory, arm: torch.Tensor, cfg: Any,
                  actions: int) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Side inputs of lanes that act as one arm, its index [N], and the recurrent state that the bonus changes."""
    index = arm.expand(next(iter(obs.values())).shape[0])
    if cfg.memory == "none":  # the bonus is not an input
        return side_inputs(cfg, None, index, index), index, {}
    bonus, after = frozen_intrinsic_reward(net.get_submodule("curiosity"), obs, memory, cfg)
    last_step = r2d2.last_action_reward(memory["state.action"], memory["state.reward"], actions)
    return side_inputs(cfg, last_step, bonus, index), index, after


def greedy_state(cfg: Any) -> tuple[str, ...]:
    """Entries of the recurrent state that actions depend on."""
    return () if cfg.memory == "none" else (*r2d2.STATE_DTYPES, "episodic.keys", "episodic.count", *PERSISTENT)


def greedy(net: nn.Module, obs: Tensors, memory: Memory, *, cfg: Config, actions: int) -> Decision:
    """Act as arm 0 without exploration; the caller sets the reward in the next state."""
    arm = next(iter(obs.values())).new_zeros((), dtype=torch.int64)
    side, _, after = greedy_inputs(net, obs, memory, arm, cfg, actions)
    q_NA, state = step_q_values(net.get_submodule("q"), obs, side, memory, cfg)
    action = q_NA.argmax(1)
    taken = {"state.action": (action + 1).int()} if state else {}
    return Decision(action, after | state | taken, {"q": r2d2.in_return_units(q_NA, cfg)})


# Learning.

def window_q_values(net: nn.Module, batch: Sample, cfg: Any, actions: int) -> torch.Tensor:
    """q [B, U + n, A] from the first trained row on."""
    rows = batch.rows
    last_step = r2d2.window_last_action_reward(rows, actions) if cfg.memory == "lstm" else None
    side = side_inputs(cfg, last_step, rows["bonus"], rows["arm"])
    if cfg.memory == "lstm":
        return r2d2.unroll_q(net, batch, side, cfg)
    q: torch.Tensor = net({name: leaf.flatten(0, 1) for name, leaf in batch.leaves.items()}, side.flatten(0, 1))
    return q.view(*rows["last"].shape, -1)


def relabel_arms(batch: Sample, cfg: Any, rng: torch.Generator) -> Sample:
    """Batch with the arms to train under: those that acted, or with `share_arms` random ones (learning is off-policy).

    Arms are clamped: rows may come from other hosts, and an invalid arm must not crash the learner.
    """
    arm = batch.rows["arm"].clamp(0, cfg.arms - 1)
    if cfg.share_arms:
        random_arm = torch.randint(cfg.arms, (len(arm), 1), generator=rng, device=arm.device, dtype=arm.dtype)
        arm = random_arm.expand_as(arm)
    return replace(batch, rows=batch.rows | {"arm": arm})


def next_intrinsic_reward(rows: Tensors) -> torch.Tensor:
    """Intrinsic reward [B, T] of leaving each row: the bonus of the next row; unknown (0) for the last row."""
    return F.pad(rows["bonus"][:, 1:], (0, 1))


def make_targets(rows: Tensors, q_BTA: torch.Tensor, best_BT: torch.Tensor, cfg: Any,
                 gamma: torch.Tensor) -> torch.Tensor:
    """Targets [B, U] for the rewards in `rows`, given values and greedy actions from the first trained row on."""
    if cfg.targets == "n_step":
        return r2d2.n_step_targets(rows, q_BTA.gather(2, best_BT.unsqueeze(2)).squeeze(2), cfg, gamma)
    returns = h_inverse(q_BTA) if cfg.rescale else q_BTA
    names = ("action", "reward", "discount", "last", *(["mu"] if cfg.target_epsilon else []))
    trained_rows = {name: rows[name][:, cfg.burn_in:] for name in names}
    y = retrace(returns, best_BT, trained_rows, gamma, cfg.trace, cfg.target_epsilon)[:, :cfg.unroll]
    return h(y) if cfg.rescale else y


def curiosity_loss(
    curiosity: Any, batch: Sample, cfg: Any, rng: torch.Generator
) -> tuple[torch.Tensor, Tensors, Tensors]:
    """Loss of the curiosity networks, their metrics, and the updated running statistics of observations.

    Trained on the last transitions of each window. Only a fraction of the items trains the predictor, so that novel
    observations stay novel for long enough to be learned from.
    """
    steps = r2d2.trained_mask(batch.rows, cfg).sum(1, keepdim=True)
    taken = min(CURIOSITY_ROWS, cfg.unroll)
    step = (steps - taken).clamp(min=0) + torch.arange(taken + 1, device=steps.device)
    pairs, row = step[:, :-1] < steps, cfg.burn_in + torch.minimum(step, steps)
    item = torch.arange(len(row), device=row.device).unsqueeze(1)
    obs = {name: leaf[item, row].flatten(0, 1) for name, leaf in batch.leaves.items()}
    keys = curiosity.embed(obs).view(*row.shape, -1)
    logits = curiosity.predict_action(keys[:, :-1].flatten(0, 1), keys[:, 1:].flatten(0, 1))
    action = batch.rows["action"][item, row[:, :-1]].flatten().long()
    inverse = masked_mean(F.cross_entropy(logits, action, reduction="none"), pairs.flatten())
    error = curiosity.rnd_error(obs)
    chosen = torch.rand(len(row), 1, generator=rng, device=row.device) < cfg.surprise_share
    surprise = masked_mean(error, chosen.expand(row.shape).flatten())
    statistics = curiosity.normaliser.updated_statistics(obs)
    buffers = {f"curiosity.normaliser.{name}": value for name, value in statistics.items()}
    metrics = {"train/inverse_loss": inverse.detach(), "train/surprise": error.detach().mean()}
    return inverse + surprise, metrics, buffers


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the NGU agent."""
    reject_unused_options(cfg, spec)
    window = cfg.window
    if cfg.memory == "none":
        cfg = cfg.model_copy(update={"burn_in": 0, "unroll": 1})
    beta, gamma = MixtureTable(betas(cfg.arms, cfg.beta)), MixtureTable(gammas(cfg.arms, cfg.gamma, cfg.gamma_min))

    def targets_of(rows: Tensors, q_BTA: torch.Tensor, best_BT: torch.Tensor) -> torch.Tensor:
        arm = rows["arm"][:, cfg.burn_in].long()
        mixed = rows["reward"] + beta.at(arm, q_BTA).unsqueeze(1) * next_intrinsic_reward(rows)
        return make_targets(rows | {"reward": mixed}, q_BTA, best_BT, cfg, gamma.at(arm, q_BTA).unsqueeze(1))

    def loss(net: nn.Module, target: nn.Module, batch: Sample, rng: torch.Generator) -> Loss:
        batch = relabel_arms(batch, cfg, rng)
        trained = r2d2.trained_mask(batch.rows, cfg)
        q_BTA = window_q_values(net.get_submodule("q"), batch, cfg, spec.num_actions)
        q_t = r2d2.q_of_actions(batch.rows, q_BTA, cfg)
        with torch.no_grad():
            q_target = window_q_values(target.get_submodule("q"), batch, cfg, spec.num_actions)
            y_t = targets_of(batch.rows, q_target, (q_BTA if cfg.double else q_target).argmax(2))
        per_item = (r2d2.td_loss(q_t, y_t, cfg) * trained).sum(1) / cfg.unroll
        td_abs = (y_t - q_t.detach()).abs()
        priority = mixed_priority(td_abs, trained, cfg.eta)
        extra, metrics, buffers = curiosity_loss(net.get_submodule("curiosity"), batch, cfg, rng)
        metrics |= {"train/q_mean": masked_mean(q_t.detach(), trained), "train/td_abs": masked_mean(td_abs, trained),
                    "train/intrinsic_reward": batch.rows["bonus"].mean(), "train/priority": priority}
        return Loss(per_item, priority, extra, metrics, buffers)

    def priority(rows: Tensors) -> torch.Tensor:
        q_BTA = rows["q"][:, cfg.burn_in:]
        td_abs = (targets_of(rows, q_BTA, q_BTA.argmax(2)) - r2d2.q_of_actions(rows, q_BTA, cfg)).abs()
        return mixed_priority(td_abs, r2d2.trained_mask(rows, cfg), cfg.eta)

    return Agent(
        network=lambda: Network(cfg, spec), act=partial(act, cfg=cfg, actions=spec.num_actions), loss=loss,
        window=window, columns=stored_columns(cfg), priority_inputs={"q": ((spec.num_actions,), "float32")},
        priority=priority, recurrent_state=make_recurrent_state(cfg, spec), eval_buffers=EVAL_BUFFERS,
        stored_states=r2d2.state_columns(cfg.units) if cfg.memory == "lstm" else {}, q_values=r2d2.q_values(cfg),
        greedy=partial(greedy, cfg=cfg, actions=spec.num_actions), greedy_state=greedy_state(cfg))
