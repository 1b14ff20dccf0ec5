"""Callbacks of runs in this process: what they leave on disk, resume, and the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from run_kit import DQN, arguments
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import qfleet
from qfleet import CallbackError, Run, api
from qfleet.cli.commands import main
from qfleet.runs.directory import RunDirectory
from qfleet.runs.metric_writers import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SHORT = ["run.name=x", "total_steps=120"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(*overrides: str, callbacks, **keywords):
    name, pairs = arguments(DQN, *SHORT, *overrides)
    return api.train(name, pairs, callbacks=callbacks, **keywords)


class Logger(qfleet.Callback):
    """Logs a metric with and without a slash."""

    def __init__(self):
        self.started, self.paths = [], []

    def on_start(self, run):
        self.started.append(run.steps)

    def on_step(self, run):
        run.log({"curriculum/level": 3, "success": run.steps > 60})

    def on_checkpoint(self, run, checkpoint):
        self.paths.append(checkpoint.path)


def test_logged_metrics_are_in_the_files_of_the_run():
    logger, seen = Logger(), []
    result = train("run.tensorboard=true", "checkpoint.period_steps=60", callbacks=[logger], sinks=[seen.append])
    records = read_metrics(result.directory / "metrics.jsonl")
    assert {record["curriculum/level"] for record in records if "curriculum/level" in record} == {3.0}
    success = [record["success"] for record in records if "success" in record]
    assert success[0] == 0 and success[-1] == 1 and seen[-1].get("success") == records[-1].get("success")
    events = EventAccumulator(str(result.directory / "tb"))
    events.Reload()
    assert {"curriculum/level", "success", "time/episodes", "train/loss"} <= set(events.Tags()["scalars"])
    assert [point.value for point in events.Scalars("success")] == pytest.approx(success)
    assert [path.name for path in logger.paths] == sorted(path.name for path in logger.paths)
    assert logger.paths[-1].is_dir() and len(logger.paths) == 2


def test_callbacks_are_given_again_to_resume_and_see_the_steps_so_far():
    logger = Logger()
    at = train(callbacks=[logger]).steps
    api.resume("x", total_steps=200, callbacks=[logger])
    assert logger.started == [0, at]
    records = read_metrics(Path("runs/x/metrics.jsonl"))
    assert "success" in records[-2]
    api.resume("x", total_steps=260)
    assert logger.started == [0, at], "they are not part of the run"


class Failing:
    def on_step(self, run):
        if run.steps >= 60:
            raise ValueError("out of luck")


def test_an_exception_in_a_callback_fails_the_run_and_it_can_be_resumed():
    with pytest.raises(CallbackError, match=rf"Failing.on_step \({__file__}, line \d+\) raised ValueError"):
        train(callbacks=[Failing()])
    ending = RunDirectory(Path("runs/x")).ending()
    assert ending["reason"] == "failed" and ending["error"].startswith("callback Failing.on_step")
    assert api.resume("x").reason == "total_steps"


def test_an_exception_in_a_callback_ends_a_run_that_is_stepped():
    name, pairs = arguments(DQN, *SHORT)
    run = Run(name, pairs, callbacks=[Failing()])
    run.step(30)
    with pytest.raises(CallbackError, match="out of luck"):
        run.step(60)
    assert 60 <= int(next((run.directory / "checkpoints").iterdir()).name.partition("-")[2]) < 62
    with pytest.raises(qfleet.UserError, match="is closed"):
        run.step()
    run.close()


class FailingSink:
    def __init__(self, method):
        self.method, self.calls = method, []

    def write(self, record):
        self.call("write")

    def flush(self):
        self.call("flush")

    def close(self):
        self.calls.append("close")

    def call(self, method):
        self.calls.append(method)
        if method == self.method and self.calls.count(method) == 2 - (method == "flush"):
            raise ValueError("disk full")


@pytest.mark.parametrize("method", ["write", "flush"])
def test_an_exception_in_a_sink_fails_the_run_and_it_can_be_resumed(method):
    sink = FailingSink(method)
    with pytest.raises(CallbackError, match=rf"sink FailingSink.{method} \({__file__}, line \d+\) raised ValueError: "
                                            r"disk full; the run was stopped at step \d+"):
        train(callbacks=[], sinks=[sink])
    assert sink.calls[-2:] == [method, "close"], "it receives nothing more"
    ending = RunDirectory(Path("runs/x")).ending()
    assert ending["reason"] == "failed" and ending["error"].startswith("sink FailingSink")
    assert list(Path("runs/x/checkpoints").glob("step-*"))
    assert api.resume("x", total_steps=200).steps >= 200


def test_an_exception_in_a_function_as_sink_ends_a_run_that_is_stepped():
    name, pairs = arguments(DQN, *SHORT)
    run = Run(name, pairs, sinks=[lambda record: 1 / 0])
    with pytest.raises(CallbackError, match=r"sink .*<lambda> .* raised ZeroDivisionError"):
        run.step(60)
    assert Run.resume("x").steps >= 50


@pytest.mark.parametrize("use", [Run.step, Run.save, Run.train, Run.stop])
def test_an_exception_at_the_start_is_raised_by_whatever_starts_the_run(use):
    class Unready:
        def on_start(self, run):
            raise ValueError("not ready")

    name, pairs = arguments(DQN, *SHORT)
    run = Run(name, pairs, callbacks=[Unready()])
    with pytest.raises(CallbackError, match="not ready"):
        use(run)
    run.close()


def test_a_callback_requests_an_evaluation_of_an_evaluator_process():
    seen = []

    class Ask(qfleet.Callback):
        def on_step(self, run):
            if 100 <= run.steps < 102:
                run.request_evaluation()

        def on_evaluation(self, run, evaluation):
            seen.append((evaluation.step, evaluation.updates))
            if len(seen) == 1:
                run.stop()

    result = train("eval.process=true", "eval.period_steps=null", "total_steps=100_000", callbacks=[Ask()])
    assert result.reason == "stopped" and result.steps < 100_000
    assert seen[0][0] >= 100 and 0 < seen[0][1] <= result.updates


MODULE = """
class Stopper:
    def on_step(self, run):
        if run.steps >= 60:
            run.stop()

