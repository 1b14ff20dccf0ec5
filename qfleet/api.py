"""The Python face of qfleet: train, resume, evaluate, load, roll out, export. The command line calls these and prints.

    import qfleet
    result = qfleet.train("cartpole", ["seed=3"])
    agent = qfleet.load(result.directory)
    action = agent.act(observation)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qfleet import envs
from qfleet.actor.policy import Policy
from qfleet.config import parse_mapping, validate
from qfleet.core.agent import ExplorationParams
from qfleet.core.env import EnvSpec, Obs
from qfleet.core.errors import UserError
from qfleet.core.seeds import lane_seeds
from qfleet.envs.spaces import OutOfSpace, SpaceAdapter, SpaceMismatch
from qfleet.explore.constant import Constant
from qfleet.launch import allreduce_run, attempt, driver, ray_launcher, remote_evaluator, server_run
from qfleet.launch.attempt import TrainResult
from qfleet.runconfig import resolution, resumable
from qfleet.runconfig.auto import reopen_auto, resolve_auto, resolve_device
from qfleet.runconfig.build import make_agent, make_env, with_step_limit
from qfleet.runconfig.plan_text import describe_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoint, export_policy
from qfleet.runs.directory import RunDirectory
from qfleet.runs.find import StrPath, Which, find_checkpoint, foreign_names, require_no_outside_links, require_trusted
from qfleet.training.evaluation import evaluate as judge
from qfleet.training.meter import Sink, as_sink

SinkLike = Sink | Callable[[Mapping[str, Any]], object]
"""Who gets metric records: a sink, or a function."""


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
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RolloutStep:
    """One step of a rollout: the picture after it, its unclipped reward, and whether it ended its episode."""

    frame: np.ndarray | None
    reward: float
    episode: int
    done: bool


def train(config: RunConfig | Mapping[str, Any] | StrPath, overrides: Sequence[str] = (), *,
          sinks: Sequence[SinkLike] = (), provenance: Mapping[str, str] | None = None) -> TrainResult:
    """Train a new run. `config` is a RunConfig, a recipe, file or environment id, or nested settings as in a file.

    `sinks` get every metric record: objects with write(record), flush() and close(), or functions that take a record.
    """
    pairs, listeners = _pairs(overrides), _sinks(sinks)
    if not isinstance(config, RunConfig):
        resolved = resolution.resolve(config if isinstance(config, Mapping) else _name(config), pairs)
        config, provenance = resolved.config, resolved.provenance
    elif pairs:
        raise UserError("overrides belong to a recipe, file or environment id; this config is complete already")
    _require_importable(config)
    return _engine(config).start(config, listeners, provenance or {})


def resume(run: StrPath, overrides: Sequence[str] = (), *, sinks: Sequence[SinkLike] = (), root: StrPath = "runs",
           trust: bool = False) -> TrainResult:
    """Continue a run from its newest valid checkpoint; some keys may change, see `recipe.RESUMABLE`.

    A run that was made elsewhere (a copy, a download) imports modules of its own only with `trust`.
    """
    pairs, listeners = _pairs(overrides), _sinks(sinks)
    directory = RunDirectory.open(run, root)
    if not trust:
        require_trusted(directory)
        require_no_outside_links(directory)
    old = resolution.resolve(str(directory.config), []).config
    new = resolution.resolve(str(directory.config), pairs).config
    resumable.changed_on_resume(old, new)
    new = reopen_auto(old, new, [pair.partition("=")[0] for pair in pairs])
    _require_importable(new)
    return _engine(new).resume(directory, new, listeners)


def _engine(config: RunConfig) -> Any:
    """Who starts a run and goes on with it: `start` and `go_on` of a module."""
    if config.gradients != "solo" and config.placement != "ray":
        return allreduce_run if config.gradients == "allreduce" else server_run
    if config.eval.beside:
        return remote_evaluator
    return {"inline": attempt, "processes": driver, "ray": ray_launcher}[config.placement]


def plan(config: RunConfig) -> list[tuple[str, str]]:
    """What a run would do and take, in words, without training."""
    with closing(make_env(config.env, 1)) as env:
        attempt.initial_weights(config, env.spec)  # that it is there
        return describe_plan(resolve_auto(config, env.spec), env.spec)


def evaluate(path: StrPath, *, episodes: int = 20, seed: int = 1000, epsilon: float = 0.0, which: Which = "best",
             lanes: int | None = None, device: str | None = None, root: StrPath = "runs", trust: bool = False,
             on_episode: Callable[[int], None] = lambda episodes: None) -> EvalResult:
    """Play whole episodes with a run's best (or latest) weights, or with a checkpoint's; `told` counts them.

    Without a `device` they are played where the run was trained, or on the CPU if there is no such thing here.
    """
    _require(episodes=episodes, **({} if lanes is None else {"lanes": lanes}))
    if not 0 <= epsilon <= 1:
        raise UserError(f"epsilon={epsilon!r}: must be a probability, 0 to 1")
    try:
        agent = load(path, which=which, device=device, root=root, trust=trust)
        lanes = lanes or min(episodes, agent.config.eval.lanes)
        with _threads(agent.config), closing(make_env(with_step_limit(agent.config.env), lanes)) as env:
            attempt.require_same_env(agent.checkpoint, env.spec)
            score = judge(agent.policy, env, episodes, epsilon, seed, on_episode=on_episode)
    except torch.OutOfMemoryError as error:
        error.add_note("make room on the GPU (nvidia-smi lists who uses it), or play on the CPU: device=\"cpu\", or "
                       "--device cpu of `qfleet eval`")
        raise
    return EvalResult(score.mean, score.std, len(score.returns), seed, protocol_of(agent.config), epsilon,
                      score.returns, score.lengths, str(agent.checkpoint.path), str(agent.policy.device))


def rollout(path: StrPath, *, episodes: int = 1, seed: int = 1000, which: Which = "best", render: bool = True,
            root: StrPath = "runs", trust: bool = False) -> Iterator[RolloutStep]:
    """Play greedily, step by step, with pictures."""
    _require(episodes=episodes)
    agent = load(path, which=which, root=root, trust=trust)
    greedy = Constant(0.0, 1).params(0)
    with _threads(agent.config), closing(make_env(with_step_limit(agent.config.env), 1, render=render)) as env:
        attempt.require_same_env(agent.checkpoint, env.spec)
        obs, episode, over = env.reset(lane_seeds(seed, 1, "evaluation")), 0, np.zeros(1, bool)
        agent.policy.begin(1)
        yield RolloutStep(env.render(), 0.0, episode, False)
        while episode < episodes:
            action, _ = agent.policy.act(obs, greedy)
            env.send(action)
            outcome = env.recv()
            agent.policy.observe(outcome.reward, over | outcome.aborted)
            obs, over, done = outcome.obs, outcome.last, bool(outcome.last[0])
            yield RolloutStep(env.render(), float(outcome.raw_reward[0]), episode, done)
            episode += done


def load(path: StrPath, *, which: Which = "best", device: str | None = "cpu", root: StrPath = "runs",
         trust: bool = False) -> TrainedAgent:
    """A trained agent that acts: from a run (by path, or by name under `root`) or from a checkpoint.

    What was made elsewhere (a copy, a download) imports modules of its own only with `trust`. The device None is the
    one that it was trained on, or the CPU if there is no such thing here.
    """
    asked = None if device is None else _device(device)
    checkpoint = find_checkpoint(path, which, root=root, trust=trust)
    text = parse_mapping(checkpoint.config_text, str(checkpoint.path / "config.yaml"))
    config = validate(RunConfig, resolution.playable(text), str(checkpoint.path))
    return TrainedAgent(checkpoint, config, asked or _home(config))


class TrainedAgent:
    """Frozen weights that act greedily."""

    def __init__(self, checkpoint: Checkpoint, config: RunConfig, device: torch.device) -> None:
        self.checkpoint, self.config = checkpoint, config
        self.spec: EnvSpec = checkpoint.spec
        self.policy = Policy(make_agent(config, self.spec), 0, device)
        try:
            self.policy.load(checkpoint.policy(), checkpoint.manifest.updates)
        except ValueError as error:
            raise UserError(f"checkpoint {checkpoint.path}: the weights are not those of the network that its config "
                            f"describes ({error}); it was not written by qfleet as it is now") from error

    def __repr__(self) -> str:
        return (f"TrainedAgent({self.spec.id}, {self.config.agent.algo}, {self.checkpoint.path.name}, "
                f"{self.policy.device})")

    def reset(self) -> None:
        """Forget everything: an episode starts."""
        self.policy.memory = None

    def act(self, obs: Any, epsilon: float = 0.0, *, reward: Any = 0.0, over: Any = False) -> Any:
        """What `env.step` takes, for one observation or for a batch of them.

        An agent with a memory is told what its last action brought (`reward`), and in which lanes of a batch the
        observation begins another episode (`over`).

        Observations are the environment's own (a batch of them only if they are plain arrays), or leaves by name, as
        the network sees them (see `spec`), with or without a batch axis. Stacked images are leaves.
        """
        leaves, single = self._leaves(obs)
        for name, leaf in leaves.items():
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise UserError(f"observation {name!r} holds NaN or infinity: there is no action for it")
        lanes = len(next(iter(leaves.values())))
        if self.policy.memory is not None:
            self.policy.observe(np.full(lanes, reward, np.float32), np.full(lanes, over, bool))
        chosen = self.policy.act(leaves, ExplorationParams(torch.full((lanes,), epsilon), network_noise=False))[0]
        numbers = chosen.tolist() if self.spec.box is None else list(chosen)
        actions = numbers if self.interpreter is None else [self.interpreter.actions.decode(n) for n in numbers]
        return actions[0] if single else np.asarray(actions)

    @cached_property
    def interpreter(self) -> SpaceAdapter | None:
        """The environment's own words; built when first needed, since it takes an environment to tell them."""
        found = envs.make_space_adapter(self.config.env)
        if found is not None:
            attempt.require_same_env(self.checkpoint, EnvSpec(self.spec.id, found.encoder.leaves, found.actions.n,
                                                              box=found.actions.box))
        return found

    def _leaves(self, obs: Any) -> tuple[Obs, bool]:
        """The network's view [N, ...] of what was given, and whether that was one observation."""
        try:
            if self.interpreter is not None:
                return self.interpreter.encode(obs)
        except OutOfSpace as error:
            raise UserError(str(error)) from None
        except SpaceMismatch as error:
            return self._as_leaves(obs, f" ({error})")
        return self._as_leaves(obs, "")

    def _as_leaves(self, obs: Any, hint: str) -> tuple[Obs, bool]:
        given = obs if isinstance(obs, Mapping) else {next(iter(self.spec.observation)): obs}
        if set(given) != set(self.spec.observation):
            raise UserError(f"the agent observes {sorted(self.spec.observation)}, not {sorted(map(str, given))}{hint}")
        try:
            arrays = {name: np.asarray(given[name], leaf.dtype) for name, leaf in self.spec.observation.items()}
        except (TypeError, ValueError) as error:
            raise UserError(f"the observation cannot be read: {error}{hint}") from None
        name, leaf = next(iter(self.spec.observation.items()))
        single = arrays[name].ndim == len(leaf.shape)
        if single:
            arrays = {name: array[None] for name, array in arrays.items()}
        lanes = arrays[name].shape[:1]
        for name, leaf in self.spec.observation.items():
            if arrays[name].shape != (*lanes, *leaf.shape):
                raise UserError(f"observation {name!r} has shape {arrays[name].shape[single:]}; it must be "
                                f"{leaf.shape}, or a batch of these{hint}")
        return arrays, single


