"""An algorithm of your own: advantage learning (Bellemare et al. 2016), which widens the gap between actions.

    qfleet train CartPole-v1 agent.algo=custom_algorithm:Advantage agent.gap=0.5

Shapes: B items, A actions.
"""

import torch

from qfleet.algos import dqn, value_based
from qfleet.config import Config as Section
from qfleet.config import Fraction, PositiveCount
from qfleet.core.agent import Agent, Decision, Loss, epsilon_greedy
from qfleet.core.replay import Window
from qfleet.maths.bellman import gather_actions, huber


class Advantage:
    """What `agent.algo` names: a `Config` and a `build`."""

    class Config(Section):
        algo: str
        """name of the algorithm"""
        gamma: Fraction = 0.99
        """discount factor per step"""
        gap: Fraction = 0.5
        """α: share of its distance to the best by which an action is made worse"""
        hidden: tuple[PositiveCount, ...] = (256, 256)
        """widths of the dense layers"""

    @staticmethod
    def build(cfg: Config, spec) -> Agent:
        def act(net, obs, memory, params, rng) -> Decision:
            return Decision(epsilon_greedy(net(obs), params, rng), memory)

        def loss(net, target, batch, rng) -> Loss:
            """y = r + γ max q⁻(s', ·) − α (max q⁻(s, ·) − q⁻(s, a))."""
            names = ("action", "reward", "discount")
            action, reward, discount = (batch.rows[name][:, 0] for name in names)
            with torch.no_grad():
                q_BA, q_next_BA = target(batch.obs(0)), target(batch.obs(1))
                behind = q_BA.amax(1) - gather_actions(q_BA, action)
                y = reward + cfg.gamma * discount * q_next_BA.amax(1) - cfg.gap * behind
            q = gather_actions(net(batch.obs(0)), action)
            return Loss(huber(q, y), (y - q.detach()).abs(), metrics={"train/behind": behind})

        def network():
            return value_based.QNetwork(dqn.Config(hidden=cfg.hidden), spec)
        return Agent(network, act, loss, Window())
