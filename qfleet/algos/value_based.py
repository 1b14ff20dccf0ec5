"""Value-based agents: the orthogonal options, each implemented once, and the common update around a return model.

This module is public: an algorithm, in this package or of a user, supplies a `ReturnModel`, which says what its network
predicts of returns, scalar values or distributions, and which loss compares two predictions. Common to all:

    double      the online network selects the bootstrap action                     (van Hasselt et al. 2016)
    dueling     separate streams for value and advantage                            (Wang et al. 2016)
    n_step      n rewards are summed before bootstrapping
    noisy       last dense layers with learned noise, instead of ε                  (Fortunato et al. 2018)
    munchausen  the scaled log-policy is added to the reward, targets are soft      (Vieillard et al. 2020)
    rescale     the network learns h(return) instead of the return                  (Pohlen et al. 2018)

Shapes: B items, N lanes, A actions, T rows of a window, `...` dimensions of a distribution per action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import nn

from qfleet.config import Config as Section
from qfleet.config import Fraction, Positive, PositiveCount, Real
from qfleet.core.agent import Agent, Columns, Decision, ExplorationParams, Loss, Memory, Tensors, epsilon_greedy
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample, Window
from qfleet.maths.bellman import NStep, gather_actions, n_step, scaled_log_policy
from qfleet.maths.value_rescaling import h, h_inverse
from qfleet.networks.custom_encoder import EncoderName, EncoderOptions, check_encoder
from qfleet.networks.encoder import encoder_factory
from qfleet.networks.heads import DuelingHead, Head
from qfleet.networks.noisy import Noise
from qfleet.networks.norms import Norm
from qfleet.networks.torsos import Torso, TorsoPool, TorsoSpectralNorm, TorsoWidth


class ValueBasedConfig(Section):
    """Options that all value-based agents share; an algorithm's `Config` is a subclass with options of its own.

    Examples:
        >>> class Config(ValueBasedConfig):
        ...     expectile: Fraction = Field(0.5, description="weight of positive TD errors")
    """

    algo: str = Field(description="algorithm, by name; changing it resets the recipe's other agent keys")
    gamma: Fraction = Field(0.99, description="discount factor per step")
    n_step: PositiveCount = Field(1, description="n of n-step returns: rewards summed before bootstrapping, steps")
    double: bool = Field(
        True, description="double Q-learning: the online network selects the bootstrap action, the target network "
                          "evaluates it")
    dueling: bool = Field(False, description="dueling network: separate streams for state value and advantages")
    noisy: bool = Field(
        False, description="noisy networks: learned noise in the last hidden layer and the output layer explores "
                           "instead of ε")
    noisy_sigma: Positive = Field(0.5, description="σ₀: initial scale of the noise")
    noisy_epsilon: bool = Field(
        False, description="keep the random actions of the explore section in addition to the noise")
    munchausen: bool = Field(
        False, description="Munchausen: add the scaled log-policy to the reward and bootstrap from a softmax policy")
    munchausen_alpha: Fraction = Field(0.9, description="α: weight of the log-policy in the reward")
    munchausen_temperature: Positive = Field(
        0.03, description="τ: temperature of the softmax policy, in units of return")
    munchausen_floor: Real = Field(-1.0, lt=0, description="l₀: lower bound to which τ log π is clipped")
    rescale: bool = Field(
        False, description="value rescaling: learn h(return) instead of the return; for large rewards that are not "
                           "clipped")
    encoder: EncoderName = "auto"
    encoder_kwargs: EncoderOptions = Field(default_factory=dict)
    torso: Torso = "auto"
    torso_width: TorsoWidth = 1
    torso_pool: TorsoPool = 0
    spectral_norm: TorsoSpectralNorm = False
    hidden: tuple[PositiveCount, ...] = Field((512,), description="widths of the hidden dense layers")
    norm: Norm = Field(
        "none", description="normalisation before each ReLU: none, group (GroupNorm, convolutions only) or layer "
                            "(LayerNorm)")

    def inactive(self) -> dict[str, str]:
        idle = {}
        if self.munchausen:
            idle["double"] = "with agent.munchausen=true, which averages over actions and chooses none"
            if self.munchausen_alpha == 0:
                idle["munchausen_floor"] = "with agent.munchausen_alpha=0, which multiplies it"
        else:
            names = ("munchausen_alpha", "munchausen_temperature", "munchausen_floor")
            idle |= dict.fromkeys(names, "without agent.munchausen=true")
        if not self.noisy:
            idle |= dict.fromkeys(("noisy_sigma", "noisy_epsilon"), "without agent.noisy=true")
        return idle | inactive_encoder_options(self)

    def unused_for(self, spec: EnvSpec) -> dict[str, str]:
        return unused_options(self, spec)

    @property
    def sigma(self) -> float | None:
        """Initial scale of the noise in the last dense layers; None without noisy layers."""
        return self.noisy_sigma if self.noisy else None

    @property
    def torso_options(self) -> dict[str, Any]:
        if self.torso != "impala":
            return {}
        return {"width": self.torso_width, "spectral": self.spectral_norm, "pool": self.torso_pool}


class QNetwork(nn.Module):
    """{leaf: [B, ...]} -> q [B, A], or distributions [B, A, *distribution_shape]; the output is float32."""

    def __init__(self, cfg: ValueBasedConfig, spec: EnvSpec, distribution_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.encoder = encoder_factory(cfg)(spec.observation)
        head = DuelingHead if cfg.dueling else Head
        shape = (spec.num_actions, *distribution_shape)
        self.head = head(self.encoder.features, cfg.hidden, shape, cfg.norm, cfg.sigma)

    def forward(self, obs: Mapping[str, torch.Tensor], noise: Noise | None = None) -> torch.Tensor:
        q: torch.Tensor = self.head(self.encoder(obs, self.head.dtype), noise)
        return q


class Prediction(NamedTuple):
    """Predicted returns of all actions.

    Attributes:
        q: Values [B, A] in units of the return, which determine the chosen action.
        distribution: Predictions [B, A, ...] that the loss compares, in the units that the network learns. A scalar
            value is its own distribution.
        tau: Fractions [B, N] of sampled quantiles, None without sampling.

    Examples:
        >>> prediction = Prediction(q=(logits.softmax(2) * support).sum(2), distribution=logits)  # C51
    """

    q: torch.Tensor
    distribution: torch.Tensor
    tau: torch.Tensor | None = None


class BootstrapTarget(NamedTuple):
    """Target of an action taken: ret + discount · (return of a' in the next state).

    `target_values` computes it for values and quantiles; other distributions compute their own, as C51 does.

    Attributes:
        ret: n-step return [B], including the Munchausen bonus.
        discount: γⁿ [B], 0 after a termination.
        action: Next action a' [B]; None if targets are soft.
        pi: Soft policy [B, A] that a' is drawn from; None if targets are not soft.
        entropy: −τ log π [B, A], which a soft policy adds to the return of each action; None if targets are not
            soft.
    """

    ret: torch.Tensor
    discount: torch.Tensor
    action: torch.Tensor | None
    pi: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


Predict = Callable[[nn.Module, Tensors, Noise | None, torch.Generator], Prediction]
TDLoss = Callable[[Prediction, torch.Tensor, BootstrapTarget, Prediction], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class ReturnModel:
    """Representation of returns: the network, its predictions and their TD loss.

    `make_return_model` builds one whose prediction is the output of a `QNetwork`, which fits most algorithms. All
    functions are pure, and draw random numbers only from `noise` and `rng`.

    Attributes:
        network: Builds the trained module.
        predict_online: (net, obs, noise, rng) -> Prediction of the trained network.
        predict_target: The same of the target network.
        predict_for_acting: The same for action selection; the three differ in the number of sampled quantiles.
        read_prediction: Rebuilds the acting prediction from the columns `priority_inputs`, {name: [N, ...]}.
        priority_inputs: Columns of a prediction that actors keep to compute priorities, name -> (shape, dtype).
        td_loss: (prediction, action, target, next_prediction) -> loss and priority, [B] each. `prediction` is that of
            the trained network, `action` [B] was taken, `next_prediction` is that of the target network in the next
            state. The loss is neither weighted nor averaged, the priority is without gradient.
        values: (net, obs) -> values [B, A] without randomness; None = those of `predict_for_acting`, which then draws
            nothing without noise.

    Examples:
        >>> model = ReturnModel(
        ...     network=lambda: QNetwork(cfg, spec), predict_online=predict, predict_target=predict,
        ...     predict_for_acting=predict, read_prediction=read_prediction, td_loss=td_loss,
        ...     priority_inputs={"distribution": ((spec.num_actions,), "float32")})
    """

    network: Callable[[], nn.Module]
    predict_online: Predict
    predict_target: Predict
    predict_for_acting: Predict
    read_prediction: Callable[[Tensors], Prediction]
    priority_inputs: Columns
    td_loss: TDLoss
    values: Callable[[nn.Module, Tensors], torch.Tensor] | None = None


def make_return_model(
    cfg: ValueBasedConfig, spec: EnvSpec, q_values: Callable[[torch.Tensor], torch.Tensor], td_loss: TDLoss,
    shape: tuple[int, ...] = ()
) -> ReturnModel:
    """Model whose prediction is the output of a `QNetwork`: a value or a distribution per action.

    Args:
        cfg: Options of the agent.
        spec: Spaces of the environment.
        q_values: Values [B, A] in units of the return, of the network's output [B, A, *shape].
        td_loss: Loss and priority, see `ReturnModel`.
        shape: Shape of one action's output; () for a scalar value.

    Returns:
        The model, for `make_value_agent`.

    Examples:
        >>> model = make_return_model(cfg, spec, lambda quantiles: quantiles.mean(2), td_loss, (cfg.quantiles,))
    """
    def read_prediction(columns: Tensors) -> Prediction:
        return Prediction(q_values(columns["distribution"]), columns["distribution"])

    def predict(net: nn.Module, obs: Tensors, noise: Noise | None, rng: torch.Generator) -> Prediction:
        return read_prediction({"distribution": net(obs, noise)})

    return ReturnModel(
        network=lambda: QNetwork(cfg, spec, shape), predict_online=predict, predict_target=predict,
        predict_for_acting=predict, read_prediction=read_prediction, td_loss=td_loss,
        priority_inputs={"distribution": ((spec.num_actions, *shape), "float32")})


def unscale(cfg: ValueBasedConfig, values: torch.Tensor) -> torch.Tensor:
    """Network outputs in units of the return: h⁻¹(values) with `rescale`, else unchanged."""
    return h_inverse(values) if cfg.rescale else values


def rescale(cfg: ValueBasedConfig, values: torch.Tensor) -> torch.Tensor:
    """Returns in the units that the network learns: h(values) with `rescale`, else unchanged."""
    return h(values) if cfg.rescale else values


def n_step_return(cfg: ValueBasedConfig, rows: Tensors) -> NStep:
    """n-step return, discount and bootstrap row of each row of a window."""
    return n_step(rows["reward"], rows["discount"], rows["last"], cfg.gamma, cfg.n_step)


def make_target(
    cfg: ValueBasedConfig, step: NStep, action: torch.Tensor, q_next: torch.Tensor, q_now: torch.Tensor | None
) -> BootstrapTarget:
    """Bootstrap target of the first step of each window.

    `q_next` selects the next action; `q_now` is used by Munchausen only.

    Munchausen: r + α [τ log π(a|s)] clipped to [l₀, 0], then π = softmax(q/τ) with its entropy. With n-step returns
    only the first step gets the bonus.
    """
    ret, discount = step.ret[:, 0], step.discount[:, 0]
    if not cfg.munchausen or q_now is None:
        return BootstrapTarget(ret, discount, q_next.argmax(1))
    bonus = gather_actions(scaled_log_policy(q_now, cfg.munchausen_temperature), action).clamp(min=cfg.munchausen_floor)
    log_pi = scaled_log_policy(q_next, cfg.munchausen_temperature)
    pi = (log_pi / cfg.munchausen_temperature).exp()
    return BootstrapTarget(ret + cfg.munchausen_alpha * bonus, discount, None, pi, -log_pi)


def target_values(cfg: ValueBasedConfig, bootstrap: BootstrapTarget, distribution: torch.Tensor) -> torch.Tensor:
    """y [B, ...] = ret + discount · z(s', a') for values or quantiles z [B, A, ...]; soft: the mean over a' ~ π."""
    def expand_to(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape, *[1] * (like.ndim - x.ndim))

    z = unscale(cfg, distribution)
    if bootstrap.action is not None:
        z_next = gather_actions(z, bootstrap.action)
    else:
        assert bootstrap.pi is not None and bootstrap.entropy is not None
        z_next = (expand_to(bootstrap.pi, z) * (z + expand_to(bootstrap.entropy, z))).sum(1)
    return rescale(cfg, expand_to(bootstrap.ret, z_next) + expand_to(bootstrap.discount, z_next) * z_next)


def make_noise(cfg: ValueBasedConfig, rng: torch.Generator, items: int = 1) -> Noise | None:
    """Noise source of one pass, or None without noisy layers."""
    return Noise(rng, items) if cfg.noisy else None


def make_value_agent(cfg: ValueBasedConfig, spec: EnvSpec, model: ReturnModel) -> Agent:
    """Build an agent that learns returns as represented by `model`, with the options of `cfg`.

    Args:
        cfg: Options of the agent.
        spec: Spaces of the environment.
        model: Network, predictions and loss.

    Returns:
        The agent, for `build` of an algorithm.

    Raises:
        UserError: An option has no effect on this environment, or `agent.encoder` cannot be called.

    Examples:
        A user's loss, named `agent.algo=my_module:SquaredLog`:

        >>> class SquaredLog:
        ...     class Config(ValueBasedConfig): ...
        ...
        ...     @staticmethod
        ...     def build(cfg, spec):
        ...         def td_loss(prediction, action, target, next_prediction):
        ...             q = gather_actions(prediction.distribution, action)
        ...             y = target_values(cfg, target, next_prediction.distribution)
        ...             return (y - q).square().log1p(), (y - q.detach()).abs()
        ...
        ...         return make_value_agent(
        ...             cfg, spec, make_return_model(cfg, spec, lambda q: unscale(cfg, q), td_loss))
    """
    reject_unused_options(cfg, spec)

    def loss(net: nn.Module, target: nn.Module, batch: Sample, rng: torch.Generator) -> Loss:
        action, step = batch.rows["action"][:, 0], n_step_return(cfg, batch.rows)
        obs, obs_next = batch.obs(0), batch.obs(step.row[:, 0])
        prediction = model.predict_online(net, obs, make_noise(cfg, rng), rng)
        with torch.no_grad():
            next_prediction = model.predict_target(target, obs_next, make_noise(cfg, rng), rng)
            q_next, q_now = next_prediction.q, None
            if cfg.munchausen:
                q_now = model.predict_for_acting(target, obs, make_noise(cfg, rng), rng).q
            elif cfg.double:
                q_next = model.predict_for_acting(net, obs_next, make_noise(cfg, rng), rng).q
            bootstrap = make_target(cfg, step, action, q_next, q_now)
        per_item, priority = model.td_loss(prediction, action, bootstrap, next_prediction)
        q_mean = gather_actions(prediction.q.detach(), action)
        return Loss(per_item, priority, metrics={"train/q_mean": q_mean, "train/priority": priority})

    def priority(rows: Tensors) -> torch.Tensor:
        """The learner's formula, with the acting network's predictions at acting time as online and target network."""
        action, step, names = rows["action"][:, 0], n_step_return(cfg, rows), model.priority_inputs
        item = torch.arange(len(action))
        prediction = model.read_prediction({name: rows[name][:, 0] for name in names})
        next_prediction = model.read_prediction({name: rows[name][item, step.row[:, 0]] for name in names})
        bootstrap = make_target(cfg, step, action, next_prediction.q, prediction.q)
        return model.td_loss(prediction, action, bootstrap, next_prediction)[1]

    def act(net: nn.Module, obs: Tensors, memory: Memory, explore: ExplorationParams, rng: torch.Generator) -> Decision:
        noise = make_noise(cfg, rng, len(explore.epsilon)) if explore.network_noise else None
        chosen = model.predict_for_acting(net, obs, noise, rng)
        inputs = {"distribution": chosen.distribution} | ({} if chosen.tau is None else {"tau": chosen.tau})
        return Decision(epsilon_greedy(chosen.q, explore, rng), memory, inputs)

    return Agent(network=model.network, act=act, loss=loss, window=Window(future=cfg.n_step),
                 priority_inputs=model.priority_inputs, priority=priority,
                 q_values=lambda extras: model.read_prediction(extras).q, greedy=partial(greedy, model=model))


def greedy(net: nn.Module, obs: Tensors, memory: Memory, *, model: ReturnModel) -> Decision:
    """The action of the largest value, without noise."""
    if model.values is not None:
        q = model.values(net, obs)
    else:
        q = model.predict_for_acting(net, obs, None, torch.Generator()).q
    return Decision(q.argmax(1), memory, {"q": q})


def unused_options(cfg: Any, spec: EnvSpec) -> dict[str, str]:
    """Network options without effect on this environment's observations, with the message for each."""
    images, own = any(leaf.kind == "image" for leaf in spec.observation.values()), cfg.encoder != "auto"
    convolutions = images and not own and cfg.torso != "mlp"
    found = {}
    if not images and not own and cfg.torso not in ("auto", "mlp"):
        found["torso"] = f"agent.torso={cfg.torso} is for images, and {spec.id} has none: leave it out"
    if cfg.norm == "group" and not convolutions:
        why = "agent.torso=mlp has none" if images else f"{spec.id} has no images"
        why = "agent.encoder replaces those of the torsos" if own else why
        found["norm"] = f"agent.norm=group applies to convolutions, and {why}: use agent.norm=layer, or leave it out"
    if cfg.norm == "layer" and not (cfg.hidden or getattr(cfg, "features", ())) and not convolutions:
        found["norm"] = "agent.norm=layer has no dense layer to normalise: set agent.hidden, or leave it out"
    return found


def inactive_encoder_options(cfg: Any) -> dict[str, str]:
    """Keys of the encoder without effect, with the reason: of a user's module, of the torsos, or of torso=impala."""
    impala = [name for name in ("spectral_norm", "torso_pool", "torso_width") if name in type(cfg).model_fields]
    if cfg.encoder != "auto":
        return dict.fromkeys([*impala, "torso"], "with agent.encoder, which replaces the torsos")
    idle = {"encoder_kwargs": "without agent.encoder"}
    return idle if cfg.torso == "impala" else idle | dict.fromkeys(impala, "unless agent.torso=impala")


def reject_unused_options(cfg: Any, spec: EnvSpec) -> None:
    """Raise UserError for the first option that `unused_options` finds, or an encoder that cannot be called."""
    for why in unused_options(cfg, spec).values():
        raise UserError(why)
    if cfg.encoder != "auto":
        check_encoder(cfg.encoder, cfg.encoder_kwargs)
