"""IQN (Dabney et al. 2018b): the whole quantile function of the return, sampled wherever it is needed.

Where QR-DQN has one output for each of its fixed levels, this network takes a level τ ~ U[0, 1] as an input,
Z_τ(s, a) = f(ψ(s) ⊙ φ(τ))_a: N levels are regressed to N' levels of the target, and K of them average to the value that
is acted on.
Shapes: B items, A actions, N levels, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from qfleet.algos._value_based import (
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
from qfleet.maths.distributional import cosine_features, pairwise_td_errors, quantile_huber
from qfleet.networks.encoder import Encoder
from qfleet.networks.heads import MLP, DuelingHead, Head
from qfleet.networks.noisy import Noise


class Config(ValueBasedConfig):
    """The agent section of a run that trains IQN."""

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
    """{leaf: [B, ...]} and levels τ [B, N] -> quantiles [B, A, N], float32 outside.

    ψ is the encoder and all hidden layers but the last, f the last one and the output: for pixels and one hidden layer
    the paper's network.
    """

    def __init__(self, cfg: Config, spec: EnvSpec) -> None:
        super().__init__()
        self.cosines = cfg.cosines
        self.encoder = Encoder(spec.observation, cfg.torso, cfg.norm, **cfg.torso_options)
        self.body = MLP(self.encoder.features, cfg.hidden[:-1], cfg.norm)
        self.level = nn.Linear(cfg.cosines, self.body.features)
        kind = DuelingHead if cfg.dueling else Head
        self.head = kind(self.body.features, cfg.hidden[-1:], (spec.num_actions,), cfg.norm, cfg.sigma)

    def forward(self, obs: Mapping[str, torch.Tensor], tau_BN: torch.Tensor, noise: Noise | None) -> torch.Tensor:
        dtype = self.head.dtype
        psi_BF = self.body(self.encoder(obs, dtype))
        phi_BNF = self.level(cosine_features(tau_BN, self.cosines).to(dtype)).relu()
        z_BNA: torch.Tensor = self.head(psi_BF[:, None] * phi_BNF, noise)
        return z_BNA.transpose(1, 2)


def sample_taus(items: int, n: int, rng: torch.Generator) -> torch.Tensor:
    """τ ~ U[0, 1], [items, n]."""
    return torch.rand(items, n, generator=rng, device=rng.device)


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The IQN agent for an environment."""
    def sampling(n: int, k: int) -> Callable[[nn.Module, Tensors, Noise | None, torch.Generator], Prediction]:
        """Look at n levels of the laws, and at k for the values; the fewer are among the more, which costs least."""
        def look(net: nn.Module, obs: Tensors, noise: Noise | None, rng: torch.Generator) -> Prediction:
            items = len(next(iter(obs.values())))
            tau = sample_taus(items, max(n, k), rng)
            z_BAN = net(obs, tau, noise)
            return Prediction(unscale(cfg, z_BAN[:, :, :k]).mean(2), z_BAN[:, :, :n], tau[:, :n])

        return look

    def compare(
        here: Prediction, action: torch.Tensor, goal: BootstrapTarget, there: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantile regression to the target's samples; as priority the mean |δ_ij| of all pairs."""
        theta, y = gather_actions(here.distribution, action), target_values(cfg, goal, there.distribution)
        assert here.tau is not None
        return quantile_huber(theta, here.tau, y, cfg.kappa), pairwise_td_errors(theta.detach(), y).abs().mean((1, 2))

    def view(hints: Tensors) -> Prediction:
        return Prediction(unscale(cfg, hints["law"]).mean(2), hints["law"], hints["tau"])

    n, n_target, k = cfg.samples, cfg.target_samples, cfg.policy_samples
    chooses = cfg.munchausen or not cfg.double  # whether the target network's values decide anything
    return make_value_agent(
        cfg,
        spec,
        ReturnModel(
            network=lambda: QuantileNetwork(cfg, spec),
            predict_online=sampling(n, n),
            predict_target=sampling(n_target, k if chooses else n_target),
            predict_for_acting=sampling(k, k),
            read_prediction=view,
            td_loss=compare,
            priority_inputs={
                "law": ((spec.num_actions, cfg.policy_samples), "float32"),
                "tau": ((cfg.policy_samples,), "float32")},
        ),
    )
