"""NGU, Never Give Up (Badia et al. 2020a): R2D2, or DQN, that is also rewarded for what is new.

What differs from R2D2: an intrinsic reward, large for what this episode has not shown yet (nearest neighbours among the
embeddings of its observations) and larger for what the whole run has hardly seen (random network distillation); and a
family of policies in one network, arm j of which learns r + β_j r_i under a discount γ_j, arm 0 the rewards alone.
Shapes: B items, N lanes, T rows of a window, U trained rows, A actions; M memories, D numbers of an embedding, k
neighbours.
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
from qfleet.algos._curiosity import CuriosityConfig, inactive_options
from qfleet.algos._value_based import reject_unused_options
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
from qfleet.maths.nearest_neighbours import knn_squared_distances
from qfleet.maths.novelty import NoveltyKernel, episodic_bonus, modulator, running_mean
from qfleet.maths.policy_family import MixtureTable, betas, gammas
from qfleet.maths.returns import retrace
from qfleet.maths.sequences import masked_mean, mixed_priority
from qfleet.maths.value_rescaling import h, h_inverse
from qfleet.networks.curiosity import Curiosity, Trunk, call_with_parameters, flatten_parameters
from qfleet.networks.encoder import Encoder
from qfleet.networks.heads import DuelingHead, Head

CURIOSITY_ROWS = 5
"""Transitions of a window that curiosity is trained on, the last real ones: neighbouring ones teach little more."""




class Config(CuriosityConfig, r2d2.Config):
    """The agent section of a run that trains NGU."""

    algo: Literal["ngu"] = Field(  # type: ignore[assignment]
        "ngu", description="algorithm, by name; changing it resets the recipe's other agent keys")
    gamma_min: Fraction = Field(0.99, description="discount factor of the last arm; agent.gamma is that of arm 0")

    def inactive(self) -> dict[str, str]:
        return inactive_options(self, super().inactive())

    @property
    def window(self) -> Window:
        return Window(future=self.n_step) if self.memory == "none" else super().window




class FeedForwardNetwork(nn.Module):
    """As `r2d2.Network`, without a memory: every row by itself."""

    def __init__(self, cfg: Any, spec: EnvSpec, side: int) -> None:
        super().__init__()
        self.encoder = Encoder(spec.observation, cfg.torso, cfg.norm)
        self.head = (DuelingHead if cfg.dueling else Head)(self.encoder.features + side, cfg.hidden,
                                                           (spec.num_actions,), cfg.norm)

    def forward(self, obs: Mapping[str, torch.Tensor], side: torch.Tensor) -> torch.Tensor:
        """q [B, A] of observations [B, ...]."""
        seen = self.encoder(obs, self.head.dtype)
        q: torch.Tensor = self.head(torch.cat([seen, side.to(seen.dtype)], 1))
        return q


class Network(nn.Module):
    """The values of all arms, and the networks of curiosity beside them."""

    def __init__(self, cfg: Config, spec: EnvSpec) -> None:
        super().__init__()
        self.q = value_network(cfg, spec)
        self.curiosity = make_curiosity(cfg, spec)
        self.kept = make_eval_buffers()


def value_network(cfg: Any, spec: EnvSpec) -> nn.Module:
    """What is known beside the observation: the arm, and with a memory what led here, the bonus included."""
    if cfg.memory == "none":
        return FeedForwardNetwork(cfg, spec, cfg.arms)
    return r2d2.Network(cfg, spec, spec.num_actions + 2 + cfg.arms)


def make_curiosity(cfg: CuriosityConfig, spec: EnvSpec) -> Curiosity:
    torso = getattr(cfg, "torso", "auto")
    return Curiosity(spec.observation, spec.num_actions, torso, cfg.curious_hidden, cfg.embedding, cfg.surprise_outputs)


def make_embedding(cfg: CuriosityConfig, spec: EnvSpec) -> Trunk:
    """The first network of curiosity, by itself."""
    return Trunk(spec.observation, getattr(cfg, "torso", "auto"), cfg.curious_hidden, cfg.embedding)


# How an actor wonders.

PERSISTENT = ("distance.mean", "distance.count", "surprise.mean", "surprise.var", "surprise.count")
EVAL_BUFFERS = tuple(f"kept.{name}" for name in PERSISTENT)


def make_eval_buffers() -> nn.Module:
    """Buffers for an evaluator's running statistics, named as in KEPT."""
    found = nn.ModuleDict()
    for name in PERSISTENT:
        part, figure = name.split(".")
        if part not in found:
            found[part] = nn.Module()
        found[part].register_buffer(figure, torch.zeros(()))
    return found


