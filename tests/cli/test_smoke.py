"""`train --smoke`: all stages of a run in seconds, one line each, and nothing that stays."""

from __future__ import annotations

import json
import sys
import tempfile

import pytest

from qfleet.cli.commands import main
from qfleet.cli.smoke import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with tempfile.TemporaryDirectory() as short:  # sockets need short paths
        monkeypatch.setattr(tempfile, "tempdir", short)
        (tmp_path / "temporary").symlink_to(short)
        yield tmp_path
    sys.modules.pop("smoke_env", None)


@pytest.mark.parametrize("words", [["hidden-cartpole"], ["pendulum-d4pg"], ["catch", "actors=1", "run.threads=1"]],
                         ids=" ".join)
def test_all_stages_pass_and_nothing_is_left(words, place, capsys):
    assert main(["train", *words, "--smoke"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == list(STAGES) and all("  ok  " in line for line in lines[:-1])
    assert lines[-1].startswith("smoke test passed in ")
    assert list((place / "temporary").iterdir()) == [] and not (place / "runs").exists()


def test_the_name_of_the_planned_run_is_not_taken(place, capsys):
    assert main(["train", "catch", "--smoke", "--json", "run.name=x", "total_steps=1e9"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] and [stage["stage"] for stage in document["stages"]] == list(STAGES)
    assert not (place / "runs").exists()


BROKEN = """
import gymnasium
import numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        Env.steps += 1
        if Env.steps > 60:
            raise ValueError("no more steps")
        return np.zeros(2, np.float32), 0.0, False, False, {}
"""


def test_a_stage_that_fails_is_named_and_its_run_stays(place, capsys):
    (place / "smoke_env.py").write_text(BROKEN)
    assert main(["train", "smoke_env:Env", "--smoke"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("updates ") and "  failed  " in out and "no more steps" in err
    [kept] = (place / "temporary").iterdir()
    assert f"the run is in {kept.resolve()}" in err


def test_a_wrong_key_fails_before_the_first_stage(place, capsys):
    assert main(["train", "catch", "--smoke", "agent.n_stp=3"]) == 2
    assert capsys.readouterr().out == "" and list((place / "temporary").iterdir()) == []


@pytest.mark.parametrize("option", ["--seeds=2", "--show", "--record"])
def test_options_of_long_runs_are_refused(option, capsys):
    assert main(["train", "catch", "--smoke", option]) == 2
    assert "leave out --seeds, --show and --record" in capsys.readouterr().err


def test_a_dry_run_shows_what_would_be_run(capsys):
    assert main(["train", "catch", "--smoke", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["total_steps"] < 1000
