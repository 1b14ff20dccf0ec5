"""Numbers that overflow in training: a loss is skipped, kept for people, then the end; weights are the end at once."""

import hashlib
import itertools
import math
from pathlib import Path

import gymnasium
import pytest
import safetensors.torch
import torch
from real_runs import TINY, newest, records, train

from qfleet.cli.commands import main
from qfleet.optim.optimizer import Optimizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def unchecked(monkeypatch):
    """As if an environment that is not Gymnasium's had let a reward pass that float32 cannot hold."""
    monkeypatch.setattr("qfleet.envs.lanes.MAX_REWARD", math.inf)


class Explodes(gymnasium.Wrapper):
    """From step `first` of its life on, for `count` steps, a finite reward that float32 cannot hold."""

    first, count, lived = 0, 0, 0

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        self.lived += 1
        return obs, 1e200 if self.first <= self.lived < self.first + self.count else reward, *rest


ARGS = ["env.wrappers=[test_numerics:Explodes]", "run.name=x", "eval.period_steps=null", "checkpoint.period_steps=200"]


def fingerprint(checkpoint):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:overflow")
def test_bad_batches_are_skipped_kept_and_in_the_end_the_end(monkeypatch, capsys):
    monkeypatch.setattr(Explodes, "first", 220)
    monkeypatch.setattr(Explodes, "count", 10**6)
    saved = {}

    from qfleet.launch.attempt import Attempt
    real = Attempt._save

    def save(attempt, snapshot):
        real(attempt, snapshot)
        path = newest(attempt.directory.path).path
        saved[path] = fingerprint(path)

    monkeypatch.setattr(Attempt, "_save", save)
    code = main(["train", "toy/Faulty-v0", *TINY, *ARGS, "total_steps=5000", "learner.max_bad_updates=4"])
    err = capsys.readouterr().err
    assert code == 1 and "Traceback" not in err, err
    assert "not finite in 4 updates in a row" in err and "learner.learning_rate" in err
    assert "qfleet resume runs/x" in err
    run = Path("runs/x")
    last = newest(run)
    assert fingerprint(last.path) == saved[last.path], "the last good checkpoint is as it was"
    assert all(value.isfinite().all() for value in last.policy().values())
    assert last.manifest.step < records(run)[-1]["step"] < 5000
    assert records(run)[-1]["fault/bad_updates"] >= 4
    kept = sorted(run.glob("faults/*.safetensors"))
    assert 1 <= len(kept) <= 3
    batch = safetensors.torch.load_file(kept[0])
    assert batch["reward"].isinf().any() and batch["obs.obs"].isfinite().all() and len(batch["keys"]) == 8
    assert main(["eval", "x", "--episodes", "1", "--which", "latest"]) == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_single_bad_step_costs_a_few_updates_only(monkeypatch):
    """One poisoned transition among many: updates that draw it are skipped, no weight and no priority is touched."""
    monkeypatch.setattr(Explodes, "first", 100)
    monkeypatch.setattr(Explodes, "count", 1)
    result = train("toy/Faulty-v0", *ARGS, "total_steps=1500", "replay.alpha=0.6")
    last = records(result.directory)[-1]
    assert result.exit_code == 0 and 0 < last["fault/bad_updates"] < result.updates / 4
    assert last["replay/clamped_priorities"] == 0, "NaN never reached the priorities"
    state = newest(result.directory).state()
    assert torch.isfinite(torch.as_tensor(state["replay"]["leaves"])).all()
    assert all(value.isfinite().all() for value in state["learner"]["net"].values())
    assert all(value.isfinite().all() for value in state["weights"]["state"].values())


@pytest.mark.parametrize("process", ["false", "true"])
def test_weights_that_overflow_end_the_run_and_what_was_saved_before_stays(process, monkeypatch, capsys):
    """As with a learning rate of 1e38: loss and gradient are finite, the step is not."""
    real, steps = Optimizer._rmsprop, itertools.count()

    def overflowing(self, weights, *vectors):
        real(self, weights, *vectors)
        if next(steps) == 300:
            weights.fill_(math.inf)

    monkeypatch.setattr(Optimizer, "_rmsprop", overflowing)
    code = main(["train", "toy/Faulty-v0", *TINY, "run.name=x", "checkpoint.period_steps=100", "eval.period_steps=50",
                 "learner.optimizer=rmsprop", "total_steps=3000", f"eval.process={process}"])
    err = capsys.readouterr().err
    assert code == 1 and "Traceback" not in err, err
    assert "training failed: weights are not finite after 301 updates" in err and "lower learner.learning_rate" in err
    run, kept = Path("runs/x"), list(Path("runs/x/checkpoints").glob("*-*"))
    assert newest(run).manifest.updates <= 300
    assert process == "true" or any(path.name.startswith("best-") for path in kept)
    for path in kept:
        policy = safetensors.torch.load_file(path / "policy.safetensors")
        assert all(value.isfinite().all() for value in policy.values())
    assert records(run)[-1]["updates"] <= 301