def make_recurrent_state(cfg: Any, spec: EnvSpec) -> RecurrentState:
    """An episode's embeddings are forgotten with it; how far apart and how surprising things are is not."""
    lstm = r2d2.make_recurrent_state(cfg.units) if cfg.memory == "lstm" else None
    with torch.random.fork_rng(devices=[]):
        weights = flatten_parameters(make_embedding(cfg, spec)).shape

    def begin(lanes: int, device: torch.device) -> Memory:
        memory = {} if lstm is None else lstm.initial(lanes, device)
        keys = torch.zeros(lanes, cfg.episodic_capacity, cfg.embedding, device=device)
        count = torch.zeros(lanes, dtype=torch.int64, device=device)
        held = {name: torch.zeros(weights, device=device) for name in ("episodic.old", "episodic.new")}
        held["episodic.newer"] = torch.zeros(lanes, dtype=torch.bool, device=device)
        return memory | {"episodic.keys": keys, "episodic.count": count} | held | {
            name: torch.zeros((), device=device) for name in PERSISTENT}

    def observe(memory: Memory, reward: torch.Tensor) -> Memory:
        return memory if lstm is None else lstm.observe(memory, reward)

    def forget(memory: Memory, over: torch.Tensor) -> Memory:
        fading = {
            name: value for name, value in memory.items() if name in r2d2.STATE_DTYPES or name == "episodic.count"
        }
        return memory | r2d2.reset_lanes(fading, over)

    return RecurrentState(begin, observe, forget, PERSISTENT)


def refresh_embedding_weights(embed: nn.Module, memory: Memory, capacity: int) -> Memory:
    """The memory with weights of the embedding for every lane, the same from the first to the last of its memories.

    Embeddings by different weights cannot be compared: any drift makes what is known look new. Two versions are held
    (`episodic.old` and `episodic.new` [P]), and every lane uses one of them (`episodic.newer` [N]) until its episode is
    over:

        a lane begins    it uses `new`, which become the newest weights unless another lane uses them
        `old` is free    `new` becomes `old`, and the lanes that use it go on with that

    So newer weights wait for the longest episode under way. A full memory whose weights are out of date begins anew, so
    that an episode without end keeps the others waiting for as many steps as it has memories, and not for ever.
    """
    count, newer, old, new = (memory[f"episodic.{name}"] for name in ("count", "newer", "old", "new"))
    now, begun = flatten_parameters(embed), count == 0
    used = (~newer & ~begun).any()
    old, newer = torch.where(used, old, new), newer & used
    begun = begun | ((count >= capacity) & ~newer & (old != now).any())
    new = torch.where((newer & ~begun).any(), new, now)
    return memory | {"episodic.old": old, "episodic.new": new, "episodic.newer": newer | begun,
                     "episodic.count": torch.where(begun, 0, count)}


def embed_observations(embed: nn.Module, obs: Tensors, memory: Memory) -> torch.Tensor:
    """Embeddings [N, D] by the weights that each lane uses."""
    newer, found = memory["episodic.newer"], None
    for name, lanes in (("episodic.old", ~newer), ("episodic.new", newer)):
        if avoid_sync(lanes):
            keys = call_with_parameters(embed, memory[name], obs).float()
            found = keys if found is None else torch.where(lanes.unsqueeze(1), keys, found)
        elif lanes.any():
            keys = call_with_parameters(embed, memory[name], {name: leaf[lanes] for name, leaf in obs.items()}).float()
            found = keys.new_empty(len(lanes), keys.shape[1]) if found is None else found
            found[lanes] = keys
    assert found is not None
    return found


def avoid_sync(tensor: torch.Tensor) -> bool:
    """Whether to compute both branches: reading a value of a GPU synchronises, and a CUDA graph cannot do it."""
    return tensor.is_cuda