def export(path: StrPath, out: StrPath, which: Which = "best", *, root: StrPath = "runs") -> Path:
    """Write the policy alone: weights, config and environment, enough to evaluate, record or load it anywhere."""
    return export_policy(find_checkpoint(path, which, root=root, trust=True), out)  # nothing is imported


def _pairs(overrides: Sequence[str]) -> list[str]:
    """The overrides one by one; of a lone text that would be its letters, of a mapping its keys alone."""
    pairs = [overrides] if isinstance(overrides, str | Mapping) else list(overrides)
    if isinstance(overrides, str | Mapping) or not all(isinstance(pair, str) for pair in pairs):
        raise UserError(f"overrides={overrides!r}: must be a list of key=value texts, such as "
                        '["seed=3", "learner.learning_rate=3e-4"]')
    return pairs


def _sinks(sinks: Sequence[SinkLike]) -> list[Sink]:
    """All of them, checked before anything is built; of one alone it is said that a list is needed."""
    if callable(sinks) or hasattr(sinks, "write"):
        raise UserError("sinks: must be a list, such as [print]")
    return [as_sink(sink) for sink in sinks]


def _name(source: Any) -> str:
    """A recipe, file or environment id as text; an environment itself is not one, since processes make it by name."""
    if isinstance(source, str | Path):
        return str(source)
    made = source if hasattr(source, "__qualname__") else type(source)
    raise UserError("an environment is given by its name, so that every process can make it, not as an object: put it "
                    f'into a module and name it as "{made.__module__}:{made.__qualname__}"; or give a recipe, a file '
                    "or settings as a dict")


