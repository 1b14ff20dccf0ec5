"""With the core dependencies alone qfleet imports, trains and evaluates; what needs an extra names it, with exit 2."""

import json
import subprocess
import sys

import pytest
from real_runs import ENVIRONMENT, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKED = ["ale_py", "cv2", "matplotlib", "imageio_ffmpeg", "imageio", "PIL", "pygame", "wandb", "ray", "mujoco",
           "huggingface_hub", "mlflow", "optuna", "onnxruntime"]

SCRIPT = """
import contextlib, io, json, sys

sys.modules.update(dict.fromkeys(BLOCKED))  # None there: importing it raises, looking for it finds nothing

import qfleet
assert "torch" not in sys.modules, "importing qfleet alone is quick"
from qfleet.cli.commands import main

answers = []
for argv in COMMANDS:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    answers.append([code, out.getvalue(), err.getvalue()])
json.dump(answers, sys.stdout)
"""


def test_core_dependencies_are_enough_and_extras_are_named(tmp_path):
    tiny = [*TINY, "total_steps=150", "eval.episodes=1"]
    commands = [
        (["train", "cartpole", *tiny, "run.name=x", "run.tensorboard=true"], None),
        (["eval", "x", "--episodes", "1", "--json"], None),
        (["resume", "x", "total_steps=200"], None),
        (["doctor"], None),
        (["recipes"], None),
        (["config", "explain", "pong"], None),
        (["record", "x"], "qfleet[video]"),
        (["record", "x", "--gif"], "qfleet[video]"),
        (["play", "x"], "qfleet[video]"),
        (["plot", "x"], "qfleet[plot]"),
        (["train", "ALE/Pong-v5", "run.name=y"], "qfleet[atari]"),
        (["train", "pong", "run.name=y"], "qfleet[atari]"),
        (["check-env", "ALE/Pong-v5"], "qfleet[atari]"),
        (["train", "Hopper-v5", "run.name=y"], "qfleet[mujoco]"),
        (["train", "cartpole", *tiny, "run.name=y", "run.wandb=true"], "qfleet[wandb]"),
        (["train", "cartpole", *tiny, "run.name=y", "run.mlflow=true"], "qfleet[mlflow]"),
        (["tune", "cartpole", "agent.n_step=1..3", "--study", "runs/y"], "qfleet[tune]"),
        (["train", "cartpole", *tiny, "run.name=y", "--show"], "qfleet[video,plot]"),
    ]
    script = SCRIPT.replace("BLOCKED", repr(BLOCKED)).replace("COMMANDS", repr([argv for argv, _ in commands]))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=110,
                          env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    for (argv, extra), (code, out, err) in zip(commands, json.loads(done.stdout), strict=True):
        assert "Traceback" not in err, (argv, err)
        if extra is None:
            assert code == 0, (argv, err)
        else:
            found = 1 if argv[0] == "check-env" else 2  # what check-env finds out is its result, not a misuse
            assert code == found and f"pip install '{extra}'" in err + out, (argv, code, err, out)
    assert not (tmp_path / "runs/y").exists(), "what cannot run leaves nothing behind"
