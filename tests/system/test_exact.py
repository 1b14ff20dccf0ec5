"""Sameness: equal seeds give equal weights, and with exact resume a kill -9 changes nothing.

One side of each comparison runs in this process and the other in processes of its own.
"""

import pytest
from real_runs import TINY, killed_when, qfleet, records, train, weights_hash

from qfleet import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CARTPOLE = ["cartpole", "eval.period_steps=700", "replay.alpha=0.6", "agent.n_step=3", "env.max_episode_steps=50"]
RAINBOW = ["cartpole", "agent.algo=c51", "agent.noisy=true", "agent.dueling=true", "agent.n_step=3",
           "explore.kind=constant", "explore.epsilon=0", "replay.alpha=0.5", "eval.period_steps=700",
           "env.max_episode_steps=50"]
IQN = ["cartpole", "agent.algo=iqn", "agent.noisy=true", "agent.noisy_epsilon=true", "agent.munchausen=true",
       "replay.alpha=0.5", "eval.period_steps=700", "env.max_episode_steps=50"]
"""Noise and levels are drawn from generators that checkpoints save."""
ATARI = ["pong", "agent.torso=mlp", "env.frame_size=42", "learner.precision=fp32", "env.max_episode_steps=60",
         "replay.capacity=2000", "eval.episodes=1"]

MEMORY = ["hidden-cartpole", "agent.units=8", "agent.features=[8]", "agent.burn_in=4", "agent.unroll=8",
          "agent.stride=4", "replay.alpha=0.9", "replay.samples_per_insert=1", "eval.period_steps=700",
          "env.max_episode_steps=50"]

CURIOUS = [*MEMORY, "agent.algo=agent57", "agent.arms=4", "agent.n_step=2", "agent.embedding=4",
           "agent.curious_hidden=[8]", "agent.episodic_capacity=64", "explore.kind=bandit", "explore.arms=4"]

DDPG = ["pendulum", "agent.twin=true", "agent.smoothing=0.2", "agent.policy_delay=2", "normalise.observations=true",
        "explore.kind=ou", "explore.sigma=0.2", "explore.warmup_steps=100",
        "eval.period_steps=700", "env.max_episode_steps=50"]
D4PG = ["pendulum-d4pg", "explore.kind=pink", "explore.warmup_steps=100", "eval.period_steps=700",
        "env.max_episode_steps=50"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("recipe", [[*CARTPOLE, "total_steps=1500"],
                                    [*ATARI, "total_steps=600", "eval.period_steps=null"]], ids=["cartpole", "atari"])
def test_two_runs_with_one_seed_have_identical_weights(tmp_path, recipe):
    done = qfleet("train", *recipe[:1], *TINY, *recipe[1:], "run.name=one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    train(*recipe, "run.name=two")
    train(*recipe, "run.name=three", "seed=2")
    one, two, three = (weights_hash(tmp_path / "runs" / name) for name in ("one", "two", "three"))
    assert one == two and one != three


@pytest.mark.parametrize("recipe,period,total", [
    (CARTPOLE, 400, 2000), (RAINBOW, 400, 1200), (IQN, 400, 1200), (ATARI, 400, 1200), (MEMORY, 400, 1200),
    (CURIOUS, 400, 1200), (DDPG, 400, 1200), (D4PG, 400, 1200)],
    ids=["cartpole", "rainbow", "iqn", "atari", "memory", "curious", "ddpg", "d4pg"])
def test_killed_and_resumed_equals_never_interrupted(tmp_path, recipe, period, total):
    exact = [*recipe, "run.exact_resume=true", f"checkpoint.period_steps={period}", f"total_steps={total}",
             "checkpoint.keep=9"]
    assert train(*exact, "run.name=whole").exit_code == 0
    runs = tmp_path / "runs"
    broken = runs / "broken" / "checkpoints"
    args = ["train", *exact[:1], *TINY, *exact[1:], "run.name=broken"]
    for number in (1, 2):
        code = killed_when(args, tmp_path, lambda n=number: len(list(broken.glob("step-*"))) >= n)
        assert code == -9
        args = ["resume", "broken"]
    assert api.resume("broken").exit_code == 0
    assert weights_hash(runs / "broken") == weights_hash(runs / "whole")
    scores = [[(r["step"], r["eval/mean_reward"]) for r in records(run) if "eval/mean_reward" in r]
              for run in (runs / "whole", runs / "broken")]
    assert scores[0] == scores[1] and scores[0]


def test_without_exact_resume_counters_and_replay_go_on(tmp_path):
    train(*CARTPOLE, "total_steps=1000", "run.name=a")
    before = records(tmp_path / "runs/a")[-1]
    api.resume("a", ["total_steps=1400"])
    after = records(tmp_path / "runs/a")[-1]
    assert 1400 <= after["step"] < 1410
    assert after["replay/size"] > before["replay/size"] > 900
    assert after["episodes"] > before["episodes"]
    assert after["replay/samples_per_insert"] == pytest.approx(4, rel=0.02)
    steps = [record["step"] for record in records(tmp_path / "runs/a")]
    assert steps == sorted(steps)
