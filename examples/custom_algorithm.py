"""An algorithm of your own: Munchausen DQN (Vieillard et al. 2020), which adds the log-policy to the reward.

    qfleet train CartPole-v1 agent.algo=custom_algorithm:Munchausen agent.temperature=0.03

Shapes: B items, A actions.
"""

import torch

from qfleet.agent import Agent, Loss
from qfleet.algos import dqn
from qfleet.config import Config as Section
from qfleet.config import Fraction, Positive, PositiveCount
from qfleet.maths.bellman import huber, pick
from qfleet.types import Window


class Munchausen:
    """What `agent.algo` names: a `Config` and a `build`."""

    class Config(Section):
        algo: str
        """the algorithm"""
        gamma: Fraction = 0.99
        """discount per step"""
        temperature: Positive = 0.03
        """τ: softness of the policy that the targets follow"""
        alpha: Fraction = 0.9
        """share of the log-policy that is added to the reward"""
        hidden: tuple[PositiveCount, ...] = (256, 256)
        """widths of the dense layers"""

    @staticmethod
    def build(cfg: Config, spec) -> Agent:
        def loss(net, target, batch, rng) -> Loss:
            """y = r + α τ log π(a|s) + γ Σ π(a'|s') (q⁻(s', a') − τ log π(a'|s')), where π = softmax(q⁻ / τ)."""
            action, reward, discount = (batch.rows[name][:, 0] for name in ("action", "reward", "discount"))
            with torch.no_grad():
                q_BA, q_next_BA = target(batch.obs(0)), target(batch.obs(1))
                log_pi, log_pi_next = (cfg.temperature * torch.log_softmax(q / cfg.temperature, 1)
                                       for q in (q_BA, q_next_BA))
                value = ((log_pi_next / cfg.temperature).exp() * (q_next_BA - log_pi_next)).sum(1)
                bonus = pick(log_pi, action).clamp(-1, 0)
                y = reward + cfg.alpha * bonus + cfg.gamma * discount * value
            q = pick(net(batch.obs(0)), action)
            return Loss(huber(q, y), (y - q.detach()).abs(), metrics={"train/log_policy": bonus})

        return Agent(lambda: dqn.QNetwork(dqn.Config(hidden=cfg.hidden), spec), dqn.epsilon_greedy, loss, Window())
