"""All roles in one process: what ends a run, what is saved when, and that a snapshot holds everything."""

import io

import pytest
import torch

from qfleet.assemble import cast_of, make_env, plan_of, settle
from qfleet.recipe import resolve
from qfleet.runtime.inline import Inline, Outside

TINY = ["agent.hidden=[8]", "env.lanes=2", "replay.chunk_steps=4", "replay.min_steps=32", "learner.batch_size=8",
        "replay.samples_per_insert=4", "eval.episodes=2", "run.log_period_steps=20", "stop_at=null", "run.threads=1",
        "env.max_episode_steps=12", "checkpoint.period_steps=null", "eval.period_steps=null", "total_steps=120"]


class World:
    """What a run is embedded in: a tape of what came out of it, in order."""

    def __init__(self):
        self.tape, self.records, self.saved = [], [], []

    def write(self, record):
        self.tape.append("eval" if "eval/mean_reward" in record else "record")
        self.records.append(record)

    def flush(self):
        self.tape.append("flush")

    def close(self): ...

    def save(self, snapshot):
        self.tape.append("save")
        self.saved.append(snapshot)

    def save_best(self, score, progress, weights):
        self.tape.append("best")
        return True


@pytest.fixture
def inline():
    """Builds runs, and closes their environments afterwards."""
    casts = []

    def build(*overrides):
        config = resolve("cartpole", [*TINY, *overrides]).config
        env = make_env(config.env, config.env.lanes)
        config, world = settle(config, env.spec), World()
        outside = Outside([world], world.save, world.save_best, lambda sample, update: None)
        casts.append(cast_of(config, env))
        return Inline(casts[-1], plan_of(config), outside), world

    yield build
    for cast in casts:
        cast.env.close()
        cast.eval_env.close()


def test_a_run_ends_with_an_evaluation_a_checkpoint_and_one_record(inline):
    run, world = inline()
    assert run.run() == "total_steps"
    assert world.tape[-5:] == ["record", "best", "eval", "save", "flush"], "nothing is said twice"
    assert world.saved[-1].progress == run.progress() and 120 <= run.progress().steps <= 122


def test_updates_are_limited_exactly(inline):
    run, world = inline("total_updates=13")
    assert run.run() == "total_updates" and run.progress().updates == 13
    assert world.records[-1]["updates"] == 13


def test_a_good_score_ends_the_run_and_is_the_best(inline):
    run, world = inline("stop_at=1", "eval.period_steps=40")
    assert run.run() == "stop_at"
    assert run.best >= 1 and 40 <= run.progress().steps <= 42
    assert world.tape.count("best") == 1


def test_an_evaluation_comes_before_the_checkpoint_of_its_step(inline):
    """So that the checkpoint knows the best score, and a resumed run does not judge the same weights again."""
    run, world = inline("eval.period_steps=50", "checkpoint.period_steps=50")
    run.run()
    first = next(record for record in world.records if "eval/mean_reward" in record)
    assert world.tape.index("eval") < world.tape.index("save")
    assert world.saved[0].progress.steps == first["step"] and world.saved[0].state["best"] == first["eval/best_reward"]
    assert world.saved[0].state["evaluator"]["count"] == 1


def test_a_failure_still_leaves_the_last_figures(inline):
    run, world = inline("run.log_period_steps=1000")

    def fail():
        raise RuntimeError("of the learner's")

    run.learner.step = fail
    with pytest.raises(RuntimeError):
        run.run()
    assert [record["step"] for record in world.records] == [2] and world.tape[-1] == "flush"
    assert world.saved == []


@pytest.mark.parametrize("overrides", [[], ["replay.alpha=0.6", "agent.n_step=3"]])
def test_a_snapshot_holds_everything(inline, overrides):
    run, world = inline(*overrides)
    run.run()
    taken = world.saved[-1]
    other, _ = inline(*overrides, "total_steps=200")
    pieces = [(segment.name, io.BytesIO(b"".join(segment.blocks()))) for segment in taken.segments]
    other.restore(taken.state, pieces)
    assert other.progress() == run.progress() and other.best == run.best
    assert torch.equal(other.learner.flat.master, run.learner.flat.master)
    assert torch.equal(other.learner.target.master, run.learner.target.master)
    assert torch.equal(other.actor.policy.rng.get_state(), run.actor.policy.rng.get_state())
    assert other.replay.metrics()["replay/size"] >= run.replay.metrics()["replay/size"] > 90
    assert other.replay.pace.ratio == run.replay.pace.ratio
    other.run()
    assert other.progress().steps >= 200 and other.meter.episodes > run.meter.episodes
