"""All roles in one process: what ends a run, what is saved when, and that a snapshot holds everything."""

import dataclasses
import io

import pytest
import torch

from qfleet.actor.policy import Policy
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.resolution import resolve
from qfleet.training.learner_core import Hooks
from qfleet.training.single_process import SingleProcessRun

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
        config, world = resolve_auto(config, env.spec), World()
        outside = Hooks([world], world.save, world.save_best, lambda sample, update: None)
        casts.append(make_acting_setup(config, env))
        return SingleProcessRun(casts[-1], make_plan(config), outside), world

    yield build
    for cast in casts:
        cast.close()


def test_a_run_ends_with_an_evaluation_a_checkpoint_and_one_record(inline):
    run, world = inline()
    assert run.run() == "total_steps"
    assert world.tape[-5:] == ["record", "best", "eval", "save", "flush"], "nothing is said twice"
    assert world.saved[-1].progress == run.core.progress() and 120 <= run.core.progress().steps <= 122


def test_updates_are_limited_exactly(inline):
    run, world = inline("total_updates=13")
    assert run.run() == "total_updates" and run.core.progress().updates == 13
    assert world.records[-1]["updates"] == 13


def test_a_good_score_ends_the_run_and_is_the_best(inline):
    run, world = inline("stop_at=1", "eval.period_steps=40")
    assert run.run() == "stop_at"
    assert run.core.best >= 1 and 40 <= run.core.progress().steps <= 42
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

    run.core.learner.step = fail
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
    assert other.core.progress() == run.core.progress() and other.core.best == run.core.best
    assert torch.equal(other.core.learner.flat.master, run.core.learner.flat.master)
    assert torch.equal(other.core.learner.target.master, run.core.learner.target.master)
    assert torch.equal(other.actors[0].policy.rng.get_state(), run.actors[0].policy.rng.get_state())
    assert other.core.replay.metrics()["replay/size"] >= run.core.replay.metrics()["replay/size"] > 90
    assert other.core.replay.rate_limiter.ratio == run.core.replay.rate_limiter.ratio
    other.run()
    assert other.core.progress().steps >= 200 and other.core.meter.episodes > run.core.meter.episodes


def test_actors_take_turns_and_share_one_clock(inline):
    run, world = inline("actors=3", "explore.kind=ladder")
    assert len(run.actors) == 3 and run.run() == "total_steps"
    assert sum(actor.steps for actor in run.actors) == run.core.progress().steps
    rungs = [float(epsilon) for seat in run.setup.actor_specs for epsilon in seat.explorer.params(10**9).epsilon]
    assert len(rungs) == 3 * run.setup.actor_specs[0].env.lanes
    assert rungs == sorted(rungs, reverse=True), "one ladder for all"
    seeds = [seed for actor in run._seeds() for seed in actor]
    assert len(set(seeds)) == len(rungs), "no lane is another's twin"
    other, _ = inline("actors=3", "explore.kind=ladder", "total_steps=200")
    taken = world.saved[-1]
    other.restore(taken.state, [(segment.name, io.BytesIO(b"".join(segment.blocks()))) for segment in taken.segments])
    assert [actor.steps for actor in other.actors] == [actor.steps for actor in run.actors]
    other.run()


SEQUENCES = ["agent.algo=r2d2", "agent.burn_in=2", "agent.unroll=4", "agent.stride=2", "agent.n_step=1",
             "agent.hidden=[8]", "agent.features=[8]", "agent.units=8"]


@pytest.mark.parametrize(("overrides", "device", "spread"), [
    ([], "cpu", False), ([], "cuda", True), (SEQUENCES, "cuda", False)])
def test_where_a_gpu_learns_chunks_come_one_by_one_unless_they_end_with_episodes(inline, overrides, device, spread):
    cell = inline(*overrides)[0].core
    cell.plan = dataclasses.replace(cell.plan, device=torch.device(device))
    assert (len(set(cell.recorder(4).chunker._fill.tolist())) > 1) == spread


CURIOUS = ["agent.algo=agent57", "agent.memory=none", "agent.arms=3", "agent.embedding=4", "agent.curious_hidden=[8]",
           "agent.episodic_capacity=50", "agent.n_step=2", "explore.kind=bandit", "explore.arms=3",
           "checkpoint.replay=false"]


def test_checkpoints_have_the_arm_that_the_newest_evaluation_chose(inline):
    """As the best policy does: the latest checkpoint plays the arm that was evaluated."""
    run, world = inline(*CURIOUS)
    run.evaluator.bandit.update(2, 1e9)
    run.run()
    assert int(world.saved[-1].policy["arm"]) == 2
    assert torch.equal(world.saved[-1].policy["kept.distance.mean"],
                       run.evaluator.policy.flat.state()["kept.distance.mean"]), "and what its memory keeps"
    again, _ = inline(*CURIOUS)
    again.restore(world.saved[-1].state, [])
    assert int(again.snapshot().policy["arm"]) == 2, "a run that goes on has it, too"


def test_weights_of_another_shape_are_noted_nowhere(inline):
    run, _ = inline(*CURIOUS)
    run.core._note({"arm": torch.zeros(5)})
    run.core._note({})
    assert int(run.core.snapshot({}).policy["arm"]) == 0


def test_evaluations_and_loaded_agents_begin_with_the_running_figures_of_the_evaluation_before(inline):
    run, world = inline(*CURIOUS)
    run.run()
    first = {name: value.clone() for name, value in run.evaluator.policy.flat.state().items() if "kept" in name}
    assert first["kept.surprise.count"] > 10 and first["kept.distance.mean"] > 0
    loaded = Policy(run.setup.agent, 0, torch.device("cpu"))
    assert not any(loaded.persistent().values()), "before it knows any weights"
    loaded.load(world.saved[-1].policy, 1)
    loaded.begin(2)
    for name, value in loaded.persistent().items():
        assert torch.equal(value, first[f"kept.{name}"])
        assert torch.equal(loaded.memory[name], value)
    run.evaluator.evaluated_version = -1
    run.evaluator.evaluate()
    after = run.evaluator.policy.flat.state()["kept.surprise.count"]
    assert after > first["kept.surprise.count"] + 10, "it went on counting"
