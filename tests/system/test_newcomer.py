"""A newcomer's first hour: an environment of one's own, scripts without a guard, pipes, and nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import ENVIRONMENT, TINY, command, qfleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHORT = [*TINY, "total_steps=150", "eval.period_steps=null", "eval.episodes=1"]
PLAN = ("run", "environment", "agent", "steps", "memory", "disk")

MY_ENV = '''
import gymnasium
import numpy as np
from gymnasium import spaces

from my_rules import LENGTH


class MyEnv(gymnasium.Env):
    observation_space = spaces.Box(0, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(3, np.float32), {}

    def step(self, action):
        print("a step was taken")
        self.t += 1
        return self.np_random.random(3, np.float32), float(action), self.t == LENGTH, False, {}
'''


def put_env(folder: Path) -> None:
    (folder / "my_env.py").write_text(MY_ENV)
    (folder / "my_rules.py").write_text("LENGTH = 7\n")


@pytest.mark.parametrize("isolate", ["false", "true"])
def test_an_environment_of_ones_own_is_found_in_the_working_directory(tmp_path, isolate):
    put_env(tmp_path)
    done = qfleet("train", "my_env:MyEnv", *SHORT, f"env.isolate={isolate}", "run.name=x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "runs/x", "the run directory is the last line"
    assert ("a step was taken" in done.stdout) == (isolate == "false"), "the prints of an isolated one go to stderr"
    lines = done.stderr.splitlines()
    plan = [next(i for i, line in enumerate(lines) if line.startswith(name)) for name in PLAN]
    first = next(i for i, line in enumerate(lines) if "150 steps  " in line)
    assert plan == sorted(plan) and plan[-1] < first, "the plan comes before the first step"
    if isolate == "true":
        assert plan[-1] < next(i for i, line in enumerate(lines) if line == "a step was taken")
    assert "my_env:MyEnv" in done.stderr and "150 steps" in done.stderr
    for verb in ("resume", "eval", "record", "plot", "report"):
        assert f"qfleet {verb} runs/x" in done.stdout
    assert "tensorboard --logdir runs/x" in done.stdout


def test_a_script_without_a_guard_may_isolate_and_its_neighbours_are_found(tmp_path):
    """The child is a fresh interpreter that never imports the script; modules beside the script are found, too."""
    home = tmp_path / "project"
    home.mkdir()
    put_env(home)
    (home / "script.py").write_text(
        "import qfleet\n"
        f"result = qfleet.train('my_env:MyEnv', {[*SHORT, 'env.isolate=true', 'run.name=x']!r})\n"
        "print('ended with', result.exit_code, result.reason)\n"
        "print('acts', qfleet.load(result.directory).act([0.1, 0.2, 0.3]) in (0, 1))\n")
    done = subprocess.run([sys.executable, "project/script.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=110, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ended with 0 total_steps", "acts True"], "once, and nothing else"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_nothing_is_written_outside_the_run_directory(tmp_path):
    places = {name: tmp_path / name for name in ("cwd", "home", "tmp")}
    for place in places.values():
        place.mkdir()
    env = {"HOME": str(places["home"]), "TMPDIR": str(places["tmp"]), "XDG_CACHE_HOME": "",
           "PYTHONDONTWRITEBYTECODE": "1"}
    done = qfleet("train", "cartpole", *SHORT, "run.name=x", "run.tensorboard=true", "env.isolate=true", "--show",
                  cwd=places["cwd"], **env)
    assert done.returncode == 0, done.stderr
    written = files(places["cwd"])
    assert {"runs/x/metrics.jsonl", "runs/x/plots/learning_curve.png"} <= written
    assert all(path == "runs" or path.startswith("runs/x") for path in written), written
    assert files(places["home"]) == set() and files(places["tmp"]) == set()
    assert not (places["cwd"] / "runs/x/lock").exists()


def test_pipes_that_close_early_change_nothing(tmp_path):
    """`qfleet train ... | head -1`, with stderr into the same pipe: the reader has left long before the end."""
    line = " ".join(command("train", "cartpole", *SHORT, "run.name=x")).replace("[", "\\[")
    script = f"{line} 2>&1 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=110,
                          env=ENVIRONMENT)
    head, code = done.stdout.splitlines()
    assert head.split() == ["run", "runs/x"] and code == "0" and done.stderr == ""
    assert list((tmp_path / "runs/x/checkpoints").glob("step-*")), "the training went on to its end"


@pytest.mark.parametrize("no_color", [{}, {"NO_COLOR": "1"}])
def test_a_terminal_gets_colours_unless_they_are_unwanted(tmp_path, no_color):
    """Under a real pseudo-terminal, which `script` provides no more reliably than the standard library."""
    import pty

    env = {key: value for key, value in ENVIRONMENT.items() if key not in ("NO_COLOR", "CI")}
    env |= {"TERM": "xterm-256color"} | no_color
    leader, follower = pty.openpty()
    process = subprocess.Popen(command("train", "cartpole", *SHORT, "run.name=x"), cwd=tmp_path, env=env,
                               stdout=follower, stderr=follower, stdin=follower)
    os.close(follower)
    shown = b""
    try:
        while data := _read(leader):
            shown += data
        assert process.wait(60) == 0, shown.decode()
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    colours = [code for code in (b"\x1b[3", b"\x1b[38;", b"\x1b[9") if code in shown]
    assert bool(colours) == (not no_color), shown[-2000:]
    assert b"\x1b[?25h" in shown, "the cursor is shown again"
    assert shown.rstrip().splitlines()[-1] == b"runs/x"


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 1 << 16)
    except OSError:  # Linux says so when the last writer has closed its end
        return b""
