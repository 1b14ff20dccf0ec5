"""Shared code of the agents for continuous actions: deterministic policy gradient with TD3's three improvements.

An algorithm supplies a `CriticModel`: its critic predicts a scalar value or a return distribution. Common to all:

    n_step        n rewards are summed before bootstrapping                              (Barth-Maron et al. 2018)
    twin          two critics; the target uses the lower estimate                        (Fujimoto et al. 2018)
    smoothing     clipped noise on the target policy's action                            (Fujimoto et al. 2018)
    policy_delay  critic updates per policy update                                       (Fujimoto et al. 2018)

The policy loss is −Q(s, μ(s)); its gradient does not reach the critic. Actions lie within ±1; environments rescale
them. Shapes: B items, N lanes, A action dimensions, Z outputs of a distribution (1 for a scalar value).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from pydantic import Field
from torch import nn

from qfleet.algos.value_based import inactive_encoder_options, reject_unused_options, unused_options
from qfleet.config import Config as Section
from qfleet.config import Fraction, NonNegative, Positive, PositiveCount
from qfleet.core.agent import (
    NOISE_COMPONENTS,
    Agent,
    Decision,
    ExplorationParams,
    Loss,
    Memory,
    NoiseProcess,
    ParamGroup,
    RecurrentState,
    Tensors,
)
from qfleet.core.env import Box, EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample, Window
from qfleet.maths.bellman import n_step
from qfleet.networks import actor_critic
from qfleet.networks.custom_encoder import EncoderName, EncoderOptions
from qfleet.networks.encoder import encoder_factory
from qfleet.networks.norms import Norm
from qfleet.networks.torsos import Torso, TorsoPool, TorsoSpectralNorm, TorsoWidth


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
    encoder: EncoderName = "auto"
    encoder_kwargs: EncoderOptions = Field(default_factory=dict)
    torso: Torso = "auto"
    torso_width: TorsoWidth = 1
    torso_pool: TorsoPool = 0
    spectral_norm: TorsoSpectralNorm = False
    hidden: tuple[PositiveCount, ...] = Field(
        (256, 256), description="widths of the hidden dense layers of policy and critics")
    norm: Norm = Field(
        "none", description="normalisation before each ReLU, except in dense layers of the policy: none, group "
                            "(GroupNorm, convolutions only) or layer (LayerNorm)")

    def inactive(self) -> dict[str, str]:
        idle = {} if self.smoothing else {"smoothing_clip": "without agent.smoothing"}
        return idle | inactive_encoder_options(self)

    def unused_for(self, spec: EnvSpec) -> dict[str, str]:
        return unused_options(self, spec)

    @property
    def torso_options(self) -> dict[str, Any]:
        if self.torso != "impala":
            return {}
        return {"width": self.torso_width, "spectral": self.spectral_norm, "pool": self.torso_pool}


@dataclass(frozen=True)
class CriticModel:
    """Representation of returns: distributions of `outputs` floats, whose means [B] are `mean(distribution)`.

    `make_target(ret, discount, distribution)` computes the training target from the distribution at the next state;
    `td_loss(distribution, target)` returns the loss and the priority, [B] each.
    """

    outputs: int
    mean: Callable[[torch.Tensor], torch.Tensor]
    make_target: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    td_loss: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def make_control_agent(cfg: ControlConfig, spec: EnvSpec, model: CriticModel) -> Agent:
    """Build an agent whose critic follows `model`, with the options of `cfg`."""
    box = require_box(spec)
    reject_unused_options(cfg, spec)

    def network() -> nn.Module:
        return actor_critic.make_actor_critic(
            partial(encoder_factory(cfg), spec.observation), cfg.hidden, box.size, model.outputs, cfg.norm,
            1 + cfg.twin)

    def act(net: nn.Module, obs: Tensors, memory: Memory, explore: ExplorationParams, rng: torch.Generator) -> Decision:
        online = cast(actor_critic.ActorCritic, net)
        action, noise = add_exploration_noise(online.policy(obs), memory["noise"], explore, rng)
        return Decision(action.view(-1, *box.shape), {"noise": noise})

    def evaluate_actions(net: nn.Module, obs: Tensors, action: torch.Tensor) -> Tensors:
        online = cast(actor_critic.ActorCritic, net)
        return {"taken": critic_distributions(online, obs, action.view(len(action), -1)),
                "best": critic_distributions(online, obs, online.policy(obs))}

    def priority(rows: Tensors) -> torch.Tensor:
        """The learner's formula, with the acting networks' predictions at acting time as online and target network."""
        step = n_step(rows["reward"], rows["discount"], rows["last"], cfg.gamma, cfg.n_step)
        item = torch.arange(len(rows["reward"]))
        next_distribution = min_by_mean(model, rows["best"][item, step.row[:, 0]].unbind(1))
        y = model.make_target(step.ret[:, 0], step.discount[:, 0], next_distribution)
        return torch.stack([model.td_loss(taken, y)[1] for taken in rows["taken"][:, 0].unbind(1)]).mean(0)

    distribution_column = ((1 + cfg.twin, model.outputs), "float32")
    return Agent(
        network=network, act=act, loss=make_loss(cfg, model), window=Window(future=cfg.n_step),
        priority_inputs={"taken": distribution_column, "best": distribution_column}, priority=priority,
        evaluate_actions=evaluate_actions, recurrent_state=make_recurrent_state(box),
        param_groups={"policy.": ParamGroup(cfg.policy_rate, cfg.policy_delay)},
        loss_when_frozen=make_loss(cfg, model, skips_frozen=True) if cfg.policy_delay > 1 else None,
        greedy=partial(greedy, box=box))


def greedy(net: nn.Module, obs: Tensors, memory: Memory, *, box: Box) -> Decision:
    """The policy's action, without noise."""
    online = cast(actor_critic.ActorCritic, net)
    return Decision(online.policy(obs).view(-1, *box.shape))


