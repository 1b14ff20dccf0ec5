"""Python API: train, resume, evaluate, load, roll out and export. The command line calls these functions.

    import qfleet
    result = qfleet.train("cartpole", ["seed=3"])
    agent = qfleet.load(result.directory)
    action = agent.act(observation)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from qfleet.config import parse_mapping, validate
from qfleet.core.episode import Episode
from qfleet.core.errors import CallbackError, ExportError, UserError
from qfleet.core.final_score import FinalScore
from qfleet.core.seeds import lane_seeds
from qfleet.deploy.export import ExportFormat, chosen_format
from qfleet.explore.constant import Constant
from qfleet.interface.arguments import (
    Settings,
    assign_callbacks,
    changed_config,
    check_sinks,
    progress_view,
    require_importable,
    resolve_arguments,
    with_env,
)
from qfleet.interface.run import Run
from qfleet.interface.scoring import EvalResult, check_protocol, evaluate_policy, require_positive, require_seed
from qfleet.interface.trained_agent import TrainedAgent
from qfleet.interface.user_types import EnvLike, SinkLike, WrapperLike
from qfleet.launch import allreduce_run, attempt, driver
from qfleet.launch.train_result import TrainResult
from qfleet.runconfig import resolution
from qfleet.runconfig.auto import resolve_auto, run_threads, training_device
from qfleet.runconfig.build import make_env, with_step_limit
from qfleet.runconfig.plan_text import describe_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import export_policy
from qfleet.runs.find import StrPath, Which, find_checkpoint
from qfleet.runs.listing import RunSummary, list_runs
from qfleet.training.callbacks import Callback, CheckedCallback, Evaluation, RunControl, SavedCheckpoint
from qfleet.training.meter import Sink

__all__ = ["Callback", "CallbackError", "Episode", "EvalResult", "Evaluation", "ExportError", "FinalScore",
           "RolloutStep", "Run", "RunConfig", "RunControl", "RunSummary", "SavedCheckpoint", "TrainResult",
           "TrainedAgent", "UserError", "evaluate", "export", "list_runs", "load", "plan", "resume", "rollout",
           "train"]


@dataclass(frozen=True)
class RolloutStep:
    """One step of a rollout.

    Attributes:
        frame: Image [H, W, 3] after the step; None without rendering.
        reward: Unclipped reward.
        episode: Index of the episode.
        done: True if the episode has ended.
    """

    frame: np.ndarray | None
    reward: float
    episode: int
    done: bool


def train(config: RunConfig | EnvLike | Path | None = None, overrides: Sequence[str] = (), *,
          env: EnvLike | None = None, wrappers: Sequence[WrapperLike] | None = None, sinks: Sequence[SinkLike] = (),
          callbacks: Sequence[object] = (), progress: bool = False, provenance: Mapping[str, str] | None = None,
          **settings: Unpack[Settings]) -> TrainResult:
    """Train a new run.

    Args:
        config: A recipe name, YAML file or environment id, nested settings as in a file, an environment as for `env`,
            or a complete RunConfig.
        overrides: Strings of the form `key=value`, which override everything else. Not allowed with a RunConfig.
        env: The environment: an id, a class, a function that creates one, an instance (every lane gets a copy), or a
            mapping with keys of the env section. Also a `gymnasium.vector.VectorEnv` or a function that
            creates one.
        wrappers: Wrappers of the environment, the innermost first: classes or functions of an environment, names
            `module:attribute`, or pairs of one of these and keyword arguments.
        sinks: Receivers of every metric record: objects with write(record), flush() and close(), or functions.
        callbacks: Objects with methods such as `on_evaluation(run, evaluation)`, see `qfleet.Callback`.
        progress: Show the progress, as the command line does.
        provenance: Origin of each key of a RunConfig, recorded with the run.
        **settings: Config keys, such as `agent="c51"`, `total_steps=200_000` or `learner=dict(learning_rate=3e-4)`.

    Returns:
        The run directory, counters, score, best evaluation and the reason for the end of the training.
        Ctrl-C does not raise: the reason is then `interrupted` and `exit_code` 130.

    Raises:
        UserError: The configuration is invalid, or the run directory exists or cannot be written.

    Examples:
        >>> result = qfleet.train("cartpole", seed=3, learner=dict(batch_size=64))
        >>> result = qfleet.train(env=MyEnv, wrappers=[(Scale, {"factor": 0.5})])
    """
    receivers = check_sinks(sinks)
    resolved = resolve_arguments(config, overrides, env, wrappers, settings, provenance)
    if _trains_here(resolved.config):
        with Run.create(resolved, receivers, callbacks, progress) as run:
            return run.train()
    config, checked = _prepared(resolved.config, callbacks)
    with _view_of(config, progress) as views:
        if _is_rank(config):
            return allreduce_run.start(config, [*receivers, *views], checked, resolved.provenance)
        return driver.start(config, [*receivers, *views], resolved.provenance)


def resume(run: StrPath, /, overrides: Sequence[str] = (), *, env: EnvLike | None = None,
           wrappers: Sequence[WrapperLike] | None = None, sinks: Sequence[SinkLike] = (),
           callbacks: Sequence[object] = (), progress: bool = False, root: StrPath = "runs", trust: bool = False,
           **settings: Unpack[Settings]) -> TrainResult:
    """Resume a run from its newest valid checkpoint.

    Args:
        run: Path of the run, or its name under `root`, a prefix of it, or `last`.
        overrides: Strings of the form `key=value`. Keys that affect what is learned cannot change.
        env: The environment, if the run was started with an object that cannot be imported.
        wrappers: Wrappers of the environment, if they cannot be imported.
        sinks: Receivers of every metric record, as for `train`.
        callbacks: Callbacks, as for `train`.
        progress: Show the progress, as for `train`.
        root: Directory in which runs are looked up by name.
        trust: Allow a run that was not created on this machine (a copy, a download) to import modules that it names.
        **settings: Config keys, as for `train`.

    Returns:
        The run directory, counters, score, best evaluation and the reason for the end of the training.
        Ctrl-C does not raise: the reason is then `interrupted` and `exit_code` 130.

    Raises:
        UserError: There is no such run, an override is not allowed, or the run is not trusted.

    Examples:
        >>> result = qfleet.resume("runs/my-run", total_steps=200_000)
    """
    receivers = check_sinks(sinks)
    directory, config = changed_config(run, overrides, root, trust, env, wrappers, settings)
    if _trains_here(config):
        with Run.reopen(directory, config, receivers, callbacks, progress) as reopened:
            return reopened.train()
    config, checked = _prepared(config, callbacks)
    with _view_of(config, progress) as views:
        if _is_rank(config):
            return allreduce_run.resume(directory, config, [*receivers, *views], checked)
        return driver.resume(directory, config, [*receivers, *views])


def _trains_here(config: RunConfig) -> bool:
    """True if actors and learner are in this process."""
    return not (config.has_driver or config.has_ranks)


def _is_rank(config: RunConfig) -> bool:
    """True if this process is a rank: one that torchrun or srun started, or the only one."""
    return config.has_ranks and (not config.has_driver or allreduce_run.is_rank(config))


def _prepared(config: RunConfig, callbacks: Sequence[object]) -> tuple[RunConfig, list[CheckedCallback]]:
    """Config and callbacks of a run of several processes, checked before anything is built."""
    require_importable(config)
    return assign_callbacks(config, callbacks, elsewhere=not _is_rank(config))


@contextmanager
def _view_of(config: RunConfig, progress: bool) -> Iterator[list[Sink]]:
    if not progress:
        yield []
        return
    with closing(progress_view(config)) as view:
        yield [view]


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
             lanes: int | None = None, device: str | None = None, env: EnvLike | None = None,
             wrappers: Sequence[WrapperLike] | None = None, root: StrPath = "runs", trust: bool = False,
             on_episode: Callable[[int], None] = lambda episodes: None) -> EvalResult:
    """Evaluate a run or checkpoint on full episodes.

    Args:
        path: Path of a run or checkpoint, a run under `root` (its name, a prefix of it, or `last`), or `hf:USER/NAME`
            for a policy on the Hugging Face Hub.
        episodes: Number of episodes.
        seed: Seed of the episodes.
        epsilon: Probability of a random action; 0 is greedy.
        which: Checkpoint of a run: `best` by evaluation, or `latest`.
        lanes: Environments stepped together; None = the run's `eval.lanes`.
        device: `cpu`, `cuda` or `cuda:N`; None = the device of the training, or the CPU if it is not available.
        env: The environment, if the run was started with an object that cannot be imported.
        wrappers: Wrappers of the environment, if they cannot be imported.
        root: Directory in which runs are looked up by name.
        trust: Allow a run that was not created on this machine to import modules that it names.
        on_episode: Called with the number of finished episodes.

    Returns:
        Mean and standard deviation of the returns, and the returns and lengths of all episodes.

    Raises:
        UserError: An argument is out of range, or there is no such run or checkpoint.
        torch.OutOfMemoryError: The GPU does not have enough memory.

    Examples:
        >>> result = qfleet.evaluate("runs/my-run", episodes=100)
        >>> mean, error = result.mean_reward, result.standard_error
    """
    check_protocol(episodes, lanes, epsilon, seed)
    try:
        agent = load(path, which=which, device=device, env=env, wrappers=wrappers, root=root, trust=trust)
        with run_threads(agent.config):
            return evaluate_policy(agent.policy, agent.config, episodes, seed, epsilon, lanes,
                                   agent.require_env, str(agent.checkpoint and agent.checkpoint.path), on_episode)
    except torch.OutOfMemoryError as error:
        error.add_note("free GPU memory (nvidia-smi lists the processes), or evaluate on the CPU: device=\"cpu\", or "
                       "--device cpu of `qfleet eval`")
        raise


def rollout(path: StrPath, *, episodes: int = 1, seed: int = 1000, which: Which = "best", render: bool = True,
            env: EnvLike | None = None, wrappers: Sequence[WrapperLike] | None = None, root: StrPath = "runs",
            trust: bool = False) -> Iterator[RolloutStep]:
    """Play greedy episodes step by step.

    Args:
        path: Path of a run or checkpoint, a run under `root` (its name, a prefix of it, or `last`), or `hf:USER/NAME`
            for a policy on the Hugging Face Hub.
        episodes: Number of episodes.
        seed: Seed of the episodes.
        which: Checkpoint of a run: `best` by evaluation, or `latest`.
        render: Render a frame after every step.
        env: The environment, if the run was started with an object that cannot be imported.
        wrappers: Wrappers of the environment, if they cannot be imported.
        root: Directory in which runs are looked up by name.
        trust: Allow a run that was not created on this machine to import modules that it names.

    Returns:
        An iterator that yields the state after the first reset, then every step.

    Raises:
        UserError: There is no such run or checkpoint, or the environment cannot render.

    Examples:
        >>> frames = [step.frame for step in qfleet.rollout("runs/my-run")]
    """
    require_positive(episodes=episodes)
    require_seed(seed)
    agent = load(path, which=which, env=env, wrappers=wrappers, root=root, trust=trust)
    greedy = Constant(0.0, 1).params(0)
    with run_threads(agent.config), closing(make_env(with_step_limit(agent.config.env), 1, render=render)) as lane:
        agent.require_env(lane.spec)
        obs, episode, over = lane.reset(lane_seeds(seed, 1, "evaluation")), 0, np.zeros(1, bool)
        agent.policy.begin(1)
        yield RolloutStep(lane.render() if render else None, 0.0, episode, False)
        while episode < episodes:
            action, _ = agent.policy.act(obs, greedy)
            lane.send(action)
            outcome = lane.recv()
            agent.policy.observe(outcome.reward, over | outcome.aborted)
            obs, over, done = outcome.obs, outcome.last, bool(outcome.last[0])
            yield RolloutStep(lane.render() if render else None, float(outcome.raw_reward[0]), episode, done)
            episode += done


def load(path: StrPath, *, which: Which = "best", device: str | None = "cpu", env: EnvLike | None = None,
         wrappers: Sequence[WrapperLike] | None = None, root: StrPath = "runs", trust: bool = False) -> TrainedAgent:
    """Load a trained agent from a run or checkpoint.

    Args:
        path: Path of a run or checkpoint, a run under `root` (its name, a prefix of it, or `last`), or `hf:USER/NAME`
            for a policy on the Hugging Face Hub.
        which: Checkpoint of a run: `best` by evaluation, or `latest`.
        device: `cpu`, `cuda` or `cuda:N`; None = the device of the training, or the CPU if it is not available.
        env: The environment, if the run was started with an object that cannot be imported.
        wrappers: Wrappers of the environment, if they cannot be imported.
        root: Directory in which runs are looked up by name.
        trust: Allow a run that was not created on this machine (a copy, a download) to import modules that it names.

    Returns:
        An agent with frozen weights; `agent.act(obs)` returns an action.

    Raises:
        UserError: There is no such run or checkpoint, it is damaged or not trusted, or the device is not available.

    Examples:
        >>> agent = qfleet.load("runs/my-run")
        >>> action = agent.act(obs)
    """
    requested = None if device is None else _device(device)
    checkpoint = find_checkpoint(path, which, root=root, trust=trust)
    text = parse_mapping(checkpoint.config_text, str(checkpoint.path / "config.yaml"))
    config = validate(RunConfig, resolution.playable(text), str(checkpoint.path))
    config = with_env(config, env, wrappers)
    return TrainedAgent.of_checkpoint(checkpoint, config, requested or training_device(config))


def export(path: StrPath, out: StrPath, which: Which = "best", *, format: ExportFormat | None = None,
           root: StrPath = "runs", trust: bool = False) -> Path:
    """Write only the policy: a checkpoint of weights, config and environment, or a file for another runtime.

    Args:
        path: Path of a run or checkpoint, a run under `root` (its name, a prefix of it, or `last`), or `hf:USER/NAME`
            for a policy on the Hugging Face Hub.
        out: Path of the new file or checkpoint directory; it must not exist.
        which: Checkpoint of a run: `best` by evaluation, or `latest`.
        format: `safetensors` is a checkpoint, which `evaluate`, `rollout` and `load` accept on any machine, with
            `trust=True` if it names an environment or network of yours; `onnx` and `torchscript` are files that need
            no qfleet, verified against the policy. None = by the suffix of `out` (.onnx, .pt, .ts), else safetensors.
        root: Directory in which runs are looked up by name.
        trust: Allow a run that was not created on this machine to import modules that it names; a checkpoint is
            written without importing any.

    Returns:
        The path of the file or checkpoint.

    Raises:
        UserError: There is no such run or checkpoint, `out` exists or cannot be written, or the agent cannot be
            exported.
        ExportError: The file cannot be written, or its outputs differ from those of the policy.

    Examples:
        >>> path = qfleet.export("runs/my-run", "my-policy")
        >>> path = qfleet.export("runs/my-run", "my-policy.onnx")
    """
    out = Path(out)
    chosen = chosen_format(out, format)
    if chosen == "safetensors":
        return export_policy(find_checkpoint(path, which, root=root, trust=True), out)  # nothing is imported
    return load(path, which=which, root=root, trust=trust).export(out, chosen).path


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"device={name!r} is not available ({str(error).splitlines()[0]:.60}): "
                        "use device='cpu'") from None
