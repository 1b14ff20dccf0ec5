"""Signals: the first saves and ends the run in order, a second SIGINT ends it at once, resume goes on."""

import contextlib
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import gymnasium
import pytest
from real_runs import (
    ENVIRONMENT,
    TINY,
    Spy,
    assert_no_step_twice,
    command,
    newest,
    records,
    train,
    wait_until,
)

from qfleet import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATHS = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ENDLESS = ["total_steps=100000", "run.log_period_steps=50", "run.name=x"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def at_step(step, *numbers):
    """A sink that signals its own process once, at the first record from that step on."""
    left = list(numbers)

    def act(record):
        while record["step"] >= step and left:
            os.kill(os.getpid(), left.pop(0))
    return Spy(act)


@pytest.mark.parametrize(("number", "code", "reason"), [
    (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 75, "preempted"), (signal.SIGUSR1, 75, "preempted"),
    (signal.SIGHUP, 75, "preempted")])
def test_one_signal_saves_and_resume_goes_on(number, code, reason):
    before = [signal.getsignal(each) for each in ALL]
    result = train("cartpole", *ENDLESS, sinks=[at_step(150, number)])
    assert (result.exit_code, result.reason) == (code, reason)
    assert [signal.getsignal(each) for each in ALL] == before
    assert newest(result.directory).manifest.step == result.steps
    assert not (result.directory / "lock").exists()
    assert 150 <= result.steps < 200
    again = api.resume("x", [f"total_steps={result.steps + 200}"])
    assert again.exit_code == 0 and again.steps >= result.steps + 200 and again.episodes > result.episodes
    assert_no_step_twice(result.directory)


def test_a_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt):
        train("cartpole", *ENDLESS, sinks=[at_step(150, signal.SIGINT, signal.SIGINT)])
    assert list(Path("runs/x/checkpoints").glob("step-*")) == [], "nothing is saved any more"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_records_after_the_checkpoint_are_written_again_and_purged_from_the_board():
    """Killed without a checkpoint at its end: the records beyond the last one vanish, in both files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Dies(BaseException):  # an Exception in a sink would end the run with a checkpoint
        pass

    def die(record):
        if record["step"] >= 1000:
            raise Dies

    args = [*ENDLESS, "checkpoint.period_steps=600", "run.tensorboard=true", "eval.period_steps=300"]
    with pytest.raises(Dies):
        train("cartpole", *args, sinks=[Spy(die)])
    run = Path("runs/x")
    saved = newest(run).manifest.step
    assert 600 <= saved < 700 and records(run)[-1]["step"] >= 1000
    api.resume(run, ["total_steps=1300"])
    assert_no_step_twice(run)
    board = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0}).Reload()
    for tag, evaluated in (("replay/size", None), ("eval/mean_reward", True)):
        steps = [event.step for event in board.Scalars(tag)]
        assert steps == sorted(steps)
        wanted = [record["step"] for record in records(run) if evaluated is None or tag in record]
        assert steps == wanted, "the board shows what the record holds"
    assert steps[-1] >= 1300 > saved


class Signals(gymnasium.Wrapper):
    """Signals its own process after so many steps, and then plays on for ever if nobody listens."""

    after = None

    def step(self, action):
        if Signals.after is not None:
            Signals.after -= 1
            if Signals.after == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            assert Signals.after > -2000, "the evaluation was not broken off"
        obs, reward, _, _, info = self.env.step(action)
        return obs, reward, False, False, info


def test_a_signal_breaks_an_evaluation_off_and_resume_makes_up_for_it(monkeypatch):
    """An evaluation of long games takes minutes; whoever sends SIGTERM kills sooner than that."""
    def arm(record):
        if record["step"] >= 400:
            monkeypatch.setattr(Signals, "after", 300)  # within the evaluation, which plays 2 x 5000 steps

    args = ["env.wrappers=[test_signalled:Signals]", "env.max_episode_steps=5000", "eval.period_steps=400"]
    result = train("toy/Faulty-v0", *ENDLESS, *args, sinks=[Spy(arm)])
    assert result.exit_code == 75 and result.steps == 400 and result.best is None
    monkeypatch.setattr(Signals, "after", None)
    again = api.resume("x", ["total_steps=450"])
    evaluations = [record["step"] for record in records(again.directory) if "eval/mean_reward" in record]
    assert len(evaluations) == 2 and 400 < evaluations[0] < 420, "at once, and at the end"
    assert again.best == 5000


class Chatty(gymnasium.Wrapper):
    """Prints at every step, as environments under development do."""

    def step(self, action):
        print("a step", flush=True)
        return self.env.step(action)


def in_terminal(args, ready):
    """Run the command line in a terminal of its own, close that when `ready`; the exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(args[0], args, ENVIRONMENT | {"TERM": "xterm", "CI": "", "PYTHONPATH": PATHS})
    os.set_blocking(terminal, False)
    deadline = time.monotonic() + 60
    try:
        while not ready():
            assert time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0)
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 1 << 16)
            time.sleep(0.01)
        os.close(terminal)
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, "goes on without a terminal"
            time.sleep(0.01)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(ended[1])


def test_a_run_whose_terminal_is_closed_saves_and_goes_on_later(tmp_path):
    """An environment that prints, and the last words of the command, find no terminal either."""
    args = ["train", "cartpole", *TINY, *ENDLESS, "env.wrappers=[test_signalled:Chatty]"]
    metrics = Path("runs/x/metrics.jsonl")
    assert in_terminal(command(*args), lambda: metrics.exists() and metrics.read_text().count("\n") > 2) == 75
    last = newest(Path("runs/x")).manifest.step
    assert last >= 100 and not Path("runs/x/lock").exists()
    assert api.resume("x", [f"total_steps={last + 50}"]).exit_code == 0


def test_the_command_line_obeys_also_while_the_environment_hangs(tmp_path):
    """One SIGINT waits for the step under way, which here never ends; the second does not."""
    args = ["train", "toy/Faulty-v0", *TINY, *ENDLESS, "env.kwargs={hang_at: 30}"]
    process = subprocess.Popen(command(*args), cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: Path("runs/x/metrics.jsonl").exists() and Path("runs/x/metrics.jsonl").read_text(), process)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "Traceback" not in err, err
