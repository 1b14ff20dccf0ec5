"""A run in this process: created, stepped, inspected, evaluated, saved and ended by the calling program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import nn

from qfleet.actor.policy import Policy
from qfleet.core.env import VectorEnv
from qfleet.core.errors import UserError
from qfleet.core.seeds import seed_for
from qfleet.launch.arguments import (
    Settings,
    assign_callbacks,
    changed_config,
    check_sinks,
    progress_view,
    require_importable,
    resolve_arguments,
)
from qfleet.launch.attempt import (
    Attempt,
    TrainResult,
    advise_on_oom,
    initial_weights,
    open_for_resume,
    record_result,
    recording_failure,
    require_same_env,
)
from qfleet.launch.remote_evaluator import RemoteEvaluatorFactory
from qfleet.launch.scoring import EvalResult, evaluate_policy, require_positive
from qfleet.launch.trained_agent import TrainedAgent
from qfleet.launch.user_types import EnvLike, SinkLike, WrapperLike
from qfleet.replay.view import ReplayView
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory, default_name
from qfleet.runs.find import StrPath
from qfleet.runs.metric_writers import read_metrics
from qfleet.training.learner_core import Hooks, LearnerCore
from qfleet.training.learner_run import LearnerRun


class _Prepared:
    """Config, sinks and callbacks of a run in this process, checked before anything is built."""

    def __init__(self, config: RunConfig, sinks: Sequence[Any], callbacks: Sequence[Any], progress: bool) -> None:
        if others := [text for text in config.process_settings() if text != "eval.process=true"]:
            raise UserError(f"qfleet.Run trains in this process, and {others[0]} starts others: use qfleet.train")
        require_importable(config)
        self.config, self.callbacks = assign_callbacks(config, callbacks)
        self.view = progress_view(config) if progress else None
        self.sinks = [*check_sinks(sinks), *([] if self.view is None else [self.view])]


class Run:
    """A run whose actors and learner are in this process.

    A round is one step of all lanes and the updates that are due. `step`, `until` and `train` run whole rounds of the
    same loop, so that a run which is stepped by hand is bitwise equal to one that is trained in one call. Looking at
    the run, evaluating it and saving it do not change it.

    Attributes:
        config: Complete config, with resolved auto values.
        directory: Run directory.

    Example:
        >>> with qfleet.Run("cartpole", ["seed=3"]) as run:
        ...     run.step(5_000)
        ...     print(run.metrics["loss"], run.evaluate(episodes=5).mean_reward)
        ...     result = run.train()
    """

    _attempt: Attempt[LearnerRun] | None = None
    _result: TrainResult | None = None

    def __init__(self, config: RunConfig | Mapping[str, Any] | StrPath | Any = None, overrides: Sequence[str] = (), *,
                 env: EnvLike | None = None, wrappers: Sequence[WrapperLike] | None = None,
                 sinks: Sequence[SinkLike] = (), callbacks: Sequence[object] = (), progress: bool = False,
                 provenance: Mapping[str, str] | None = None, **settings: Unpack[Settings]) -> None:
        """Create a run. The arguments are those of `qfleet.train`; nothing is trained yet.

        Raises:
            UserError: The configuration is invalid or needs other processes, or the run directory exists.
        """
        resolved = resolve_arguments(config, overrides, env, wrappers, settings, provenance)
        prepared = _Prepared(resolved.config, sinks, callbacks, progress)
        self._open(prepared, partial(self._start, prepared, resolved.provenance))

    @classmethod
    def resume(cls, run: StrPath, /, overrides: Sequence[str] = (), *, env: EnvLike | None = None,
               wrappers: Sequence[WrapperLike] | None = None, sinks: Sequence[SinkLike] = (),
               callbacks: Sequence[object] = (),
               progress: bool = False, root: StrPath = "runs", trust: bool = False,
               **settings: Unpack[Settings]) -> Run:
        """Continue a run from its newest valid checkpoint.

        Args:
            run: Path of the run, or its name under `root`, a prefix of it, or `last`.
            overrides: Texts of the form `key=value`. Keys that affect what is learned cannot change.
            env: The environment, if the run was created with an object that cannot be imported.
            wrappers: Its wrappers, likewise.
            sinks: Receivers of every metric record, as for `train`.
            callbacks: Callbacks, as for `train`.
            progress: Show the progress, as for `train`.
            root: Directory in which runs are looked up by name.
            trust: Allow a run that was not created on this machine to import modules that it names.
            **settings: Config keys, as for `train`.

        Raises:
            UserError: There is no such run, an override is not allowed, or the run is not trusted.
        """
        receivers = check_sinks(sinks)
        directory, config = changed_config(run, overrides, root, trust, env, wrappers, settings)
        return cls.reopen(directory, config, receivers, callbacks, progress)

    @classmethod
    def reopen(cls, directory: RunDirectory, config: RunConfig, sinks: Sequence[Any] = (),
               callbacks: Sequence[Any] = (), progress: bool = False) -> Run:
        """Continue a run from its newest valid checkpoint with a config that may differ."""
        run = cls.__new__(cls)
        prepared = _Prepared(config, sinks, callbacks, progress)
        run._open(prepared, partial(run._restore, directory, prepared))
        return run

    # ---- training

    def step(self, n: int = 1) -> int:
        """Train for at least `n` environment steps, in whole rounds.

        Args:
            n: Environment steps, summed over all lanes.

        Returns:
            Steps that were taken; fewer than `n` only if the run has ended.

        Raises:
            UserError: `n` is no positive integer, or the run is closed.
            KeyboardInterrupt: Ctrl-C was pressed. The round was completed, and the run can be continued.
        """
        require_positive(n=n)
        before = self.steps
        return self.until(steps=before + n).steps - before

    def until(self, condition: Callable[[Run], bool] | None = None, *, steps: int | None = None,
              updates: int | None = None, episodes: int | None = None) -> Run:
        """Train until a condition holds after a round, or a count is reached, or the run has ended.

        Args:
            condition: Function of the run.
            steps: Environment steps of the run.
            updates: Updates of the run.
            episodes: Finished training episodes of the run.

        Returns:
            The run itself.

        Raises:
            UserError: No condition is given, or the run is closed.
            KeyboardInterrupt: Ctrl-C was pressed. The round was completed, and the run can be continued.

        Example:
            >>> run.until(lambda run: run.metrics.get("rollout/return", 0) > 100, steps=50_000)
        """
        goals = {"steps": steps, "updates": updates, "episodes": episodes}
        limits = {name: value for name, value in goals.items() if value is not None}
        require_positive(**limits)
        if condition is None and not limits:
            raise UserError("until: give a condition, or steps, updates or episodes")
        self._advance(lambda: any(getattr(self, name) >= value for name, value in limits.items())
                      or (condition is not None and bool(condition(self))))
        return self

    def train(self) -> TrainResult:
        """Train to the end of the run, evaluate, save and close.

        Returns:
            The run directory, counters, best evaluation and the reason for the end of the training.
        """
        if self._result is None:
            attempt = self._open_attempt()
            with self._work(), attempt.stops_on_signal():
                self._begin()
                attempt.run.advance(lambda: False)
                self._finish()
        assert self._result is not None
        return self._result

    def stop(self) -> TrainResult:
        """End the run now: save a checkpoint and close. `resume` continues it."""
        if self._result is None:
            attempt = self._open_attempt()
            attempt.core.stop.request("stopped")
            with self._work():
                self._begin()
                self._finish()
        assert self._result is not None
        return self._result

    def save(self) -> Path:
        """Write a checkpoint now, in addition to the scheduled ones.

        Returns:
            Path of the checkpoint.
        """
        attempt = self._open_attempt()
        with self._work():
            self._begin()
            attempt.run.checkpoints.save(attempt.run)
        path = attempt.run.checkpoints.saved_path
        if attempt.run.checkpoints.failed or path is None:
            raise OSError(f"the checkpoint could not be written to {attempt.directory.checkpoints}")
        return path

    def evaluate(self, episodes: int = 20, *, seed: int = 1000, epsilon: float = 0.0,
                 lanes: int | None = None) -> EvalResult:
        """Evaluate the current weights on full episodes, without an effect on the training.

        Args:
            episodes: Number of episodes.
            seed: Seed of the episodes.
            epsilon: Probability of a random action; 0 is greedy.
            lanes: Environments stepped together; None = `eval.lanes`.

        Returns:
            Mean and standard deviation of the returns, and the returns and lengths of all episodes.
        """
        agent = self.agent
        with self._settings_of_run():
            return evaluate_policy(agent.policy, self.config, episodes, seed, epsilon, lanes, agent.require_env)

    # ---- looking

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self._core.progress().steps

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self._core.progress().updates

    @property
    def episodes(self) -> int:
        """Finished training episodes."""
        return self._core.meter.episodes

    @property
    def best(self) -> float | None:
        """Mean return of the best evaluation during the training; None before the first."""
        return self._core.best

    @property
    def done(self) -> bool:
        """True if the run has ended: by its length, a score of `stop_at`, `stop` or a signal."""
        return self._result is not None or self._core.stop()

    @property
    def replay(self) -> ReplayView:
        """Replay buffer; `replay.sample(8)` has no effect on the training."""
        return ReplayView(self._core.replay)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Latest value of every metric, by tag. Records are written every `run.log_period_steps` steps."""
        return dict(self._core.meter.latest)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All metric records of the run so far, those before a resume included."""
        return read_metrics(self.directory / "metrics.jsonl")

    @property
    def agent(self) -> TrainedAgent:
        """Agent with a copy of the current weights; `run.agent.act(obs)` returns a greedy action."""
        core = self._core
        learner = core.learner
        with self._settings_of_run():
            policy = Policy(learner.agent, seed_for(core.plan.seed, "agent"), core.plan.device)
            policy.load(learner.flat.state(), learner.updates)
        return TrainedAgent(self.config, core.layout.spec, policy)

    @property
    def network(self) -> nn.Module:
        """The learner's network. It is being trained: copy its weights to keep them."""
        return self._core.learner.flat.net

    def __repr__(self) -> str:
        state = "finished" if self._result is not None else f"{self.steps:,} of {self.config.total_steps:,} steps"
        return f"Run({self.config.env.name}, {self.config.agent.algo}, {state}, {self.directory})"

    # ---- end

    def close(self) -> None:
        """End the run if it has not ended, with a checkpoint, and close its environments and files."""
        if self._result is None and not self._failed and self._begun:
            self.stop()
        self._close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # ---- parts

    @property
    def _core(self) -> LearnerCore:
        if self._attempt is None:
            raise UserError(f"{self.directory} was finished already: pass a larger total_steps to continue it")
        return self._attempt.core

    def _open_attempt(self) -> Attempt[LearnerRun]:
        """The roles of a run that has not ended."""
        if self._attempt is None or self._result is not None or self._failed:
            raise UserError(f"the run {self.directory} is closed: qfleet.Run.resume({str(self.directory)!r}) continues "
                            "it, and qfleet.load loads its policy")
        return self._attempt

    def _open(self, prepared: _Prepared, build: Callable[[ExitStack], Attempt[LearnerRun] | None]) -> None:
        config = prepared.config
        self._failed = self._begun = False
        self._threads, self._rng = config.run.threads or 1, torch.get_rng_state()
        self._evaluators = RemoteEvaluatorFactory() if config.evaluator_process else None
        with ExitStack() as stack, self._settings_of_run(), advise_on_oom(config):
            if prepared.view is not None:
                stack.callback(prepared.view.close)
            self._attempt = build(stack)
            self._resources = stack.pop_all()

    def _start(self, prepared: _Prepared, provenance: Mapping[str, str], stack: ExitStack) -> Attempt[LearnerRun]:
        config = prepared.config
        env = make_env(config.env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s)
        stack.callback(env.close)
        config = resolve_auto(config, env.spec)
        source = initial_weights(config, env.spec)
        directory = RunDirectory.create(config.run, default_name(config.env.id, config.agent.algo, config.seed))
        stack.callback(directory.unlock)
        self.config, self.directory = config, directory.path
        try:
            attempt = Attempt(config, env.spec, directory, prepared.sinks, self._roles(config, env, directory, stack),
                              callbacks=prepared.callbacks)
            stack.callback(attempt.close)
            unfit = attempt.load_initial_weights(source) if source else []
            attempt.open({"sources": dict(provenance), **({"begun_anew": unfit} if unfit else {})})
        except BaseException:
            directory.discard()  # otherwise its name would stay taken by a run that never started
            raise
        return attempt

    def _restore(self, directory: RunDirectory, prepared: _Prepared, stack: ExitStack) -> Attempt[LearnerRun] | None:
        config = prepared.config
        self.config, self.directory = config, directory.path
        checkpoint, self._result = open_for_resume(directory, config, stack)
        if self._result is not None:
            return None
        env = make_env(config.env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s)
        stack.callback(env.close)
        if checkpoint is not None:
            require_same_env(checkpoint, env.spec)
        self.config = config = resolve_auto(config, env.spec)
        attempt = Attempt(config, env.spec, directory, prepared.sinks, self._roles(config, env, directory, stack),
                          checkpoint, prepared.callbacks)
        stack.callback(attempt.close)
        if checkpoint is None and (source := initial_weights(config, env.spec)) is not None:
            attempt.load_initial_weights(source)
        attempt.open({} if checkpoint is None else {"resumed_from": checkpoint.path.name})
        return attempt

    def _roles(self, config: RunConfig, env: VectorEnv, directory: RunDirectory,
               stack: ExitStack) -> Callable[[Hooks], LearnerRun]:
        """Builder of a run with all roles in this process; the stack closes their environments."""
        def build(hooks: Hooks) -> LearnerRun:
            setup = make_acting_setup(config, env)
            stack.callback(setup.close)
            if self._evaluators is None:
                return LearnerRun(setup, make_plan(config), hooks)
            return LearnerRun(setup, make_plan(config), hooks,
                              make_evaluator=partial(self._evaluators, config, directory, stack))

        return build

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._open_attempt().run.begin()

    def _advance(self, pause: Callable[[], bool]) -> None:
        attempt = self._open_attempt()
        if self.done or pause():
            return
        stop = attempt.core.stop
        with self._work(), attempt.stops_on_signal():
            self._begin()
            attempt.run.advance(pause)
        if stop.reason == "interrupted":
            stop.withdraw()
            raise KeyboardInterrupt

    def _finish(self) -> None:
        attempt = self._open_attempt()
        reason = attempt.run.finish()
        result = attempt.result(reason)
        if self._evaluators is not None:
            result = self._evaluators.check_result(result)
        record_result(attempt.directory, result)
        self._result = result
        self._close()

    def _close(self) -> None:
        with self._settings_of_run():
            self._resources.close()

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Context of everything that changes the run: an exception is recorded, and ends it."""
        attempt = self._open_attempt()
        try:
            with self._settings_of_run(), recording_failure(attempt.directory), advise_on_oom(self.config):
                yield
        except BaseException:
            self._failed = True
            self._close()
            raise

    @contextmanager
    def _settings_of_run(self) -> Iterator[None]:
        """Use the run's number of threads and state of torch's generator, and restore the caller's afterwards."""
        threads, rng = torch.get_num_threads(), torch.get_rng_state()
        torch.set_num_threads(self._threads)
        torch.set_rng_state(self._rng)
        try:
            yield
        finally:
            self._rng = torch.get_rng_state()
            torch.set_rng_state(rng)
            torch.set_num_threads(threads)
