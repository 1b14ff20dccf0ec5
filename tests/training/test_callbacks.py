"""Callbacks: their order, their requests, what they log, and what is refused before training."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from test_learner_run import TINY, RunOutputs

from qfleet.core.errors import CallbackError, UserError
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.resolution import resolve
from qfleet.training.callbacks import HOOKS, Callback, check_callbacks
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_run import LearnerRun


class Diary:
    """Callback that writes down everything, and does something at an event of a given name."""

    def __init__(self, at="", act=lambda run: None):
        self.entries, self.at, self.act = [], at, act

    def note(self, name, run, *details):
        self.entries.append((name, *details))
        if name == self.at:
            self.act(run)

    def names(self, *without):
        return [entry[0] for entry in self.entries if entry[0] not in without]

    def on_start(self, run):
        self.note("start", run)

    def on_step(self, run):
        self.note("step", run, run.steps)

    def on_episode(self, run, episode):
        self.note("episode", run, episode)

    def on_evaluation(self, run, evaluation):
        self.note("evaluation", run, evaluation)

    def on_checkpoint(self, run, checkpoint):
        self.note("checkpoint", run, checkpoint)

    def on_end(self, run, reason):
        self.note("end", run, reason)


@pytest.fixture
def make_run():
    """Builds runs with callbacks and closes their environments afterwards."""
    setups = []

    def build(callbacks, *overrides):
        config = resolve("cartpole", [*TINY, *overrides]).config
        env = make_env(config.env, config.env.lanes)
        config, outputs = resolve_auto(config, env.spec), RunOutputs()
        hooks = Hooks([outputs], outputs.save, outputs.save_best, lambda sample, update: None,
                      callbacks=check_callbacks(callbacks))
        setups.append(make_acting_setup(config, env))
        return LearnerRun(setups[-1], make_plan(config), hooks), outputs

    yield build
    for setup in setups:
        setup.close()


def test_callbacks_are_called_in_order(make_run):
    diary = Diary()
    run, _ = make_run([diary], "eval.period_steps=50", "checkpoint.period_steps=50")
    run.run()
    assert diary.entries[0] == ("start",) and diary.entries[-1] == ("end", "total_steps")
    names = diary.names("episode")
    at = names.index("evaluation")
    assert names[at - 1:at + 3] == ["step", "evaluation", "checkpoint", "step"], "before the step of their round"
    assert names[-3:] == ["evaluation", "checkpoint", "end"] and names[-4] == "step"
    episode_rounds = [index for index, name in enumerate(diary.names()) if name == "episode"]
    assert all(diary.names()[index + 1] in ("episode", "evaluation", "checkpoint", "step") for index in episode_rounds)
    steps = [entry[1] for entry in diary.entries if entry[0] == "step"]
    assert steps == sorted(steps) and steps[-1] == run.core.progress().steps


def test_events_say_what_happened(make_run):
    diary = Diary()
    run, outputs = make_run([diary], "eval.period_steps=60")
    run.run()
    episodes = [entry[1] for entry in diary.entries if entry[0] == "episode"]
    assert len(episodes) == run.core.meter.episodes > 3
    assert all(each.reward == each.length > 0 and each.actor is None and each.final_info is not None
               for each in episodes), "CartPole pays 1 per step"
    records = [record for record in outputs.records if "eval/mean_reward" in record]
    evaluations = [entry[1] for entry in diary.entries if entry[0] == "evaluation"]
    assert [each.mean_reward for each in evaluations] == [record["eval/mean_reward"] for record in records]
    assert [each.updates for each in evaluations] == [record["eval/updates"] for record in records]
    assert evaluations[0].is_best and len(evaluations[0].returns) == len(evaluations[0].lengths) == 2
    checkpoint = diary.entries[-2][1]
    assert (checkpoint.step, checkpoint.updates) == run.core.progress() and checkpoint.path is None


def test_several_callbacks_are_called_in_the_order_given(make_run):
    seen = []

    class Named:
        def __init__(self, name):
            self.name = name

        def on_step(self, run):
            seen.append(self.name)

    make_run([Named("a"), Named("b")])[0].run()
    assert seen[:4] == ["a", "b", "a", "b"]


def test_a_callback_stops_the_run_after_the_round_with_a_checkpoint(make_run):
    diary = Diary("episode", lambda run: run.stop())
    run, outputs = make_run([diary])
    assert run.run() == "stopped"
    assert outputs.saved[-1].progress == run.core.progress() and run.core.progress().steps < 120
    assert diary.names("episode")[-3:] == ["step", "checkpoint", "end"] and diary.entries[-1] == ("end", "stopped")
    assert outputs.log.count("eval") == 0


def test_a_callback_does_not_replace_the_reason_of_an_ending_run(make_run):
    run, _ = make_run([Diary("evaluation", lambda run: run.stop())], "stop_at=1", "eval.period_steps=40")
    assert run.run() == "stop_at"


def test_requests_are_served_in_the_next_round(make_run):
    def ask(run):
        if 60 <= run.steps < 62:
            run.request_evaluation()
            run.request_checkpoint()

    diary = Diary("step", ask)
    run, outputs = make_run([diary])
    run.run()
    names = diary.names("episode")
    at = names.index("evaluation")
    assert names[at:at + 3] == ["evaluation", "checkpoint", "step"]
    assert next(entry[1].step for entry in diary.entries if entry[0] == "evaluation") in (62, 63)
    assert outputs.saved[0].progress.steps in (62, 63) and len(outputs.saved) == 2


def test_a_requested_checkpoint_is_written_before_a_stop_with_exact_resume(make_run):
    def ask(run):
        if run.steps >= 60:
            run.request_checkpoint()
            run.stop()

    exact = ["run.exact_resume=true", "checkpoint.period_steps=48"]
    run, outputs = make_run([Diary("step", ask)], *exact)
    run.run()
    assert len(outputs.saved) == 2 and outputs.saved[-1].progress == run.core.progress()
    run, outputs = make_run([Diary("step", lambda run: run.steps >= 60 and run.stop())], *exact)
    run.run()
    assert len(outputs.saved) == 1, "otherwise the scheduled one stays the newest, since it resumes exactly"


def test_callbacks_change_nothing(make_run):
    def look(run):
        if run.updates:
            run.replay.sample(4)
        assert run.network is not None and run.metrics is not None and repr(run)

    plain, plain_outputs = make_run([])
    plain.run()
    watched, outputs = make_run([Diary("step", look)])
    watched.run()
    assert plain.core.learner.flat.master.equal(watched.core.learner.flat.master)
    assert [record["step"] for record in plain_outputs.records] == [record["step"] for record in outputs.records]


def test_logged_metrics_are_means_over_a_log_period(make_run):
    levels = iter(range(1000))
    run, outputs = make_run([Diary("step", lambda run: run.log({"curriculum/level": next(levels)}))],
                            "run.log_period_steps=40")
    run.run()
    logged = [record["curriculum/level"] for record in outputs.records if "curriculum/level" in record]
    assert len(logged) >= 3 and logged == sorted(logged) and logged[0] > 1


def test_what_is_logged_at_the_end_is_written(make_run):
    class Summary(Callback):
        def on_end(self, run, reason):
            run.log({"success": True})

    run, outputs = make_run([Summary()])
    run.run()
    assert outputs.records[-1]["success"] == 1.0 and outputs.log[-1] == "flush"


@pytest.mark.parametrize(("metrics", "message"), [
    ({"step": 1}, "'step' is reserved"), ({"eval/mean_reward": 1}, "is reserved"),
    ({"rollout/ep_rew_mean": 1.0}, "is reserved"), ({"": 1}, "cannot be the name"),
    ({3: 1}, "cannot be the name"), ({"a": "high"}, "a='high' is not a number"), ({"a": [1, 2]}, "is not a number")])
def test_metrics_that_cannot_be_logged_are_explained(make_run, metrics, message):
    run, _ = make_run([Diary("start", lambda run: run.log(metrics))])
    with pytest.raises(CallbackError, match=rf"Diary.on_start .*{message}"):
        run.run()


@pytest.mark.parametrize("at", ["start", "step", "episode", "evaluation", "checkpoint", "end"])
def test_an_exception_ends_the_run_with_a_checkpoint(make_run, at):
    def fail(run):
        raise ValueError("out of luck")

    failing, other = Diary(at, fail), Diary()
    run, outputs = make_run([failing, other], "eval.period_steps=40", "checkpoint.period_steps=40")
    with pytest.raises(CallbackError, match=rf"callback Diary.on_{at} \(.*test_callbacks.py, line \d+\) raised "
                                            r"ValueError: out of luck; the run was stopped at step \d+") as caught:
        run.run()
    assert isinstance(caught.value.__cause__, ValueError)
    assert outputs.saved[-1].progress == run.core.progress() and outputs.log[-1] == "flush"
    assert failing.names()[-1] == at and failing.names().count(at) == 1, "no callback is called after it"
    assert at not in other.names()


def test_the_exit_of_a_callback_ends_the_run_with_a_checkpoint(make_run):
    run, outputs = make_run([Diary("episode", lambda run: sys.exit("enough"))])
    with pytest.raises(CallbackError, match=r"raised SystemExit: enough; the run was stopped at step \d+"):
        run.run()
    assert outputs.saved[-1].progress == run.core.progress() and outputs.log[-1] == "flush"


def test_events_are_kept_only_for_callbacks_that_take_them(make_run):
    class Steps:
        def on_step(self, run):
            assert run._core.events.take() == []

    make_run([Steps()])[0].run()


class NeedsArgument(Callback):
    def __init__(self, level):
        self.level = level

    def on_step(self, run): ...


class Misspelt:
    def on_episod(self, run, episode): ...


class Foreign:
    def on_quux_quux(self, run): ...


class Idle(Callback):
    pass


class Short:
    def on_episode(self, run): ...


class Long:
    def on_step(self, run, extra): ...


class Created:
    made = 0

    def __init__(self):
        Created.made += 1

    def on_end(self, run, reason): ...


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(("given", "message"), [
    ([NeedsArgument], r"NeedsArgument cannot be created without arguments .*pass an instance, NeedsArgument\(...\)"),
    ([Misspelt()], "Misspelt has a method on_episod, which nothing calls: did you mean on_episode"),
    ([Misspelt], "did you mean on_episode"),
    ([Foreign()], "on_quux_quux, which nothing calls: the methods are on_start, on_step"),
    ([Idle()], "Idle has none of the methods on_start"), ([Idle], "Idle has none of"), ([print], "print has none of"),
    ([Short()], r"Short.on_episode must accept \(run, episode\)"), ([Short], r"must accept \(run, episode\)"),
    ([Long], r"Long.on_step must accept \(run\): missing a required argument")])
def test_what_cannot_be_called_is_refused_before_training(given, message, create):
    with pytest.raises(UserError, match=f"callbacks: .*{message}"):
        check_callbacks(given, create)


def test_a_class_is_checked_without_being_created_where_another_process_trains():
    checked, = check_callbacks([Created], create=False)
    assert (Created.made, list(checked.hooks)) == (0, ["on_end"])
    check_callbacks([Created])
    assert Created.made == 1


def test_functions_on_an_instance_are_callbacks_too():
    class Late(Callback):
        def __init__(self):
            self.on_step = lambda run: None
            self.on_gpu = True  # not a method

    assert [list(each.hooks) for each in check_callbacks([Late(), Diary()])] == [["on_step"], list(HOOKS)]


def test_the_base_class_has_every_method_with_its_arguments():
    assert HOOKS == {"on_start": 1, "on_step": 1, "on_episode": 2, "on_evaluation": 2, "on_checkpoint": 2, "on_end": 2}
    assert dataclasses.is_dataclass(check_callbacks([Diary()])[0])
