"""Sameness: equal seeds give equal weights, and with exact resume a kill -9 changes nothing."""

import pytest
from runs import TINY, killed_when, qfleet, records, weights_hash

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CARTPOLE = ["cartpole", *TINY, "eval.period_steps=700", "replay.alpha=0.6", "agent.n_step=3", "env.max_episode_steps=50"]
ATARI = ["pong", *TINY, "agent.torso=mlp", "env.frame_size=42", "learner.precision=fp32", "env.max_episode_steps=60",
         "replay.capacity=2000", "eval.episodes=1"]


@pytest.mark.parametrize("recipe", [CARTPOLE, [*ATARI, "total_steps=600", "eval.period_steps=null"]])
def test_two_runs_with_one_seed_have_identical_weights(tmp_path, recipe):
    for name in ("one", "two"):
        done = qfleet("train", *recipe, f"run.name={name}", *([] if recipe is not CARTPOLE else ["total_steps=1500"]),
                      cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    other = qfleet("train", *recipe, "run.name=three", "seed=2",
                   *([] if recipe is not CARTPOLE else ["total_steps=1500"]), cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    runs = tmp_path / "runs"
    assert weights_hash(runs / "one") == weights_hash(runs / "two")
    assert weights_hash(runs / "one") != weights_hash(runs / "three")


@pytest.mark.parametrize("recipe,period,total", [(CARTPOLE, 400, 2000), (ATARI, 400, 1200)], ids=["cartpole", "atari"])
def test_killed_and_resumed_equals_never_interrupted(tmp_path, recipe, period, total):
    exact = [*recipe, "run.exact_resume=true", f"checkpoint.period_steps={period}", f"total_steps={total}",
             "checkpoint.keep=9"]
    whole = qfleet("train", *exact, "run.name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    runs = tmp_path / "runs"
    broken = runs / "broken" / "checkpoints"
    args = ["train", *exact, "run.name=broken"]
    for number in (1, 2):
        code = killed_when(args, tmp_path, lambda n=number: len(list(broken.glob("step-*"))) >= n)
        assert code == -9
        args = ["resume", "broken"]
    done = qfleet("resume", "broken", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights_hash(runs / "broken") == weights_hash(runs / "whole")
    scores = [[(r["step"], r["eval/mean_reward"]) for r in records(run) if "eval/mean_reward" in r]
              for run in (runs / "whole", runs / "broken")]
    assert scores[0] == scores[1] and scores[0]


def test_without_exact_resume_counters_and_replay_go_on(tmp_path):
    first = qfleet("train", *CARTPOLE, "total_steps=1000", "run.name=a", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    before = records(tmp_path / "runs/a")[-1]
    more = qfleet("resume", "a", "total_steps=1400", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    after = records(tmp_path / "runs/a")[-1]
    assert 1400 <= after["step"] < 1410
    assert after["replay/size"] > before["replay/size"] > 900
    assert after["episodes"] > before["episodes"]
    assert after["replay/samples_per_insert"] == pytest.approx(4, rel=0.02)
    steps = [record["step"] for record in records(tmp_path / "runs/a")]
    assert steps == sorted(steps)
