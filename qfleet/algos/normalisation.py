"""Running normalisation of observations and rewards, for any agent (as VecNormalize of Stable-Baselines3).

    observation   (x − mean) / √(var + 1e-8), clipped; per value of every vector
    reward        r / √(var(G) + 1e-8), clipped; G ← γ G + r is the discounted sum of the rewards of an episode so far

Replay and chunks hold raw rows; the agent normalises them with the newest statistics, when it acts and when it learns.
The statistics are buffers of its network (`ROW_MOMENTS`), which the learner updates from new rows. Actors keep G,
which depends on the order of steps, as recurrent state and store it as a column.

Shapes: N lanes, R rows of a chunk, K statistics: the values of all vectors, then the return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import nn

from qfleet.config import Config as Section
from qfleet.config import Positive
from qfleet.core.agent import (
    LAST_REWARD,
    ROW_MOMENTS,
    Agent,
    Decision,
    ExplorationParams,
    Loss,
    Memory,
    RecurrentState,
    Tensors,
)
from qfleet.core.env import OBS_PREFIX, EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample

EPSILON = 1e-8
"""Added to variances; the value of VecNormalize."""

RETURN, SCALE = "discounted_return", "reward_scale"
"""Columns: G before the reward of the row, and the deviation of G by which the actor divides. Also recurrent state."""


class NormaliseConfig(Section):
    """The normalise section: running normalisation of observations and rewards, for every agent."""

    observations: bool = Field(
        False, description="subtract the running mean from vector observations and divide by the running standard "
                           "deviation; images and categories stay as they are")
    rewards: bool = Field(
        False, description="divide rewards by the running standard deviation of the discounted return; reported "
                           "returns stay unscaled")
    observation_clip: Positive = Field(10.0, description="bound on absolute normalised observations")
    reward_clip: Positive = Field(10.0, description="bound on absolute normalised rewards")

    @property
    def active(self) -> bool:
        return self.observations or self.rewards

    def inactive(self) -> dict[str, str]:
        idle = {} if self.observations else {"observation_clip": "without normalise.observations=true"}
        return idle if self.rewards else idle | {"reward_clip": "without normalise.rewards=true"}

    def unused_for(self, spec: EnvSpec) -> dict[str, str]:
        """Options without effect on this environment's observations, with the message for each."""
        if not self.observations or any(leaf.kind == "vector" for leaf in spec.observation.values()):
            return {}
        return {"observations": f"normalise.observations=true is for vectors, and {spec.id} has only images or "
                                "categories, which are scaled and one-hot encoded anyway: leave it out"}


@dataclass(frozen=True)
class NormalisedSample(Sample):
    """Batch with normalised rewards in `rows`, and observations normalised on access; `rows` has no observations."""

    raw: Sample = field(kw_only=True)
    normalise: Callable[[Tensors], Tensors] = field(kw_only=True)

    @property
    def leaves(self) -> Tensors:
        return self.normalise(self.raw.leaves)

    def obs(self, row: int | torch.Tensor) -> Tensors:
        return self.normalise(self.raw.obs(row))


