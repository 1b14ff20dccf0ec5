"""A loss of your own: values as two-hot histograms, as in MuZero (Schrittwieser et al. 2020), with every switch.

    qfleet train cartpole agent.algo=custom_loss:TwoHot agent.v_min=0 agent.v_max=100 agent.dueling=true

Shapes: B items, A actions, Z atoms of the support.
"""

import torch
from pydantic import Field

from qfleet.algos.categorical import CategoricalConfig
from qfleet.algos.value_based import ValueBasedConfig, make_return_model, make_value_agent, target_values, unscale
from qfleet.config import Fraction
from qfleet.maths.bellman import gather_actions
from qfleet.maths.distributional import categorical_projection, cross_entropy


class TwoHot:
    """What `agent.algo` names: a `Config` and a `build`."""

    class Config(CategoricalConfig, ValueBasedConfig):
        smoothing: Fraction = Field(
            0.01, description="share of the target that is spread over all atoms")

    @staticmethod
    def build(cfg: Config, spec):
        def values(logits: torch.Tensor) -> torch.Tensor:
            return (logits.softmax(-1) * cfg.support(logits)).sum(-1)  # [...]

        def td_loss(prediction, action, target, next_prediction):
            """Loss and priority [B]: the target y falls between two atoms, and is divided among them."""
            logits = gather_actions(prediction.distribution, action)  # [B, Z]
            y = target_values(cfg, target, values(next_prediction.distribution))
            one = torch.ones_like(y[:, None])
            two_hot = categorical_projection(y[:, None], one, cfg.support(logits))
            m = (1 - cfg.smoothing) * two_hot + cfg.smoothing / cfg.atoms
            return cross_entropy(logits, m), (y - values(logits.detach())).abs()

        def q_values(logits: torch.Tensor) -> torch.Tensor:
            return unscale(cfg, values(logits))

        model = make_return_model(cfg, spec, q_values, td_loss, (cfg.atoms,))
        return make_value_agent(cfg, spec, model)
