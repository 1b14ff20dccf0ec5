"""Python API: train, resume, evaluate, load, roll out and export. The command line calls these functions.

    import qfleet
    result = qfleet.train("cartpole", ["seed=3"])
    agent = qfleet.load(result.directory)
    action = agent.act(observation)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qfleet import envs
from qfleet.config import parse_mapping, validate
from qfleet.core.errors import UserError
from qfleet.core.seeds import lane_seeds
from qfleet.explore.constant import Constant
from qfleet.launch import allreduce_run, attempt, driver, remote_evaluator
from qfleet.launch.attempt import TrainResult
from qfleet.launch.trained_agent import TrainedAgent
from qfleet.runconfig import resolution, resumable
from qfleet.runconfig.auto import reopen_auto, resolve_auto, resolve_device
from qfleet.runconfig.build import make_env, with_step_limit
from qfleet.runconfig.plan_text import describe_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import export_policy
from qfleet.runs.directory import RunDirectory
from qfleet.runs.find import StrPath, Which, find_checkpoint, foreign_names, require_no_outside_links, require_trusted
from qfleet.training.evaluation import evaluate as evaluate_policy
from qfleet.training.meter import Sink, as_sink

SinkLike = Sink | Callable[[Mapping[str, Any]], object]
"""Receiver of metric records: an object with write(record), flush() and close(), or a function of a record."""


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation over full episodes with unclipped rewards. `protocol` names the evaluation rules."""

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
    """One step of a rollout: the rendered frame after it, the unclipped reward, and True if the episode ended."""

    frame: np.ndarray | None
    reward: float
    episode: int
    done: bool


def train(config: RunConfig | Mapping[str, Any] | StrPath, overrides: Sequence[str] = (), *,
          sinks: Sequence[SinkLike] = (), provenance: Mapping[str, str] | None = None) -> TrainResult:
    """Train a new run.

    Args:
        config: A recipe name, YAML file or environment id, nested settings as in a file, or a complete RunConfig.
        overrides: Texts of the form `key=value`; not allowed with a RunConfig.
        sinks: Receivers of every metric record: objects with write(record), flush() and close(), or functions.
        provenance: Origin of each key of a RunConfig, recorded with the run.

    Returns:
        The run directory, counters, best evaluation and the reason for the end of the training.

    Raises:
        UserError: The configuration is invalid, or the run directory exists or cannot be written.

    Example:
        >>> result = qfleet.train("cartpole", ["seed=3", "total_steps=20000"])
    """
    pairs, receivers = _pairs(overrides), _sinks(sinks)
    if not isinstance(config, RunConfig):
        resolved = resolution.resolve(config if isinstance(config, Mapping) else _name(config), pairs)
        config, provenance = resolved.config, resolved.provenance
    elif pairs:
        raise UserError("overrides need a recipe, file or environment id; a RunConfig is already complete")
    _require_importable(config)
    return _launcher(config).start(config, receivers, provenance or {})


def resume(run: StrPath, overrides: Sequence[str] = (), *, sinks: Sequence[SinkLike] = (), root: StrPath = "runs",
           trust: bool = False) -> TrainResult:
    """Resume a run from its newest valid checkpoint.

    Args:
        run: Path of the run, or its name under `root`.
        overrides: Texts of the form `key=value`. Keys that affect what is learned cannot change.
        sinks: Receivers of every metric record, as for `train`.
        root: Directory in which runs are looked up by name.
        trust: Allow a run that was not created on this machine (a copy, a download) to import modules that it names.

    Returns:
        The run directory, counters, best evaluation and the reason for the end of the training.

    Raises:
        UserError: There is no such run, an override is not allowed, or the run is not trusted.

    Example:
        >>> result = qfleet.resume("runs/my-run", ["total_steps=200000"])
    """
    pairs, receivers = _pairs(overrides), _sinks(sinks)
    directory = RunDirectory.open(run, root)
    if not trust:
        require_trusted(directory)
        require_no_outside_links(directory)
    resumable.require_current(directory.config)
    old = resolution.resolve(str(directory.config), []).config
    new = resolution.resolve(str(directory.config), pairs).config
    resumable.changed_on_resume(old, new)
    new = reopen_auto(old, new, [pair.partition("=")[0] for pair in pairs])
    _require_importable(new)
    return _launcher(new).resume(directory, new, receivers)