def _require_importable(config: RunConfig) -> None:
    """Refuse names that only this process can import, where other processes must."""
    starts = {f"placement={config.placement}": config.placement != "inline", "eval.beside=true": config.eval.beside,
              f"gradients={config.gradients}": config.gradients != "solo", "env.isolate=true": config.env.isolate}
    others = [key for key, is_set in starts.items() if is_set]
    names = [name for name in foreign_names(config.model_dump(mode="json")) if name.startswith("__main__:")]
    if others and names:
        raise UserError(f"{', '.join(names)}: what a script or notebook defines cannot be imported by other processes, "
                        f"which {others[0]} starts: put it into a file, my_module.py, and name it as "
                        f"my_module:{names[0].partition(':')[2]}")


def _require(**counts: Any) -> None:
    """Refuse what is no number of things to do."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise UserError(f"{name}={value!r}: must be a whole number of at least 1")


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"device={name!r} cannot be used here ({str(error).splitlines()[0]:.60}): "
                        "use cpu, cuda or cuda:N") from None


def _home(config: RunConfig) -> torch.device:
    """Where a run was trained, as far as that is to be had here."""
    try:
        return resolve_device(config.device)
    except UserError:
        return torch.device("cpu")


@contextmanager
def _threads(config: RunConfig) -> Iterator[None]:
    """Torch's threads as the run had them, for a while: the process may have other plans."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.run.threads or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def protocol_of(config: RunConfig) -> str:
    """The rules an evaluation played by: the Atari protocol, or the environment's own."""
    name = getattr(envs.suite(config.env.id), "protocol", None)
    return f"{name(config.env)}, full games" if name is not None else "full episodes"
