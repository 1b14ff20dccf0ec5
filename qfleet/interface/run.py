"""A run in this process: created, stepped, inspected, evaluated, saved and ended by the calling program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from qfleet.actor.policy import Policy
from qfleet.core.errors import UserError
from qfleet.core.seeds import seed_for
from qfleet.interface import local_attempt
from qfleet.interface.arguments import Settings, changed_config, resolve_arguments
from qfleet.interface.local_attempt import LocalRunParts, OpenedRun, TorchState, evaluator_failure
from qfleet.interface.scoring import EvalResult, evaluate_policy, require_positive
from qfleet.interface.trained_agent import TrainedAgent
from qfleet.interface.user_types import EnvLike, SinkLike, WrapperLike
from qfleet.launch.attempt import Attempt, advise_on_oom, record_result, recording_failure
from qfleet.launch.final_score import score_result
from qfleet.launch.train_result import TrainResult
from qfleet.runconfig.resolution import Resolved
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.runs.find import StrPath
from qfleet.runs.metric_writers import read_metrics
from qfleet.training.learner_core import LearnerCore
from qfleet.training.learner_run import LearnerRun
from qfleet.training.loop import PauseOnInterrupt
from qfleet.training.run_view import RunView


class Run(RunView):
    """A run whose actors and learner are in this process.

    A round is one step of all lanes and the updates that are due. `step`, `until` and `train` run whole rounds of the
    same loop. Stepping a run by hand therefore gives bitwise the same results as training it in one call. Inspecting,
    evaluating or saving a run does not affect its training.

    Attributes:
        config: Complete config, with resolved auto values.
        directory: Run directory.

    Examples:
        >>> with qfleet.Run("cartpole", ["seed=3"]) as run:
        ...     steps = run.step(5_000)
        ...     score = run.evaluate(episodes=5).mean_reward
        ...     result = run.train()
    """

    def __init__(self, config: RunConfig | Mapping[str, Any] | StrPath | Any = None, overrides: Sequence[str] = (), *,
                 env: EnvLike | None = None, wrappers: Sequence[WrapperLike] | None = None,
                 sinks: Sequence[SinkLike] = (), callbacks: Sequence[object] = (), progress: bool = False,
                 **settings: Unpack[Settings]) -> None:
        """Create a run. Nothing is trained yet.

        Args:
            config: A recipe, file, environment or settings, as for `qfleet.train`.
            overrides: Strings of the form `key=value`, which override everything else.
            env: The environment, as for `qfleet.train`.
            wrappers: Its wrappers, as for `qfleet.train`.
            sinks: Receivers of every metric record, as for `qfleet.train`.
            callbacks: Callbacks, as for `qfleet.train`.
            progress: Show the progress, as the command line does.
            **settings: Config keys, as for `qfleet.train`.

        Raises:
            UserError: The configuration is invalid or needs other processes, or the run directory exists.
        """
        self._create(resolve_arguments(config, overrides, env, wrappers, settings), sinks, callbacks, progress)

    @classmethod
    def create(cls, resolved: Resolved, sinks: Sequence[Any] = (), callbacks: Sequence[Any] = (),
               progress: bool = False) -> Run:
        """Create a run with a complete config.

        Args:
            resolved: Config, and the origin of each of its keys.
            sinks: Receivers of every metric record.
            callbacks: Callbacks.
            progress: Show the progress.

        Returns:
            The run.
        """
        run = cls.__new__(cls)
        run._create(resolved, sinks, callbacks, progress)
        return run

    @classmethod
    def resume(cls, run: StrPath, /, overrides: Sequence[str] = (), *, env: EnvLike | None = None,
               wrappers: Sequence[WrapperLike] | None = None, sinks: Sequence[SinkLike] = (),
               callbacks: Sequence[object] = (), progress: bool = False, root: StrPath = "runs",
               trust: bool = False, **settings: Unpack[Settings]) -> Run:
        """Continue a run from its newest valid checkpoint.

        Args:
            run: Path of the run, or its name under `root`, a prefix of it, or `last`.
            overrides: Strings of the form `key=value`. Keys that affect what is learned cannot change.
            env: The environment, if the run was created with an object that cannot be imported.
            wrappers: Wrappers of the environment, if they cannot be imported.
            sinks: Receivers of every metric record, as for `train`.
            callbacks: Callbacks, as for `train`.
            progress: Show the progress, as for `train`.
            root: Directory in which runs are looked up by name.
            trust: Allow a run that was not created on this machine to import modules that it names.
            **settings: Config keys, as for `train`.

        Returns:
            The run, at the step of the checkpoint.

        Raises:
            UserError: There is no such run, an override is not allowed, or the run is not trusted.
        """
        directory, config = changed_config(run, overrides, root, trust, env, wrappers, settings)
        return cls.reopen(directory, config, sinks, callbacks, progress)

    @classmethod
    def reopen(cls, directory: RunDirectory, config: RunConfig, sinks: Sequence[Any] = (),
               callbacks: Sequence[Any] = (), progress: bool = False) -> Run:
        """Continue a run from its newest valid checkpoint with a config that may differ.

        Args:
            directory: Run directory.
            config: Config with the changed keys.
            sinks: Receivers of every metric record.
            callbacks: Callbacks.
            progress: Show the progress.

        Returns:
            The run.
        """
        run = cls.__new__(cls)
        parts = LocalRunParts.check(config, sinks, callbacks, progress)
        run._open(parts, partial(local_attempt.reopen, directory, parts))
        return run

    # ---- training

    def step(self, n: int = 1) -> int:
        """Train for at least `n` environment steps, in whole rounds.

        Args:
            n: Environment steps, summed over all lanes.

        Returns:
            Number of steps taken, fewer than `n` only if the run has ended.

        Raises:
            UserError: `n` is not a positive integer, or the run is closed.
            KeyboardInterrupt: Ctrl-C was pressed. The round was completed, and the run can be continued.
        """
        require_positive(n=n)
        before = self.steps
        return self.until(steps=before + n).steps - before

    def until(self, condition: Callable[[Run], bool] | None = None, *, steps: int | None = None,
              updates: int | None = None, episodes: int | None = None) -> Run:
        """Train until a condition holds after a round, or a count is reached, or the run has ended.

        Args:
            condition: Function of the run. If it is already true, the run does not train.
            steps: Environment steps of the run.
            updates: Updates of the run.
            episodes: Finished training episodes of the run.

        Returns:
            The run itself.

        Raises:
            UserError: No condition is given, or the run is closed.
            KeyboardInterrupt: Ctrl-C was pressed. The round was completed, and the run can be continued.

        Examples:
            >>> good = lambda run: run.metrics.get("rollout/ep_rew_mean", 0) > 100
            >>> run.until(good, steps=50_000)
            Run(CartPole-v1, dqn, ...)
        """
        goals = {"steps": steps, "updates": updates, "episodes": episodes}
        limits = {name: value for name, value in goals.items() if value is not None}
        require_positive(**limits)
        if not callable(condition) and (condition is not None or not limits):
            raise UserError("until: give a condition, which is a function of the run, or steps, updates or episodes")
        self._advance(lambda: any(getattr(self, name) >= value for name, value in limits.items())
                      or (condition is not None and bool(condition(self))))
        return self

    def train(self) -> TrainResult:
        """Train to the end of the run, evaluate, save, score the best policy with fresh episodes, and close.

        Returns:
            The run directory, counters, score, best evaluation and the reason for the end of the training.
        """
        return self._end()

    def stop(self) -> TrainResult:
        """End the run now: save a checkpoint and close, without a score. `resume` continues it.

        With `run.exact_resume` the last scheduled checkpoint is kept as the newest one, if there is one and no other
        was written since.

        Returns:
            The result of the run, as for `train`.
        """
        return self._end("stopped")

    def save(self) -> Path:
        """Write a checkpoint now, in addition to the scheduled ones. Resuming from it is not exact.

        Returns:
            Path of the checkpoint.
        """
        attempt = self._open_attempt()
        checkpoints = attempt.run.checkpoints
        with self._work():
            self._begin()
            checkpoints.save(attempt.run)
        if checkpoints.failed:
            raise OSError(f"the checkpoint could not be written to {attempt.directory.checkpoints}")
        path = checkpoints.saved_path or attempt.resumed_from  # the latter if nothing has changed since
        assert path is not None
        return path

    def evaluate(self, episodes: int = 20, *, seed: int = 1000, epsilon: float = 0.0,
                 lanes: int | None = None) -> EvalResult:
        """Evaluate the current weights on full episodes, without affecting the training.

        Args:
            episodes: Number of episodes.
            seed: Seed of the episodes.
            epsilon: Probability of a random action; 0 is greedy.
            lanes: Environments stepped together; None = `eval.lanes`.

        Returns:
            Mean and standard deviation of the returns, and the returns and lengths of all episodes.
        """
        agent = self.agent
        with self._torch.active(keep=False):
            return evaluate_policy(agent.policy, self.config, episodes, seed, epsilon, lanes, agent.require_env)

    # ---- looking

    @property
    def done(self) -> bool:
        """True if the run has ended: by its length, a score of `stop_at`, `stop` or a signal."""
        return self._result is not None or self._core.stop()

    @property
    def records(self) -> list[dict[str, Any]]:
        """All metric records of the run so far, those before a resume included."""
        return read_metrics(self.directory / "metrics.jsonl")

    @property
    def agent(self) -> TrainedAgent:
        """Agent with a copy of the current weights, created at each access."""
        core, learner = self._core, self._core.learner
        with self._torch.active(keep=False):
            policy = Policy(learner.agent, seed_for(core.plan.seed, "agent"), core.plan.device)
            policy.load(learner.flat.state(), learner.updates)
        return TrainedAgent(self.config, core.layout.spec, policy)

    def __repr__(self) -> str:
        steps = self.steps if self._result is None else self._result.steps
        end = ", finished: resume it with a larger total_steps" if self._attempt is None else ", closed" * self._closed
        state = f"{steps:,} of {self.config.total_steps:,} steps{end}"
        return f"Run({self.config.env.name}, {self.config.agent.algo}, {state}, {self.directory})"

    # ---- end

    def close(self) -> None:
        """End the run as `stop` does, unless it has ended, and close its environments and files.

        A run that has reached its length or `stop_at` ends as with `train`, after a last evaluation.
        """
        if self._begun and not self._closed:
            self.stop()
        elif self._attempt is not None and not self._closed:
            self._attempt.directory.conclude("stopped")
        self._close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._attempt is not None and not self._closed:
            self._resources.callback(self._attempt.record_callers_error, error)
        self.close()

    # ---- parts

    @property
    def _core(self) -> LearnerCore:
        return self._unfinished().core

    def _open_attempt(self) -> Attempt[LearnerRun]:
        """The roles of a run that has not ended."""
        if self._closed and self._attempt is not None:
            raise UserError(f"the run {self.directory} is closed: qfleet.Run.resume({str(self.directory)!r}) continues "
                            "it, and qfleet.load loads its policy")
        return self._unfinished()

    def _unfinished(self) -> Attempt[LearnerRun]:
        if self._attempt is None:
            raise UserError(f"{self.directory} was finished already: pass a larger total_steps to continue it")
        return self._attempt

    def _create(self, resolved: Resolved, sinks: Sequence[Any], callbacks: Sequence[Any], progress: bool) -> None:
        parts = LocalRunParts.check(resolved.config, sinks, callbacks, progress)
        self._open(parts, partial(local_attempt.create, parts, resolved.provenance))

    def _open(self, parts: LocalRunParts, build: Callable[[ExitStack], OpenedRun]) -> None:
        self._closed = self._begun = False
        building = TorchState(1)  # the number of threads may depend on the environment
        with ExitStack() as stack, building.active(), advise_on_oom(parts.config):
            if parts.view is not None:
                stack.callback(parts.view.close)
            opened = build(stack)
            self._resources = stack.pop_all()
        self._torch = building.with_threads(opened.config.run.threads or 1)
        self.config, self.directory = opened.config, opened.directory.path
        self._attempt, self._result = opened.attempt, opened.result
        if self._attempt is not None:
            self._attempt.run.stop_clocks()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._open_attempt().run.begin()
            self._finish_if_failed()

    def _advance(self, pause: Callable[[], bool]) -> None:
        attempt, errors = self._open_attempt(), list[Exception]()
        if self.done or pause():
            return
        signals = PauseOnInterrupt(attempt.core.stop)

        def pause_or_error() -> bool:
            """After an error in the caller's condition the round is complete, so that the run can be continued."""
            try:
                return signals.interrupted or pause()
            except Exception as error:
                errors.append(error)
                return True

        with self._work(), attempt.stops_on_signal(signals):
            self._begin()
            attempt.run.advance(pause_or_error)
            self._finish_if_failed()
        if errors:
            raise errors[0]
        if signals.interrupted:
            raise KeyboardInterrupt

    def _end(self, reason: str | None = None) -> TrainResult:
        """Train to the end, or end now for this reason unless the run has ended already; evaluate, save and close."""
        if self._result is None:
            attempt = self._open_attempt()
            with self._work(), attempt.stops_on_signal():
                if reason is not None and not self.done:
                    attempt.core.stop.request(reason)
                self._begin()
                attempt.run.advance(lambda: False)
                self._finish(scored=reason is None or attempt.core.stop.reason != reason)
        assert self._result is not None
        return self._result

    def _finish_if_failed(self) -> None:
        """Save and raise the error if a callback, a sink or the evaluator's process has failed."""
        run = self._open_attempt().run
        if run.failed or evaluator_failure(run) is not None:
            self._finish()

    def _finish(self, scored: bool = True) -> None:
        attempt = self._open_attempt()
        result = attempt.result(attempt.run.finish())
        if (failure := evaluator_failure(attempt.run)) is not None:
            raise failure
        record_result(attempt.directory, result)
        if scored:
            result = score_result(result, self.config, attempt.user_sinks)
        self._result = result
        self._close()

    def _close(self) -> None:
        self._closed = True
        with self._torch.active():
            self._resources.close()

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Context of everything that changes the run: an exception is recorded, and ends it."""
        attempt = self._open_attempt()
        try:
            with self._torch.active(), recording_failure(attempt.directory), advise_on_oom(self.config):
                yield
        except BaseException:
            self._close()
            raise