class Broken:
    def on_episode(self, run, episode):
        raise KeyError("goal")

class Misspelt:
    def on_stepp(self, run): ...
"""


def command(module: str, *words: str) -> int:
    name, pairs = arguments(DQN, *SHORT)
    Path("my_callbacks.py").write_text(MODULE)
    sys.modules.pop("my_callbacks", None)
    return main(["train", name, *pairs, f"callbacks=[{module}]", "--quiet", *words])


def test_callbacks_of_a_config_run_on_the_command_line(capsys):
    assert command("my_callbacks:Stopper") == 0
    assert "stopped by a callback" in capsys.readouterr().out
    assert 60 <= read_metrics(Path("runs/x/metrics.jsonl"))[-1]["step"] < 62
    assert main(["resume", "x", "--quiet"]) == 0, "they are part of the run"
    assert "stopped by a callback" in capsys.readouterr().out


def test_the_command_line_shows_whose_exception_it_was(capsys):
    assert command("my_callbacks:Broken") == 1
    error = capsys.readouterr().err
    assert "my_callbacks.py" in error and "in on_episode" in error and "qfleet/training" not in error
    assert "error: callback Broken.on_episode (" in error and "raised KeyError: 'goal'" in error
    assert "its last checkpoint is step-" in error


@pytest.mark.parametrize(("module", "message"), [
    ("my_callbacks:Misspelt", "has a method on_stepp, which nothing calls: did you mean on_step?"),
    ("my_callbacks:Stoper", "has no attribute 'Stoper'"), ("no_such_module:A", "there is no module"),
    ("Stopper", "module:attribute")])
def test_the_command_line_refuses_what_cannot_be_called(module, message, capsys):
    assert command(module) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/x").exists()