def intrinsic_reward(curiosity: Any, obs: Tensors, memory: Memory, cfg: CuriosityConfig) -> tuple[torch.Tensor, Memory]:
    """The intrinsic reward [N] of arriving at these observations, and the memory with them in it."""
    filled = memory["episodic.count"]
    if avoid_sync(filled) or ((filled == 0) | (filled >= cfg.episodic_capacity)).any():
        memory = refresh_embedding_weights(curiosity.embed, memory, cfg.episodic_capacity)
    keys, count = memory["episodic.keys"], memory["episodic.count"]
    key = embed_observations(curiosity.embed, obs, memory)
    near = knn_squared_distances(keys, count, key, cfg.neighbours)
    known = torch.isfinite(near)
    mean, seen, some = memory["distance.mean"], memory["distance.count"], known.any()
    apart = masked_mean(near.nan_to_num(posinf=0.0), known)
    mean, seen = torch.where(some, running_mean(mean, seen, apart, cfg.novelty_horizon), mean), seen + some
    error, told = curiosity.rnd_error(obs), memory["surprise.count"]
    usual = running_mean(memory["surprise.mean"], told, error.mean(), cfg.novelty_horizon)
    var = running_mean(memory["surprise.var"], told, (error - usual).square().mean(), cfg.novelty_horizon)
    kernel = NoveltyKernel(
        cfg.neighbours, cfg.kernel_epsilon, cluster=cfg.cluster_distance, similarity=cfg.max_similarity
    )
    bonus = episodic_bonus(near, mean.expand(len(key)), kernel) * modulator(error, usual, var.sqrt(), cfg.modulator_max)
    # In place: a copy of all memories at every step would cost more than finding the nearest. The oldest go first.
    keys[torch.arange(len(key), device=key.device), count % keys.shape[1]] = key
    return bonus, memory | {"episodic.count": count + 1, "distance.mean": mean, "distance.count": seen,
                            "surprise.mean": usual, "surprise.var": var, "surprise.count": told + 1}


def side_inputs(cfg: Any, led: torch.Tensor | None, bonus: torch.Tensor, arm: torch.Tensor) -> torch.Tensor:
    """What the value network is told at a row, [..., S]: what led there (with a memory), and the arm, one-hot."""
    which = F.one_hot(arm.long(), cfg.arms)
    return which if led is None else torch.cat([led, h(bonus).unsqueeze(-1), which], -1)


def step_q_values(net: nn.Module, obs: Tensors, side: torch.Tensor, memory: Memory,
                  cfg: Any) -> tuple[torch.Tensor, Tensors]:
    """q [N, A] of one row per lane, and the recurrent state after it."""
    return (net(obs, side), {}) if cfg.memory == "none" else r2d2.single_step(net, obs, side, memory)


def behaviour_probability(q_NA: torch.Tensor, action: torch.Tensor, arm: ExplorationParams) -> torch.Tensor:
    """The probability [N] with which `epsilon_greedy` takes this action."""
    return (action == q_NA.argmax(1)) * (1 - arm.epsilon) + arm.epsilon / q_NA.shape[1]


def stored_columns(cfg: CuriosityConfig) -> Columns:
    """What every row has besides: the bonus of arriving there, the arm, and what Retrace has to know of the choice."""
    found: dict[str, tuple[tuple[int, ...], str]] = {"bonus": ((), "float32"), "arm": ((), "int32")}
    return found | ({"mu": ((), "float32")} if cfg.targets == "retrace" and cfg.target_epsilon else {})


def act(net: nn.Module, obs: Tensors, memory: Memory, arm: ExplorationParams, rng: torch.Generator, *, cfg: Config,
        actions: int) -> Decision:
    """Wonder, then choose as the lane's arm would; without an arm, as the exploiting one."""
    bonus, after = intrinsic_reward(net.get_submodule("curiosity"), obs, memory, cfg)
    index = torch.zeros(len(bonus), dtype=torch.int64, device=bonus.device) if arm.index is None else arm.index
    states = {name: memory[name] for name in r2d2.STATE_DTYPES if name in memory}
    led = r2d2.last_action_reward(states["state.action"], states["state.reward"], actions) if states else None
    q_NA, state = step_q_values(net.get_submodule("q"), obs, side_inputs(cfg, led, bonus, index), memory, cfg)
    action = epsilon_greedy(q_NA, arm, rng)
    after |= state | ({"state.action": (action + 1).int()} if states else {})
    return Decision(action, after, states | {"q": q_NA, "bonus": bonus, "arm": index.int(),
                                             "mu": behaviour_probability(q_NA, action, arm)})


# What the learner makes of it.

def window_q_values(net: nn.Module, batch: Sample, cfg: Any, actions: int) -> torch.Tensor:
    """q [B, U + n, A] from the first trained row on."""
    rows = batch.rows
    led = r2d2.window_last_action_reward(rows, actions) if cfg.memory == "lstm" else None
    side = side_inputs(cfg, led, rows["bonus"], rows["arm"])
    if cfg.memory == "lstm":
        return r2d2.unroll_q(net, batch, side, cfg)
    q: torch.Tensor = net({name: leaf.flatten(0, 1) for name, leaf in batch.leaves.items()}, side.flatten(0, 1))
    return q.view(*rows["last"].shape, -1)