def _launcher(config: RunConfig) -> Any:
    """Return the module whose functions `start` and `resume` train this config."""
    if config.has_driver and not allreduce_run.is_rank(config):
        return driver
    if config.has_ranks:
        return allreduce_run
    return remote_evaluator if config.evaluator_process else attempt


def plan(config: RunConfig) -> list[tuple[str, str]]:
    """Describe what a run would do and the resources it would use, without training.

    Args:
        config: Configuration of the run.

    Returns:
        Pairs of a name and a text, such as `("device", "cpu")`.

    Raises:
        UserError: The configuration cannot be run on this machine, or `init_from` does not fit.
    """
    with closing(make_env(config.env, 1)) as env:
        attempt.initial_weights(config, env.spec)  # raises if init_from is missing or does not fit
        return describe_plan(resolve_auto(config, env.spec), env.spec)


def evaluate(path: StrPath, *, episodes: int = 20, seed: int = 1000, epsilon: float = 0.0, which: Which = "best",
             lanes: int | None = None, device: str | None = None, root: StrPath = "runs", trust: bool = False,
             on_episode: Callable[[int], None] = lambda episodes: None) -> EvalResult:
    """Evaluate a run or checkpoint on full episodes.

    Args:
        path: Path of a run or checkpoint, or name of a run under `root`.
        episodes: Number of episodes.
        seed: Seed of the episodes.
        epsilon: Probability of a random action; 0 is greedy.
        which: Checkpoint of a run: the best by evaluation, or the latest.
        lanes: Environments stepped together; None = the run's `eval.lanes`.
        device: `cpu`, `cuda` or `cuda:N`; None = the device of the training, or the CPU if it is not available.
        root: Directory in which runs are looked up by name.
        trust: Allow a run that was not created on this machine to import modules that it names.
        on_episode: Called with the number of finished episodes.

    Returns:
        Mean and standard deviation of the returns, and the returns and lengths of all episodes.

    Raises:
        UserError: An argument is out of range, or there is no such run or checkpoint.
        torch.OutOfMemoryError: The GPU does not have enough memory.

    Example:
        >>> qfleet.evaluate("runs/my-run", episodes=100).mean_reward
    """
    _require(episodes=episodes, **({} if lanes is None else {"lanes": lanes}))
    if not 0 <= epsilon <= 1:
        raise UserError(f"epsilon={epsilon!r}: must be a probability, 0 to 1")
    try:
        agent = load(path, which=which, device=device, root=root, trust=trust)
        lanes = lanes or min(episodes, agent.config.eval.lanes)
        with _threads(agent.config), closing(make_env(with_step_limit(agent.config.env), lanes)) as env:
            attempt.require_same_env(agent.checkpoint, env.spec)
            score = evaluate_policy(agent.policy, env, episodes, epsilon, seed, on_episode=on_episode)
    except torch.OutOfMemoryError as error:
        error.add_note("free GPU memory (nvidia-smi lists the processes), or evaluate on the CPU: device=\"cpu\", or "
                       "--device cpu of `qfleet eval`")
        raise
    return EvalResult(score.mean, score.std, len(score.returns), seed, protocol_of(agent.config), epsilon,
                      score.returns, score.lengths, str(agent.checkpoint.path), str(agent.policy.device))


def rollout(path: StrPath, *, episodes: int = 1, seed: int = 1000, which: Which = "best", render: bool = True,
            root: StrPath = "runs", trust: bool = False) -> Iterator[RolloutStep]:
    """Play greedy episodes step by step.

    Args:
        path: Path of a run or checkpoint, or name of a run under `root`.
        episodes: Number of episodes.
        seed: Seed of the episodes.
        which: Checkpoint of a run: the best by evaluation, or the latest.
        render: Render a frame after every step.
        root: Directory in which runs are looked up by name.
        trust: Allow a run that was not created on this machine to import modules that it names.

    Returns:
        An iterator that yields the state after the first reset, then every step.

    Raises:
        UserError: There is no such run or checkpoint, or the environment cannot render.

    Example:
        >>> frames = [step.frame for step in qfleet.rollout("runs/my-run")]
    """
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
    """Load a trained agent from a run or checkpoint.

    Args:
        path: Path of a run or checkpoint, or name of a run under `root`.
        which: Checkpoint of a run: the best by evaluation, or the latest.
        device: `cpu`, `cuda` or `cuda:N`; None = the device of the training, or the CPU if it is not available.
        root: Directory in which runs are looked up by name.
        trust: Allow a run that was not created on this machine (a copy, a download) to import modules that it names.

    Returns:
        An agent with frozen weights; `agent.act(obs)` returns an action.

    Raises:
        UserError: There is no such run or checkpoint, it is damaged or not trusted, or the device is not available.

    Example:
        >>> agent = qfleet.load("runs/my-run")
        >>> action = agent.act(obs)
    """
    requested = None if device is None else _device(device)
    checkpoint = find_checkpoint(path, which, root=root, trust=trust)
    text = parse_mapping(checkpoint.config_text, str(checkpoint.path / "config.yaml"))
    config = validate(RunConfig, resolution.playable(text), str(checkpoint.path))
    return TrainedAgent(checkpoint, config, requested or _training_device(config))


