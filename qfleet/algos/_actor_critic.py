"""What agents for continuous actions share: a deterministic policy that climbs its critic, and TD3's three fixes.

A paper says how its critic represents the return of an action (`Kind`): a number, or a law. All else is common to them:

    n_step        n rewards are summed before the bootstrap                              (Barth-Maron et al. 2018)
    twin          two critics; the target is that of the lower one                       (Fujimoto et al. 2018)
    smoothing     noise on the target policy's action, clipped                           (Fujimoto et al. 2018)
    policy_delay  updates of the critics for one of the policy                           (Fujimoto et al. 2018)
    normalise     observations less their running mean, over their running deviation

The policy's loss is −Q(s, μ(s)), and nothing of it moves the critic. Actions are within ±1; environments scale them.
Shapes: B items, N lanes, A numbers of an action, Z numbers of a law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from pydantic import Field
from torch import nn

from qfleet.algos._value_based import reject_unused_options, unused_options
from qfleet.config import Config as Section
from qfleet.config import Count, Fraction, NonNegative, Positive, PositiveCount
from qfleet.core.agent import Agent, Decision, ExplorationParams, Loss, Memory, ParamGroup, RecurrentState, Tensors
from qfleet.core.env import Box, EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample, Window
from qfleet.maths.returns import n_step
from qfleet.networks import actor_critic
from qfleet.networks.encoder import Encoder
from qfleet.networks.norms import Norm
from qfleet.networks.torsos import Torso


class ControlConfig(Section):
    """Options that all agents for continuous actions share."""

    continuous: ClassVar[bool] = True

    algo: str = Field(description="algorithm, by name; changing it resets the recipe's other agent keys")
    gamma: Fraction = Field(0.99, description="discount factor per step")
    n_step: PositiveCount = Field(1, description="n of n-step returns: rewards summed before bootstrapping, steps")
    policy_rate: Positive = Field(0.1, description="learning rate of the policy as a multiple of learner.learning_rate")
    policy_delay: PositiveCount = Field(1, description="critic updates per policy update; TD3 uses 2")
    twin: bool = Field(False, description="clipped double Q-learning: two critics, the target uses the lower estimate")
    smoothing: NonNegative = Field(
        0.0, description="target policy smoothing: standard deviation of the noise on target actions, which lie "
                         "within ±1; 0 = off")
    smoothing_clip: Positive = Field(0.5, description="bound on the absolute smoothing noise")
    normalise: bool = Field(
        False, description="normalise vector observations by their running mean and standard deviation")
    torso: Torso = Field(
        "auto", description="image network: auto (nature, or small below 36 pixels), a name of nets/torsos, or "
                            "module:attribute")
    torso_width: PositiveCount = Field(1, description="factor by which torso=impala multiplies its channels")
    torso_pool: Count = Field(
        0, description="side to which torso=impala max-pools its features, pixels; 0 = no pooling")
    spectral_norm: bool = Field(
        False, description="spectral normalisation of the residual convolutions of torso=impala")
    hidden: tuple[PositiveCount, ...] = Field(
        (256, 256), description="widths of the hidden dense layers of policy and critics")
    norm: Norm = Field(
        "none", description="normalisation before each ReLU, except in dense layers of the policy: none, group "
                            "(GroupNorm, convolutions only) or layer (LayerNorm)")

    def inactive(self) -> dict[str, str]:
        idle = {} if self.smoothing else {"smoothing_clip": "without agent.smoothing"}
        if self.torso != "impala":
            idle |= dict.fromkeys(("torso_width", "torso_pool", "spectral_norm"), "unless agent.torso=impala")
        return idle

    def unused_for(self, spec: EnvSpec) -> dict[str, str]:
        return unused_options(self, spec)

    @property
    def torso_options(self) -> dict[str, Any]:
        if self.torso != "impala":
            return {}
        return {"width": self.torso_width, "spectral": self.spectral_norm, "pool": self.torso_pool}


@dataclass(frozen=True)
class CriticModel:
    """How a paper represents returns: as laws of `outputs` numbers, whose means [B] are `mean(law)`.

    `target(ret, discount, law)` is what to learn from a law of what follows; `compare(law, target)` gives the loss and
    the priority, [B] each.
    """

    outputs: int
    mean: Callable[[torch.Tensor], torch.Tensor]
    make_target: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    td_loss: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def make_control_agent(cfg: ControlConfig, spec: EnvSpec, kind: CriticModel) -> Agent:
    """The agent whose critic represents returns in the way of `kind`, under the switches of `cfg`."""
    box = require_box(spec)
    reject_unused_options(cfg, spec)
    normalised = _normalised_leaves(cfg, spec)

    def network() -> nn.Module:
        return actor_critic.make_actor_critic(
            lambda: Encoder(spec.observation, cfg.torso, cfg.norm, **cfg.torso_options), cfg.hidden, box.size,
            kind.outputs, cfg.norm, 1 + cfg.twin, normalised)

    def act(net: nn.Module, obs: Tensors, memory: Memory, arm: ExplorationParams, rng: torch.Generator) -> Decision:
        online = cast(actor_critic.ActorCritic, net)
        action, noise = add_exploration_noise(online.policy(online.normalise(obs)), memory["noise"], arm, rng)
        return Decision(action.view(-1, *box.shape), {"noise": noise})

    def evaluate_actions(net: nn.Module, obs: Tensors, action: torch.Tensor) -> Tensors:
        online = cast(actor_critic.ActorCritic, net)
        seen = online.normalise(obs)
        return {"taken": critic_distributions(online, seen, action.view(len(action), -1)),
                "best": critic_distributions(online, seen, online.policy(seen))}

    def priority(rows: Tensors) -> torch.Tensor:
        """The learner's own formula, its networks being those that chose, as they saw things when they chose."""
        step = n_step(rows["reward"], rows["discount"], rows["last"], cfg.gamma, cfg.n_step)
        item = torch.arange(len(rows["reward"]))
        there = min_by_mean(kind, rows["best"][item, step.row[:, 0]].unbind(1))
        goal = kind.make_target(step.ret[:, 0], step.discount[:, 0], there)
        return torch.stack([kind.td_loss(law, goal)[1] for law in rows["taken"][:, 0].unbind(1)]).mean(0)

    laws = ((1 + cfg.twin, kind.outputs), "float32")
    return Agent(
        network=network, act=act, loss=make_loss(cfg, kind), window=Window(future=cfg.n_step),
        priority_inputs={"taken": laws, "best": laws}, priority=priority, evaluate_actions=evaluate_actions,
        recurrent_state=make_recurrent_state(box),
        param_groups={"policy.": ParamGroup(cfg.policy_rate, cfg.policy_delay)},
        loss_when_frozen=make_loss(cfg, kind, skips_frozen=True) if cfg.policy_delay > 1 else None)