class Normalisation:
    """Normalises with the statistics in a network's buffers, and says which values of a row they describe."""

    def __init__(self, cfg: NormaliseConfig, spec: EnvSpec, gamma: float) -> None:
        self.cfg, self.gamma = cfg, gamma
        vectors = [name for name, leaf in spec.observation.items() if cfg.observations and leaf.kind == "vector"]
        self.shapes = {name: spec.observation[name].shape for name in vectors}
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        self.sizes = [*sizes, *([1] if cfg.rewards else [])]

    def add_buffers(self, net: nn.Module) -> nn.Module:
        """Register the statistics, of no rows yet."""
        size = sum(self.sizes)
        for name, shape in zip(ROW_MOMENTS, ((), (size,), (size,)), strict=True):
            net.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        return net

    def row_values(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Values [R, K] of the rows of a chunk that the statistics describe."""
        rows = len(columns["reward"])
        parts = [columns[OBS_PREFIX + name].reshape(rows, -1) for name in self.shapes]
        if self.cfg.rewards:
            parts.append((self.gamma * columns[RETURN].astype(np.float64) + columns["reward"])[:, None])
        return np.concatenate(parts, 1, dtype=np.float64)

    def observations(self, net: nn.Module, obs: Tensors) -> Tensors:
        """Observations with normalised vectors [..., *shape]; the other leaves are unchanged."""
        if not self.shapes:
            return obs
        means, deviations = net.get_buffer(ROW_MOMENTS[1]).float().split(self.sizes), self._deviations(net)
        found, clip = dict(obs), self.cfg.observation_clip
        for (name, shape), mean, deviation in zip(self.shapes.items(), means, deviations, strict=False):
            centred = obs[name].float() - mean.view(shape)
            found[name] = (centred / deviation.view(shape)).clamp(-clip, clip)
        return found

    def scale(self, net: nn.Module) -> torch.Tensor:
        """Deviation of the discounted return, a scalar tensor."""
        return self._deviations(net)[-1].squeeze(0)

    def rewards(self, reward: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (reward / scale).clamp(-self.cfg.reward_clip, self.cfg.reward_clip)

    def batch(self, net: nn.Module, batch: Sample) -> Sample:
        rows = {name: value for name, value in batch.rows.items() if not name.startswith(OBS_PREFIX)}
        if self.cfg.rewards:
            rows["reward"] = self.rewards(rows["reward"], self.scale(net))
        return NormalisedSample(batch.keys, batch.weight, rows, batch.max_weight, raw=batch,
                                normalise=lambda obs: self.observations(net, obs))

    def _deviations(self, net: nn.Module) -> tuple[torch.Tensor, ...]:
        """Standard deviations, by leaf; 1 before the first row."""
        count, square = net.get_buffer(ROW_MOMENTS[0]), net.get_buffer(ROW_MOMENTS[2])
        variance = torch.where(count > 0, square / count.clamp(min=1), 1.0)
        return (variance + EPSILON).sqrt().float().split(self.sizes)


LossFn = Callable[[nn.Module, nn.Module, Sample, torch.Generator], Loss]


def normalised(agent: Agent, cfg: NormaliseConfig, spec: EnvSpec, gamma: float | None) -> Agent:
    """The agent with normalised inputs; `agent` itself if nothing is to be normalised.

    Args:
        agent: any agent; it sees normalised observations and rewards only
        cfg: what to normalise
        spec: spaces of the environment
        gamma: discount factor of the return that scales rewards; None if the agent has none

    Raises:
        UserError: an option has no effect on this environment, or rewards have no discount factor.
    """
    if not cfg.active:
        return agent
    for why in cfg.unused_for(spec).values():
        raise UserError(why)
    if cfg.rewards and gamma is None:
        raise UserError("normalise.rewards=true needs the discount factor agent.gamma, and this algorithm has none: "
                        "add it to its Config, or leave normalise.rewards out")
    by = Normalisation(cfg, spec, gamma or 0.0)

    def act(net: nn.Module, obs: Tensors, memory: Memory, explore: ExplorationParams, rng: torch.Generator) -> Decision:
        return agent.act(net, by.observations(net, obs), memory, explore, rng)

    def evaluate_actions(net: nn.Module, obs: Tensors, action: torch.Tensor) -> Tensors:
        assert agent.evaluate_actions is not None
        return agent.evaluate_actions(net, by.observations(net, obs), action)

    def greedy(net: nn.Module, obs: Tensors, memory: Memory) -> Decision:
        assert agent.greedy is not None
        return agent.greedy(net, by.observations(net, obs), memory)

    found = replace(
        agent, network=lambda: by.add_buffers(agent.network()), act=act, loss=_normalised_loss(agent.loss, by),
        loss_when_frozen=None if agent.loss_when_frozen is None else _normalised_loss(agent.loss_when_frozen, by),
        evaluate_actions=agent.evaluate_actions and evaluate_actions, greedy=agent.greedy and greedy,
        row_values=by.row_values)
    return _with_scaled_rewards(found, by) if cfg.rewards else found


def _normalised_loss(loss: LossFn, by: Normalisation) -> LossFn:
    """Online and target network get the same inputs: those of the online network's statistics."""

    def normalised_loss(net: nn.Module, target: nn.Module, batch: Sample, rng: torch.Generator) -> Loss:
        found = loss(net, target, by.batch(net, batch), rng)
        scale = {"train/reward_scale": by.scale(net)} if by.cfg.rewards else {}
        return replace(found, metrics={**found.metrics, **scale})

    return normalised_loss


def _with_scaled_rewards(agent: Agent, by: Normalisation) -> Agent:
    """The agent with scaled rewards in recurrent state and priorities, and with values in units of the raw return."""

    def act(net: nn.Module, obs: Tensors, memory: Memory, explore: ExplorationParams, rng: torch.Generator) -> Decision:
        scale, inner = by.scale(net), None if agent.recurrent_state is None else _without_own(memory)
        decision = agent.act(net, obs, inner, explore, rng)
        columns = {RETURN: memory[RETURN], SCALE: scale.expand(len(decision.action)).clone()}
        own = {RETURN: memory[RETURN], SCALE: scale}
        return Decision(decision.action, (decision.memory or {}) | own, decision.extras | columns)

    def priority(rows: Tensors) -> torch.Tensor:
        assert agent.priority is not None
        scale = torch.where(rows[SCALE] > 0, rows[SCALE], 1.0)  # 0 in padding
        return agent.priority(rows | {"reward": by.rewards(rows["reward"], scale)})

    def q_values(extras: Tensors) -> torch.Tensor:
        assert agent.q_values is not None
        return agent.q_values(extras) * extras[SCALE].unsqueeze(1)

    def greedy(net: nn.Module, obs: Tensors, memory: Memory) -> Decision:
        assert agent.greedy is not None
        scale = by.scale(net)
        if memory and LAST_REWARD in memory:
            memory = memory | {LAST_REWARD: by.rewards(memory[LAST_REWARD], scale)}
        decision = agent.greedy(net, obs, memory)
        values = {"q": decision.extras["q"] * scale} if "q" in decision.extras else {}
        return replace(decision, extras=decision.extras | values)

    return replace(
        agent, act=act, priority=agent.priority and priority, q_values=agent.q_values and q_values,
        greedy=agent.greedy and greedy, columns={**agent.columns, RETURN: ((), "float32")},
        priority_inputs={**agent.priority_inputs, SCALE: ((), "float32")} if agent.priority else agent.priority_inputs,
        recurrent_state=_return_state(agent.recurrent_state, by))


def _without_own(memory: Memory) -> dict[str, Any]:
    return {name: value for name, value in memory.items() if name not in (RETURN, SCALE)}


def _return_state(inner: RecurrentState | None, by: Normalisation) -> RecurrentState:
    """Recurrent state with G [N], and with the scale of the last action, by which `inner` gets its rewards."""

    def initial(lanes: int, device: torch.device) -> Memory:
        own = {RETURN: torch.zeros(lanes, device=device), SCALE: torch.ones((), device=device)}
        return own | ({} if inner is None else inner.initial(lanes, device))

    def observe(memory: Memory, reward: torch.Tensor) -> Memory:
        before = memory[RETURN]
        # A trained agent may be asked for other numbers of lanes; only training needs G.
        before = before if len(before) == len(reward) else torch.zeros_like(reward)
        own = {RETURN: by.gamma * before + reward, SCALE: memory[SCALE]}
        if inner is None:
            return own
        return inner.observe(_without_own(memory), by.rewards(reward, memory[SCALE])) | own

    def reset(memory: Memory, over: torch.Tensor) -> Memory:
        own = {RETURN: torch.where(over, 0.0, memory[RETURN]), SCALE: memory[SCALE]}
        return own if inner is None else inner.reset(_without_own(memory), over) | own

    return RecurrentState(initial, observe, reset, () if inner is None else inner.persistent)
