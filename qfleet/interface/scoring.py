"""Evaluation of a policy on request: the result, and the environment and rules of the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any

from qfleet import envs
from qfleet.actor.policy import Policy
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.final_score import standard_error
from qfleet.runconfig.build import make_env, with_step_limit
from qfleet.runconfig.run_config import RunConfig
from qfleet.training.evaluation import evaluate


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation over full episodes with unclipped rewards.

    Attributes:
        mean_reward: Mean return.
        std_reward: Standard deviation of the returns.
        episodes: Number of episodes.
        seed: Seed of the episodes.
        protocol: Rules of the evaluation, such as `full episodes`.
        epsilon: Probability of a random action.
        returns: Return of each episode.
        lengths: Length of each episode, steps.
        checkpoint: Path of the checkpoint; None for weights of a run that is being trained.
        device: Device of the network.
        info: Mean of each of `env.info_metrics`, by name.
    """

    mean_reward: float
    std_reward: float
    episodes: int
    seed: int
    protocol: str
    epsilon: float
    returns: list[float]
    lengths: list[int]
    checkpoint: str | None
    device: str = "cpu"
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean return; None for a single episode."""
        return standard_error(self.std_reward, self.episodes)

    def to_json(self) -> dict[str, Any]:
        """Convert the result for `json.dumps`.

        Returns:
            All attributes and the standard error.
        """
        return asdict(self) | {"standard_error": self.standard_error}


def evaluate_policy(policy: Policy, config: RunConfig, episodes: int, seed: int, epsilon: float, lanes: int | None,
                    require_env: Callable[[EnvSpec], None] = lambda spec: None, checkpoint: str | None = None,
                    on_episode: Callable[[int], None] = lambda episodes: None) -> EvalResult:
    """Play full episodes in an environment of its own. `require_env` raises UserError if that does not fit."""
    check_protocol(episodes, lanes, epsilon, seed)
    with closing(make_env(with_step_limit(config.env), lanes or min(episodes, config.eval.lanes))) as env:
        require_env(env.spec)
        score = evaluate(policy, env, episodes, epsilon, seed, on_episode=on_episode)
    return EvalResult(score.mean, score.std, len(score.returns), seed, protocol_of(config), epsilon, score.returns,
                      score.lengths, checkpoint, str(policy.device), score.info)


def check_protocol(episodes: int, lanes: int | None, epsilon: float, seed: int) -> None:
    """Raise UserError for arguments of an evaluation that are out of range."""
    require_positive(episodes=episodes, **({} if lanes is None else {"lanes": lanes}))
    require_probability(epsilon)
    require_seed(seed)


def require_positive(**counts: Any) -> None:
    """Raise UserError unless every count is an integer of at least 1."""
    for name, value in counts.items():
        _require_integer(name, value, 1)


def require_probability(epsilon: Any) -> None:
    """Raise UserError unless epsilon is a number of 0 to 1."""
    if not (isinstance(epsilon, Real) and 0 <= float(epsilon) <= 1):
        raise UserError(f"epsilon={epsilon!r}: must be a probability, 0 to 1")


def require_seed(seed: Any) -> None:
    """Raise UserError unless a seed is an integer of at least 0."""
    _require_integer("seed", seed, 0)


def _require_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise UserError(f"{name}={value!r}: must be an integer of at least {least}")


def protocol_of(config: RunConfig) -> str:
    """Describe the evaluation rules: the Atari protocol, or full episodes of the environment."""
    name = getattr(envs.suite(config.env.id), "protocol", None)
    return f"{name(config.env)}, full games" if name is not None else "full episodes"