def make_loss(cfg: ControlConfig, model: CriticModel,
              skips_frozen: bool = False) -> Callable[[nn.Module, nn.Module, Sample, torch.Generator], Loss]:
    """Per-item critic losses, summed over critics, plus the policy loss unless `skips_frozen`."""
    def loss(net: nn.Module, target: nn.Module, batch: Sample, rng: torch.Generator) -> Loss:
        online = cast(actor_critic.ActorCritic, net)
        rows, obs = batch.rows, batch.obs(0)
        step = n_step(rows["reward"], rows["discount"], rows["last"], cfg.gamma, cfg.n_step)
        with torch.no_grad():
            next_distribution = target_distribution(
                cfg, model, cast(actor_critic.ActorCritic, target), batch.obs(step.row[:, 0]), rng)
            y = model.make_target(step.ret[:, 0], step.discount[:, 0], next_distribution)
        action = rows["action"][:, 0].reshape(len(rows["action"]), -1)
        critics = critics_of(online)
        features = [critic.features(obs) for critic in critics]
        distributions = [critic.distribution(each, action) for critic, each in zip(critics, features, strict=True)]
        losses = [model.td_loss(each, y) for each in distributions]
        per_item = torch.stack([error for error, _ in losses]).sum(0)
        priority = torch.stack([each for _, each in losses]).mean(0)
        metrics = {"train/q_mean": model.mean(distributions[0].detach()), "train/priority": priority}
        if skips_frozen:
            return Loss(per_item, priority, None, metrics)
        policy_loss = -model.mean(critics[0].frozen_distribution(features[0], online.policy(obs))).mean()
        return Loss(per_item, priority, policy_loss, metrics | {"train/policy_loss": policy_loss.detach()})

    return loss


def target_distribution(cfg: ControlConfig, model: CriticModel, target: actor_critic.ActorCritic, obs: Tensors,
                        rng: torch.Generator) -> torch.Tensor:
    """Return distribution [B, Z] of the target policy's action; with two critics, the one with the lower mean."""
    action = target.policy(obs)
    if cfg.smoothing:
        noise = torch.randn(action.shape, generator=rng, device=action.device) * cfg.smoothing
        action = (action + noise.clamp(-cfg.smoothing_clip, cfg.smoothing_clip)).clamp(-1, 1)
    return min_by_mean(model, [critic.distribution(critic.features(obs), action)
                               for critic in critics_of(target)])


def min_by_mean(model: CriticModel, distributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """The only distribution, or of two [B, Z] the one with the lower mean, per item."""
    if len(distributions) == 1:
        return distributions[0]
    one, other = distributions
    return torch.where((model.mean(one) <= model.mean(other))[:, None], one, other)


def critic_distributions(
    net: actor_critic.ActorCritic, obs: Mapping[str, torch.Tensor], action: torch.Tensor
) -> torch.Tensor:
    """Return distributions of an action under every critic: [N, critics, Z]."""
    return torch.stack([critic.distribution(critic.features(obs), action) for critic in critics_of(net)], 1)


def critics_of(net: actor_critic.ActorCritic) -> list[actor_critic.Critic]:
    return [cast(actor_critic.Critic, critic) for critic in net.critics]


def add_exploration_noise(action: torch.Tensor, noise: torch.Tensor, explore: ExplorationParams,
                          rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Action to take [N, A], clipped to ±1, and the next state of the noise [N, A, K].

    With probability ε the action is uniformly random. Without noise and ε nothing is drawn.
    """
    if explore.sigma is not None:
        noise = next_noise(noise, explore.sigma, explore.process, rng)
        action = (action + noise.sum(2)).clamp(-1, 1)
    if bool(explore.epsilon.any()):
        chance = torch.rand(len(action), generator=rng, device=action.device)
        random = 2 * torch.rand(action.shape, generator=rng, device=action.device) - 1
        action = torch.where((chance < explore.epsilon)[:, None], random, action)
    return action, noise


def next_noise(noise: torch.Tensor, sigma: torch.Tensor, process: NoiseProcess, rng: torch.Generator) -> torch.Tensor:
    """The state after `noise` [N, A, K] with scales `sigma` [N]. A component that is 0 is at the start of an episode.

    The K components may be more than the process has; the others stay 0.
    """
    used, unused = len(process.decay), noise.shape[2] - len(process.decay)
    fresh = sigma[:, None, None] * torch.randn((*noise.shape[:2], used), generator=rng, device=noise.device)
    before = noise[..., :used]
    after = process.decay * before + torch.where(before == 0, process.start, process.gain) * fresh
    return torch.nn.functional.pad(after, (0, unused)) if unused else after


def make_recurrent_state(box: Box) -> RecurrentState:
    """State of the exploration noise, reset to 0 at the start of every episode."""
    def initial(lanes: int, device: torch.device) -> Tensors:
        return {"noise": torch.zeros(lanes, box.size, NOISE_COMPONENTS, device=device)}

    def reset(memory: Memory, over: torch.Tensor) -> Memory:
        return {"noise": memory["noise"] * ~over[:, None, None]}

    return RecurrentState(initial, lambda memory, reward: memory, reset)


def require_box(spec: EnvSpec) -> Box:
    if spec.box is None or not spec.box.size:
        raise UserError(
            f"{spec.id} has {spec.action_text}, and this agent needs continuous ones (Box): use agent.algo=dqn"
        )
    return spec.box
