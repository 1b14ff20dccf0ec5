"""The Python face of qfleet: train, resume, evaluate, load, roll out, export. The command line calls these and prints.

    import qfleet
    result = qfleet.train("cartpole", ["seed=3"])
    agent = qfleet.load(result.directory)
    action = agent.act(observation)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qfleet import recipe, session
from qfleet.agent import Arm
from qfleet.assemble import describe_plan, make_agent, make_env, settle
from qfleet.config import parse_mapping, validate
from qfleet.explore.constant import Constant
from qfleet.recipe import RunConfig
from qfleet.roles.evaluator import evaluate as judge
from qfleet.roles.metrics import Sink
from qfleet.roles.policy import Policy
from qfleet.roles.seeds import lane_seeds
from qfleet.runs.checkpoint import Checkpoint, export_policy
from qfleet.runs.directory import RunDirectory
from qfleet.runs.find import Place, Which, find_checkpoint
from qfleet.session import TrainResult
from qfleet.types import EnvSpec, UserError


@dataclass(frozen=True)
class EvalResult:
    """Whole, unclipped episodes of frozen weights. `protocol` names the rules that were played by."""

    mean_reward: float
    std_reward: float
    episodes: int
    seed: int
    protocol: str
    epsilon: float
    returns: list[float]
    lengths: list[int]
    checkpoint: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Step:
    """One step of a rollout: the picture after it, its unclipped reward, and whether it ended its episode."""

    frame: np.ndarray | None
    reward: float
    episode: int
    done: bool


def train(config: RunConfig | Mapping[str, Any] | Place, overrides: Sequence[str] = (), *,
          sinks: Sequence[Sink] = (), provenance: Mapping[str, str] | None = None) -> TrainResult:
    """Train a new run. `config` is a RunConfig, nested settings, or the name of a recipe, file or environment."""
    if isinstance(config, Mapping):
        config = validate(RunConfig, dict(config), "config")
    if not isinstance(config, RunConfig):
        resolved = recipe.resolve(str(config), list(overrides))
        config, provenance = resolved.config, resolved.provenance
    elif overrides:
        raise UserError("overrides belong to a recipe, file or environment id; this config is complete already")
    return session.start(config, sinks, provenance or {})


def resume(run: Place, overrides: Sequence[str] = (), *, sinks: Sequence[Sink] = ()) -> TrainResult:
    """Continue a run from its newest valid checkpoint; some keys may change, see `recipe.RESUMABLE`."""
    directory = RunDirectory.open(run)
    old = recipe.resolve(str(directory.config), []).config
    new = recipe.resolve(str(directory.config), list(overrides)).config
    recipe.changed_on_resume(old, new)
    return session.go_on(directory, new, sinks)


def plan(config: RunConfig) -> list[tuple[str, str]]:
    """What a run would do and take, in words, without training."""
    with closing(make_env(config.env, config.env.lanes)) as env:
        return describe_plan(settle(config, env.spec), env.spec)


def evaluate(path: Place, *, episodes: int = 20, seed: int = 1000, epsilon: float = 0.0, which: Which = "best",
             lanes: int | None = None, trust: bool = False) -> EvalResult:
    """Play whole episodes with a run's best (or latest) weights, or with a checkpoint's."""
    agent = load(path, which=which, trust=trust)
    with closing(make_env(agent.config.env, lanes or min(episodes, agent.config.eval.lanes))) as env:
        session.require_same(agent.checkpoint, env.spec)
        score = judge(agent.policy, env, episodes, epsilon, seed)
    return EvalResult(score.mean, score.std, len(score.returns), seed, protocol_of(agent.config), epsilon,
                      score.returns, score.lengths, str(agent.checkpoint.path))


def rollout(path: Place, *, episodes: int = 1, seed: int = 1000, which: Which = "best", render: bool = True,
            trust: bool = False) -> Iterator[Step]:
    """Play greedily, step by step, with pictures."""
    agent = load(path, which=which, trust=trust)
    greedy = Constant(0.0, 1).arms(0)
    with closing(make_env(agent.config.env, 1, render=render)) as env:
        session.require_same(agent.checkpoint, env.spec)
        obs, episode = env.reset(lane_seeds(seed, 1, "evaluation")), 0
        yield Step(env.render(), 0.0, episode, False)
        while episode < episodes:
            action, _ = agent.policy.act(obs, greedy)
            env.send(action)
            outcome = env.recv()
            obs, done = outcome.obs, bool(outcome.last[0])
            yield Step(env.render(), float(outcome.score[0]), episode, done)
            episode += done


def load(path: Place, *, which: Which = "best", device: str = "cpu", trust: bool = False) -> TrainedAgent:
    """A trained agent that acts: from a run (by path or name) or from a checkpoint."""
    checkpoint = find_checkpoint(path, which, trust=trust)
    text = parse_mapping(checkpoint.config_text, str(checkpoint.path / "config.yaml"))
    return TrainedAgent(checkpoint, validate(RunConfig, text, str(checkpoint.path)), torch.device(device))


class TrainedAgent:
    """Frozen weights that act greedily."""

    def __init__(self, checkpoint: Checkpoint, config: RunConfig, device: torch.device) -> None:
        self.checkpoint, self.config = checkpoint, config
        self.spec: EnvSpec = checkpoint.spec
        torch.set_num_threads(config.run.threads or 1)
        self.policy = Policy(make_agent(config, self.spec), 0, device)
        try:
            self.policy.load(checkpoint.policy(), checkpoint.manifest.updates)
        except ValueError as error:
            raise UserError(f"checkpoint {checkpoint.path}: the weights are not those of the network that its config "
                            f"describes ({error}); it was not written by qfleet as it is now") from error

    def act(self, obs: Any, epsilon: float = 0.0) -> Any:
        """The action for one observation (an int), or for a batch of them (an array).

        An observation is an array, or a dict of arrays when the environment has several leaves (see `spec`).
        """
        leaves = obs if isinstance(obs, Mapping) else {next(iter(self.spec.observation)): obs}
        if set(leaves) != set(self.spec.observation):
            raise UserError(f"the agent observes {sorted(self.spec.observation)}, not {sorted(leaves)}")
        arrays = {name: np.asarray(leaves[name], leaf.dtype) for name, leaf in self.spec.observation.items()}
        name, leaf = next(iter(self.spec.observation.items()))
        single = arrays[name].ndim == len(leaf.shape)
        if single:
            arrays = {name: array[None] for name, array in arrays.items()}
        for name, leaf in self.spec.observation.items():
            if arrays[name].shape[1:] != leaf.shape:
                raise UserError(f"observation {name!r} has shape {arrays[name].shape[1:]}; it must be {leaf.shape}")
        lanes = len(arrays[name])
        action, _ = self.policy.act(arrays, Arm(torch.full((lanes,), epsilon)))
        return int(action[0]) if single else action


def export(path: Place, out: Place, which: Which = "best", *, trust: bool = False) -> Path:
    """Write the policy alone: weights, config and environment, enough to evaluate, record or load it anywhere."""
    return export_policy(find_checkpoint(path, which, trust=trust), out)


def protocol_of(config: RunConfig) -> str:
    """The rules an evaluation played by: the Atari protocol, or the environment's own."""
    from qfleet.envs import suite

    name = getattr(suite(config.env.id), "protocol", None)
    return f"{name(config.env)}, full games" if name is not None else "full episodes"