def relabel_arms(batch: Sample, cfg: Any, rng: torch.Generator) -> Sample:
    """The batch under the arms that learn from it: those that played, or any, which is off policy as all of it is.

    Rows may come from other hosts, and an arm that does not exist would end the learner: it becomes one that does.
    """
    arm = batch.rows["arm"].clamp(0, cfg.arms - 1)
    if cfg.share_arms:
        drawn = torch.randint(cfg.arms, (len(arm), 1), generator=rng, device=arm.device, dtype=arm.dtype)
        arm = drawn.expand_as(arm)
    return replace(batch, rows=batch.rows | {"arm": arm})


def next_intrinsic_reward(rows: Tensors) -> torch.Tensor:
    """What leaving each row brought [B, T]: the bonus of the row after it; of the last row it is not known."""
    return F.pad(rows["bonus"][:, 1:], (0, 1))


def make_targets(rows: Tensors, q_BTA: torch.Tensor, best_BT: torch.Tensor, cfg: Any,
                 gamma: torch.Tensor) -> torch.Tensor:
    """Targets [B, U] of the rewards in `rows`, given values and greedy actions from the first trained row on."""
    if cfg.targets == "n_step":
        return r2d2.n_step_targets(rows, q_BTA.gather(2, best_BT.unsqueeze(2)).squeeze(2), cfg, gamma)
    real = h_inverse(q_BTA) if cfg.rescale else q_BTA
    names = ("action", "reward", "discount", "last", *(["mu"] if cfg.target_epsilon else []))
    part = {name: rows[name][:, cfg.burn_in:] for name in names}
    y = retrace(real, best_BT, part, gamma, cfg.trace, cfg.target_epsilon)[:, :cfg.unroll]
    return h(y) if cfg.rescale else y


def curiosity_loss(
    curiosity: Any, batch: Sample, cfg: Any, rng: torch.Generator
) -> tuple[torch.Tensor, Tensors, Tensors]:
    """Loss of curiosity's networks, figures of it, and what the running figures of observations become.

    They learn from the last transitions of a window. Of its items only a share teaches the predictor, so that what is
    new stays new for long enough to be learnt from.
    """
    steps = r2d2.trained_mask(batch.rows, cfg).sum(1, keepdim=True)
    taken = min(CURIOSITY_ROWS, cfg.unroll)
    at = (steps - taken).clamp(min=0) + torch.arange(taken + 1, device=steps.device)
    pairs, row = at[:, :-1] < steps, cfg.burn_in + torch.minimum(at, steps)
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
    figures = {"train/inverse_loss": inverse.detach(), "train/surprise": error.detach().mean()}
    return inverse + surprise, figures, buffers


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The NGU agent for an environment."""
    reject_unused_options(cfg, spec)
    window = cfg.window
    if cfg.memory == "none":
        cfg = cfg.model_copy(update={"burn_in": 0, "unroll": 1})
    beta, gamma = MixtureTable(betas(cfg.arms, cfg.beta)), MixtureTable(gammas(cfg.arms, cfg.gamma, cfg.gamma_min))

    def aims(rows: Tensors, q_BTA: torch.Tensor, best_BT: torch.Tensor) -> torch.Tensor:
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
            y_t = aims(batch.rows, q_target, (q_BTA if cfg.double else q_target).argmax(2))
        per_item = (r2d2.td_loss(q_t, y_t, cfg) * trained).sum(1) / cfg.unroll
        td_abs = (y_t - q_t.detach()).abs()
        priority = mixed_priority(td_abs, trained, cfg.eta)
        extra, figures, buffers = curiosity_loss(net.get_submodule("curiosity"), batch, cfg, rng)
        figures |= {"train/q_mean": masked_mean(q_t.detach(), trained), "train/td_abs": masked_mean(td_abs, trained),
                    "train/bonus": batch.rows["bonus"].mean(), "train/priority": priority}
        return Loss(per_item, priority, extra, figures, buffers)

    def priority(rows: Tensors) -> torch.Tensor:
        q_BTA = rows["q"][:, cfg.burn_in:]
        td_abs = (aims(rows, q_BTA, q_BTA.argmax(2)) - r2d2.q_of_actions(rows, q_BTA, cfg)).abs()
        return mixed_priority(td_abs, r2d2.trained_mask(rows, cfg), cfg.eta)

    return Agent(
        network=lambda: Network(cfg, spec), act=partial(act, cfg=cfg, actions=spec.num_actions), loss=loss,
        window=window, columns=stored_columns(cfg), priority_inputs={"q": ((spec.num_actions,), "float32")},
        priority=priority, recurrent_state=make_recurrent_state(cfg, spec), eval_buffers=EVAL_BUFFERS,
        stored_states=r2d2.state_columns(cfg.units) if cfg.memory == "lstm" else {})