def make_loss(cfg: ControlConfig, kind: CriticModel,
              skips_frozen: bool = False) -> Callable[[nn.Module, nn.Module, Sample, torch.Generator], Loss]:
    """The critics' errors, item by item, and unless it rests the policy's loss beside them."""
    def loss(net: nn.Module, target: nn.Module, batch: Sample, rng: torch.Generator) -> Loss:
        online = cast(actor_critic.ActorCritic, net)
        rows, obs = batch.rows, batch.obs(0)
        step = n_step(rows["reward"], rows["discount"], rows["last"], cfg.gamma, cfg.n_step)
        with torch.no_grad():
            law = target_distribution(cfg, kind, cast(actor_critic.ActorCritic, target), batch.obs(step.row[:, 0]), rng)
            goal = kind.make_target(step.ret[:, 0], step.discount[:, 0], law)
        seen, action = online.normalise(obs), rows["action"][:, 0].reshape(len(rows["action"]), -1)
        critics = critics_of(online)
        features = [critic.features(seen) for critic in critics]
        laws = [critic.distribution(each, action) for critic, each in zip(critics, features, strict=True)]
        found = [kind.td_loss(each, goal) for each in laws]
        per_item = torch.stack([error for error, _ in found]).sum(0)
        priority = torch.stack([urgency for _, urgency in found]).mean(0)
        metrics = {"train/q_mean": kind.mean(laws[0].detach()), "train/priority": priority}
        if skips_frozen:
            return Loss(per_item, priority, None, metrics, online.updated_statistics(obs))
        policy_loss = -kind.mean(critics[0].frozen_distribution(features[0], online.policy(seen))).mean()
        return Loss(per_item, priority, policy_loss, metrics | {"train/policy_loss": policy_loss.detach()},
                    online.updated_statistics(obs))

    return loss