def export(path: StrPath, out: StrPath, which: Which = "best", *, root: StrPath = "runs") -> Path:
    """Write a checkpoint with only the policy: weights, config and environment.

    Args:
        path: Path of a run or checkpoint, or name of a run under `root`.
        out: Path of the new checkpoint directory; it must not exist.
        which: Checkpoint of a run: the best by evaluation, or the latest.
        root: Directory in which runs are looked up by name.

    Returns:
        The path of the new checkpoint, which `evaluate`, `rollout` and `load` accept on any machine.

    Raises:
        UserError: There is no such run or checkpoint, or `out` exists or cannot be written.

    Example:
        >>> qfleet.export("runs/my-run", "my-policy")
    """
    return export_policy(find_checkpoint(path, which, root=root, trust=True), out)  # nothing is imported


def _pairs(overrides: Sequence[str]) -> list[str]:
    """Return the overrides as a list. A single text or a mapping, which would iterate wrongly, raises UserError."""
    pairs = [overrides] if isinstance(overrides, str | Mapping) else list(overrides)
    if isinstance(overrides, str | Mapping) or not all(isinstance(pair, str) for pair in pairs):
        raise UserError(f"overrides={overrides!r}: must be a list of key=value texts, such as "
                        '["seed=3", "learner.learning_rate=3e-4"]')
    return pairs


def _sinks(sinks: Sequence[SinkLike]) -> list[Sink]:
    """Return all sinks, checked before anything is built; a single sink instead of a list raises UserError."""
    if callable(sinks) or hasattr(sinks, "write"):
        raise UserError("sinks: must be a list, such as [print]")
    return [as_sink(sink) for sink in sinks]


def _name(source: Any) -> str:
    """Return a recipe, file or environment id as text; an environment object raises UserError."""
    if isinstance(source, str | Path):
        return str(source)
    kind = source if hasattr(source, "__qualname__") else type(source)
    raise UserError("pass the name of an environment, not an object, so that every process can create it: put it into "
                    f'a module and pass "{kind.__module__}:{kind.__qualname__}"; or pass a recipe, a file or settings '
                    "as a dict")


def _require_importable(config: RunConfig) -> None:
    """Refuse names that only this process can import if other processes must import them."""
    others = [*config.process_settings(), *(["env.isolate=true"] if config.env.isolate else [])]
    names = [name for name in foreign_names(config.model_dump(mode="json")) if name.startswith("__main__:")]
    if others and names:
        raise UserError(f"{', '.join(names)}: definitions of a script or notebook cannot be imported by the other "
                        f"processes that {others[0]} starts: put it into a file, my_module.py, and write "
                        f"my_module:{names[0].partition(':')[2]}")


def _require(**counts: Any) -> None:
    """Raise UserError unless every count is an integer of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise UserError(f"{name}={value!r}: must be an integer of at least 1")


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"device={name!r} is not available ({str(error).splitlines()[0]:.60}): "
                        "use cpu, cuda or cuda:N") from None


def _training_device(config: RunConfig) -> torch.device:
    """Return the device of the training, or the CPU if it is not available."""
    try:
        return resolve_device(config.device)
    except UserError:
        return torch.device("cpu")


@contextmanager
def _threads(config: RunConfig) -> Iterator[None]:
    """Set torch's number of threads to that of the run, and restore it afterwards for the calling program."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.run.threads or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def protocol_of(config: RunConfig) -> str:
    """Describe the evaluation rules: the Atari protocol, or full episodes of the environment."""
    name = getattr(envs.suite(config.env.id), "protocol", None)
    return f"{name(config.env)}, full games" if name is not None else "full episodes"
