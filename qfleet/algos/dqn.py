"""DQN (Mnih et al. 2015) and its orthogonal switches.

Q-learning with a replay memory and a target network: y = r + γ max_a Q⁻(s', a). Switches: double (van Hasselt et
al. 2016) lets the online network choose a; dueling (Wang et al. 2016) splits value and advantage; n-step sums n
rewards before the bootstrap; rescale (Pohlen et al. 2018) learns h(y) instead of y. Prioritised replay is a matter
of `replay.alpha`, exploration of `explore`.
Shapes: B items, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from qfleet.agent import Agent, Arm, Decision, Loss, Memory, Tensors
from qfleet.config import Config as Section
from qfleet.config import Fraction, Positive, PositiveCount
from qfleet.maths import choice
from qfleet.maths.bellman import huber, pick, squared
from qfleet.maths.rescale import h, h_inverse
from qfleet.maths.returns import n_step
from qfleet.nets.encoder import Encoder
from qfleet.nets.heads import DuelingHead, Head
from qfleet.nets.norms import Norm
from qfleet.nets.torsos import Torso
from qfleet.types import EnvSpec, Sample, UserError, Window


class Config(Section):
    """The agent section of a run that trains DQN."""

    algo: Literal["dqn"] = Field("dqn", description="the algorithm")
    gamma: Fraction = Field(0.99, description="discount per step")
    n_step: PositiveCount = Field(1, description="rewards summed before the bootstrap, steps")
    double: bool = Field(True, description="the online network chooses the bootstrap action")
    dueling: bool = Field(False, description="separate streams for value and advantage")
    loss: Literal["huber", "mse"] = Field("huber", description="loss of the temporal-difference error")
    huber_delta: Positive = Field(1.0, description="error beyond which the Huber loss is linear")
    rescale: bool = Field(False, description="learn h(return) instead of the return")
    torso: Torso = Field("auto", description="image torso: auto, a file of nets/torsos, or module:attribute")
    hidden: tuple[PositiveCount, ...] = Field((512,), description="widths of the dense layers")
    norm: Norm = Field("none", description="normalisation before each ReLU: none, group (16) or layer")

    def inactive(self) -> dict[str, str]:
        return {"huber_delta": "with agent.loss=mse"} if self.loss == "mse" else {}


class QNetwork(nn.Module):
    """{leaf: [B, ...]} -> q [B, A], always float32 outside."""

    def __init__(self, cfg: Config, spec: EnvSpec) -> None:
        super().__init__()
        self.encoder = Encoder(spec.observation, cfg.torso, cfg.norm)
        kind = DuelingHead if cfg.dueling else Head
        self.head = kind(self.encoder.features, cfg.hidden, spec.actions, cfg.norm)

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        q: torch.Tensor = self.head(self.encoder(obs, self.head.dtype))
        return q


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The DQN agent for an environment."""
    if not any(leaf.kind == "image" for leaf in spec.observation.values()):
        if cfg.torso not in ("auto", "mlp"):
            raise UserError(f"agent.torso={cfg.torso} is for images, and {spec.id} shows none: leave it out")
        if cfg.norm == "group":
            raise UserError(f"agent.norm=group follows convolutions, and {spec.id} shows no images: use "
                            "agent.norm=layer, or leave it out")

    def loss(net: nn.Module, target: nn.Module, batch: Sample, rng: torch.Generator) -> Loss:
        rows = batch.rows
        step = n_step(rows["reward"], rows["discount"], rows["last"], cfg.gamma, cfg.n_step)
        q_t = pick(net(batch.obs(0)), rows["action"][:, 0])
        with torch.no_grad():
            obs_n = batch.obs(step.row[:, 0])
            q_n = target(obs_n)
            v_n = pick(q_n, net(obs_n).argmax(1)) if cfg.double else q_n.amax(1)
            y_t = step.ret[:, 0] + step.discount[:, 0] * (h_inverse(v_n) if cfg.rescale else v_n)
            y_t = h(y_t) if cfg.rescale else y_t
        per_item = huber(q_t, y_t, cfg.huber_delta) if cfg.loss == "huber" else squared(q_t, y_t)
        q_t = q_t.detach()
        td_abs = (y_t - q_t).abs()
        return Loss(per_item, td_abs, metrics={"train/q_mean": q_t, "train/td_abs": td_abs})

    def priority(rows: Tensors) -> torch.Tensor:
        """|y − q| as the actor saw it when it chose: its own network is online and target network in one."""
        step = n_step(rows["reward"], rows["discount"], rows["last"], cfg.gamma, cfg.n_step)
        v = rows["q"].amax(2).gather(1, step.row[:, :1]).squeeze(1)
        y = step.ret[:, 0] + step.discount[:, 0] * (h_inverse(v) if cfg.rescale else v)
        return ((h(y) if cfg.rescale else y) - pick(rows["q"][:, 0], rows["action"][:, 0])).abs()

    return Agent(network=lambda: QNetwork(cfg, spec), act=epsilon_greedy, loss=loss, window=Window(future=cfg.n_step),
                 hints={"q": ((spec.actions,), "float32")}, priority=priority)


def epsilon_greedy(net: nn.Module, obs: Tensors, memory: Memory, arm: Arm, rng: torch.Generator) -> Decision:
    """The greedy action, or with probability ε any action, lane by lane."""
    q_NA = net(obs)
    return Decision(choice.epsilon_greedy(q_NA, arm.epsilon, rng), memory, {"q": q_NA})