def target_distribution(cfg: ControlConfig, kind: CriticModel, target: actor_critic.ActorCritic, obs: Tensors,
                        rng: torch.Generator) -> torch.Tensor:
    """The law [B, Z] of the target policy's action: of two critics, that with the lower mean."""
    seen = target.normalise(obs)
    action = target.policy(seen)
    if cfg.smoothing:
        noise = torch.randn(action.shape, generator=rng, device=action.device) * cfg.smoothing
        action = (action + noise.clamp(-cfg.smoothing_clip, cfg.smoothing_clip)).clamp(-1, 1)
    return min_by_mean(kind, [critic.distribution(critic.features(seen), action) for critic in critics_of(target)])


def min_by_mean(kind: CriticModel, laws: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of one law, or of two [B, Z], that with the lower mean, item by item."""
    if len(laws) == 1:
        return laws[0]
    one, other = laws
    return torch.where((kind.mean(one) <= kind.mean(other))[:, None], one, other)


def critic_distributions(
    net: actor_critic.ActorCritic, seen: Mapping[str, torch.Tensor], action: torch.Tensor
) -> torch.Tensor:
    """What every critic says of an action: [N, critics, Z]."""
    return torch.stack([critic.distribution(critic.features(seen), action) for critic in critics_of(net)], 1)


def critics_of(net: actor_critic.ActorCritic) -> list[actor_critic.Critic]:
    return [cast(actor_critic.Critic, critic) for critic in net.critics]


def add_exploration_noise(action: torch.Tensor, noise: torch.Tensor, arm: ExplorationParams,
                          rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The action to take [N, A], within ±1, and the noise in it, of which the next step keeps a part.

    With probability ε it is any action; without noise and ε nothing is drawn.
    """
    if arm.sigma is not None:
        fresh = torch.randn(action.shape, generator=rng, device=action.device)
        noise = (1 - arm.theta) * noise + arm.sigma[:, None] * fresh
        action = (action + noise).clamp(-1, 1)
    if bool(arm.epsilon.any()):
        chance = torch.rand(len(action), generator=rng, device=action.device)
        random = 2 * torch.rand(action.shape, generator=rng, device=action.device) - 1
        action = torch.where((chance < arm.epsilon)[:, None], random, action)
    return action, noise


def make_recurrent_state(box: Box) -> RecurrentState:
    """All that is remembered is the noise, which begins at 0 with every episode."""
    def begin(lanes: int, device: torch.device) -> Tensors:
        return {"noise": torch.zeros(lanes, box.size, device=device)}

    def forget(memory: Memory, over: torch.Tensor) -> Memory:
        return {"noise": memory["noise"] * ~over[:, None]}

    return RecurrentState(begin, lambda memory, reward: memory, forget)


def require_box(spec: EnvSpec) -> Box:
    if spec.box is None or not spec.box.size:
        raise UserError(
            f"{spec.id} has {spec.action_text}, and this agent is for continuous ones (Box): use agent.algo=dqn"
        )
    return spec.box


def _normalised_leaves(cfg: ControlConfig, spec: EnvSpec) -> dict[str, Leaf]:
    """The leaves whose running figures are kept."""
    vectors = {name: leaf for name, leaf in spec.observation.items() if leaf.kind == "vector"}
    if cfg.normalise and not vectors:
        raise UserError(f"agent.normalise=true is for vectors, and {spec.id} shows none: leave it out")
    return vectors if cfg.normalise else {}
