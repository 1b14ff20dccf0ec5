"""IQN (Dabney et al. 2018b): the quantile function of the return at sampled fractions.

QR-DQN has one output per fixed fraction; this network takes a fraction τ ~ U[0, 1] as input,
Z_τ(s, a) = f(ψ(s) ⊙ φ(τ))_a. N fractions are regressed to N' fractions of the target; the mean of K fractions is the
value of an action.
Shapes: B items, A actions, N fractions, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from qfleet.algos.value_based import (
    BootstrapTarget,
    Prediction,
    ReturnModel,
    ValueBasedConfig,
    make_value_agent,
    target_values,
    unscale,
)
from qfleet.config import NonNegative, PositiveCount
from qfleet.core.agent import Agent, Tensors
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import gather_actions
from qfleet.maths.distributional import cosine_features, midpoints, pairwise_td_errors, quantile_huber
from qfleet.networks.encoder import encoder_factory
from qfleet.networks.heads import MLP, DuelingHead, Head
from qfleet.networks.noisy import Noise


class Config(ValueBasedConfig):
    """Agent section for IQN."""

    algo: Literal["iqn"] = Field(
        "iqn", description="algorithm, by name; changing it resets the recipe's other agent keys")
    samples: PositiveCount = Field(
        8, description="N: quantile fractions sampled per item for the online network's loss")
    target_samples: PositiveCount = Field(8, description="N': quantile fractions sampled per item for the target")
    policy_samples: PositiveCount = Field(32, description="K: quantile fractions averaged into the value of an action")
    cosines: PositiveCount = Field(64, description="cosine features that embed a quantile fraction")
    kappa: NonNegative = Field(
        1.0, description="κ of the quantile Huber loss: absolute error above which it is linear; 0 = plain quantile "
                         "loss")


class QuantileNetwork(nn.Module):
    """{leaf: [B, ...]} and fractions τ [B, N] -> quantiles [B, A, N]; the output is float32.

    ψ is the encoder and all hidden layers but the last, f the last hidden layer and the output: the paper's network for
    images and one hidden layer.
    """

    def __init__(self, cfg: Config, spec: EnvSpec) -> None:
        super().__init__()
        self.cosines = cfg.cosines
        self.encoder = encoder_factory(cfg)(spec.observation)
        self.body = MLP(self.encoder.features, cfg.hidden[:-1], cfg.norm)
        self.level = nn.Linear(cfg.cosines, self.body.features)
        head = DuelingHead if cfg.dueling else Head
        self.head = head(self.body.features, cfg.hidden[-1:], (spec.num_actions,), cfg.norm, cfg.sigma)

    def forward(self, obs: Mapping[str, torch.Tensor], tau_BN: torch.Tensor, noise: Noise | None) -> torch.Tensor:
        dtype = self.head.dtype
        psi_BF = self.body(self.encoder(obs, dtype))
        phi_BNF = self.level(cosine_features(tau_BN, self.cosines).to(dtype)).relu()
        z_BNA: torch.Tensor = self.head(psi_BF[:, None] * phi_BNF, noise)
        return z_BNA.transpose(1, 2)


def sample_taus(items: int, n: int, rng: torch.Generator) -> torch.Tensor:
    """τ ~ U[0, 1], [items, n]."""
    return torch.rand(items, n, generator=rng, device=rng.device)


def make_predict(
    cfg: Config, n: int, k: int
) -> Callable[[nn.Module, Tensors, Noise | None, torch.Generator], Prediction]:
    """Predictor with n fractions for the distribution and k for the values.

    The smaller set is a prefix of the larger, so that one pass of max(n, k) fractions serves both.
    """
    def predict(net: nn.Module, obs: Tensors, noise: Noise | None, rng: torch.Generator) -> Prediction:
        items = len(next(iter(obs.values())))
        tau = sample_taus(items, max(n, k), rng)
        z_BAN = net(obs, tau, noise)
        return Prediction(unscale(cfg, z_BAN[:, :, :k]).mean(2), z_BAN[:, :, :n], tau[:, :n])

    return predict


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the IQN agent."""
    def td_loss(
        prediction: Prediction, action: torch.Tensor, bootstrap: BootstrapTarget, next_prediction: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantile regression to the target's samples; the priority is the mean |δ_ij| over all pairs."""
        theta = gather_actions(prediction.distribution, action)
        y = target_values(cfg, bootstrap, next_prediction.distribution)
        assert prediction.tau is not None
        per_item = quantile_huber(theta, prediction.tau, y, cfg.kappa)
        return per_item, pairwise_td_errors(theta.detach(), y).abs().mean((1, 2))

    def values(net: nn.Module, obs: Tensors) -> torch.Tensor:
        """Values from evenly spaced fractions instead of sampled ones."""
        tau = midpoints(cfg.policy_samples, next(net.parameters()).device)
        return unscale(cfg, net(obs, tau.unsqueeze(0), None)).mean(2)

    def read_prediction(columns: Tensors) -> Prediction:
        return Prediction(unscale(cfg, columns["distribution"]).mean(2), columns["distribution"], columns["tau"])

    n, n_target, k = cfg.samples, cfg.target_samples, cfg.policy_samples
    selects = cfg.munchausen or not cfg.double  # the target network's values select actions
    return make_value_agent(
        cfg,
        spec,
        ReturnModel(
            network=lambda: QuantileNetwork(cfg, spec),
            predict_online=make_predict(cfg, n, n),
            predict_target=make_predict(cfg, n_target, k if selects else n_target),
            predict_for_acting=make_predict(cfg, k, k),
            read_prediction=read_prediction,
            td_loss=td_loss,
            priority_inputs={
                "distribution": ((spec.num_actions, cfg.policy_samples), "float32"),
                "tau": ((cfg.policy_samples,), "float32")},
            values=values,
        ),
    )
