"""Environments that fail in the middle of training: mended, counted, or the end of the run by name."""

from pathlib import Path

import gymnasium
import pytest
from real_runs import TINY, Spy, newest, qfleet, records, train

from qfleet.cli.commands import main
from qfleet.core.errors import EnvFault

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHORT = ["total_steps=400", "eval.period_steps=null", "eval.episodes=1", "run.name=x"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def command_line(*args):
    """The exit code of a tiny training by the command line, in this process."""
    return main(["train", "toy/Faulty-v0", *TINY, *SHORT, *args])


def test_one_that_raises_is_rebuilt_and_counted():
    result = train("toy/Faulty-v0", *SHORT, "env.kwargs={length: 20, raise_at: 60}")
    assert result.exit_code == 0 and result.steps >= 400 and result.updates > 100
    last = records(result.directory)[-1]
    assert last["fault/env_rebuilds"] == 2 * (200 // 60)
    assert last["rollout/ep_rew_mean"] == 20, "episodes that were lost count as no score"


def test_one_that_always_raises_ends_the_run_with_its_own_traceback(capsys):
    assert command_line("env.kwargs={length: 20, raise_at: 8}", "env.max_faults=3") == 1
    err = capsys.readouterr().err
    assert "toy/Faulty-v0 failed 3 times in lane 0" in err and "env.max_faults=3" in err
    assert 'toy.py", line' in err and "RuntimeError: set to fail at step 8" in err
    assert "the run is in runs/x" in err and "failed unexpectedly" not in err


class Quits(gymnasium.Wrapper):
    """Calls exit(0), once in its life."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 60:
            raise SystemExit(0)
        return self.env.step(action)


def test_one_that_exits_does_not_end_the_training_in_silence():
    result = train("toy/Faulty-v0", *SHORT, "env.wrappers=[test_env_failing:Quits]")
    assert result.exit_code == 0 and result.steps >= 400
    assert records(result.directory)[-1]["fault/env_rebuilds"] >= 2


@pytest.mark.parametrize("kind", ["nan_at", "nan_reward_at"])
def test_nan_ends_the_run_naming_lane_and_step_or_costs_the_episode(kind, capsys):
    faulty = f"env.kwargs={{length: 30, {kind}: 70}}"
    assert command_line(faulty) == 1
    err = capsys.readouterr().err
    assert "toy/Faulty-v0 gave" in err and "in lane 0 at step 10 of its episode" in err
    assert "env.on_nan=drop_episode" in err and "Traceback" not in err
    result = train("toy/Faulty-v0", *SHORT, "run.name=y", faulty, "env.on_nan=drop_episode")
    assert result.exit_code == 0 and records(result.directory)[-1]["fault/env_rebuilds"] == 4
    assert all(value.isfinite().all() for value in newest(result.directory).policy().values())


def test_a_wrong_shape_ends_the_run_with_both_shapes(capsys):
    assert command_line("env.kwargs={shape_at: 70}") == 1
    err = capsys.readouterr().err
    assert "(5,)" in err and "(4,)" in err and "lane 0" in err and "Traceback" not in err


@pytest.mark.parametrize("fault", ["hang_at", "exit_at"])
def test_in_a_process_of_its_own_it_may_hang_and_exit(fault, caplog):
    # Random walks of 30 steps; each child lives for 40 steps of each lane.
    result = train("toy/Faulty-v0", *SHORT, "total_steps=120", f"env.kwargs={{length: 30, {fault}: 40}}",
                   "env.isolate=true", "env.step_timeout_s=2", "run.stall_timeout_s=1")
    assert result.exit_code == 0 and result.steps >= 120
    last = records(result.directory)[-1]
    assert last["fault/env_rebuilds"] == 2 and last["rollout/ep_rew_mean"] == 30
    assert "is replaced" in caplog.text


def test_a_failure_in_its_own_process_ends_the_run_as_it_would_here(capsys):
    assert command_line("env.kwargs={length: 20, raise_at: 8}", "env.max_faults=3", "env.isolate=true") == 1
    err = capsys.readouterr().err
    assert "toy/Faulty-v0 failed 3 times in lane 0" in err and "RuntimeError: set to fail at step 8" in err


def test_one_that_hangs_in_this_process_is_reported_with_all_stacks(tmp_path):
    done = qfleet("train", "toy/Faulty-v0", *TINY, *SHORT, "env.kwargs={hang_at: 60}", "run.stall_timeout_s=0.5",
                  "run.log_period_steps=50", cwd=tmp_path)
    assert done.returncode == 1
    assert "toy/Faulty-v0 has not answered for 0.5 s (run.stall_timeout_s)" in done.stderr
    assert "env.isolate=true" in done.stderr
    assert "most recent call" in done.stderr and 'envs/toy.py", line' in done.stderr
    last = records(tmp_path / "runs/x")[-1]
    assert 50 <= last["step"] <= 120, "what was measured before is on the disk"


def test_one_that_cannot_be_built_is_found_before_a_run_is_made(capsys):
    assert command_line("env.kwargs={nonsense: 1}") == 2
    assert "nonsense" in capsys.readouterr().err and not Path("runs").exists()


def test_one_that_fails_in_evaluation_only_ends_the_run_too(monkeypatch):
    """The judge's environment is another instance; its faults are not swallowed."""
    monkeypatch.setattr(Quits, "steps", -10**6)
    spy = Spy(lambda record: monkeypatch.setattr(Quits, "steps", 59) if record["step"] >= 200 else None)
    with pytest.raises(EnvFault, match="without completing an episode"):
        train("toy/Faulty-v0", *SHORT, "env.wrappers=[test_env_failing:Quits]", "env.max_faults=2", sinks=[spy])
    assert spy.records
