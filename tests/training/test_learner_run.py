"""Single-process runs: stop reasons, order of evaluations and checkpoints, complete snapshots."""

import dataclasses
import io

import pytest
import torch

from qfleet.actor.policy import Policy
from qfleet.core.evaluation import Score
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.resolution import resolve
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_run import LearnerRun

TINY = ["agent.hidden=[8]", "env.lanes=2", "replay.chunk_steps=4", "replay.min_steps=32", "learner.batch_size=8",
        "replay.samples_per_insert=4", "eval.episodes=2", "run.log_period_steps=20", "stop_at=null", "run.threads=1",
        "env.max_episode_steps=12", "checkpoint.period_steps=null", "eval.period_steps=null", "total_steps=120"]


class RunOutputs:
    """Sink and checkpoint hooks that log the outputs of a run in order."""

    def __init__(self):
        self.log, self.records, self.saved = [], [], []

    def write(self, record):
        self.log.append("eval" if "eval/mean_reward" in record else "record")
        self.records.append(record)

    def flush(self):
        self.log.append("flush")

    def close(self): ...

    def save(self, snapshot):
        self.log.append("save")
        self.saved.append(snapshot)

    def save_best(self, score, progress, weights):
        self.log.append("best")
        return True


@pytest.fixture
def make_run():
    """Builds runs and closes their environments afterwards."""
    setups = []

    def build(*overrides):
        config = resolve("cartpole", [*TINY, *overrides]).config
        env = make_env(config.env, config.env.lanes)
        config, outputs = resolve_auto(config, env.spec), RunOutputs()
        hooks = Hooks([outputs], outputs.save, outputs.save_best, lambda sample, update: None)
        setups.append(make_acting_setup(config, env))
        return LearnerRun(setups[-1], make_plan(config), hooks), outputs

    yield build
    for setup in setups:
        setup.close()


def test_a_run_ends_with_an_evaluation_a_checkpoint_and_one_record(make_run):
    run, outputs = make_run()
    assert run.run() == "total_steps"
    assert outputs.log[-5:] == ["record", "best", "eval", "save", "flush"], "no duplicate record"
    assert outputs.saved[-1].progress == run.core.progress() and 120 <= run.core.progress().steps <= 122


def test_total_updates_is_exact(make_run):
    run, outputs = make_run("total_updates=13")
    assert run.run() == "total_updates" and run.core.progress().updates == 13
    assert outputs.records[-1]["updates"] == 13


def test_a_score_of_stop_at_ends_the_run_and_is_the_best(make_run):
    run, outputs = make_run("stop_at=1", "eval.period_steps=40")
    assert run.run() == "stop_at"
    assert run.core.best >= 1 and 40 <= run.core.progress().steps <= 42
    assert outputs.log.count("best") == 1


def test_of_equal_scores_the_newest_policy_is_the_best(make_run):
    run, outputs = make_run()
    for score, best in ((5.0, True), (5.0, True), (4.0, False), (6.0, True)):
        before = outputs.log.count("best")
        run.core.record_evaluation(Score([score], [1], 0), run.core.learner.flat.state())
        assert outputs.log.count("best") - before == best


def test_an_evaluation_comes_before_the_checkpoint_of_its_step(make_run):
    """The checkpoint contains the best score, and a resumed run does not evaluate the same weights resumed."""
    run, outputs = make_run("eval.period_steps=50", "checkpoint.period_steps=50")
    run.run()
    first = next(record for record in outputs.records if "eval/mean_reward" in record)
    assert outputs.log.index("eval") < outputs.log.index("save")
    saved = outputs.saved[0]
    assert saved.progress.steps == first["step"] and saved.state["best"] == first["eval/best_reward"]
    assert saved.state["evaluator"]["count"] == 1


def test_the_last_record_is_written_after_a_failure(make_run):
    run, outputs = make_run("run.log_period_steps=1000")

    def fail():
        raise RuntimeError("learner failed")

    run.core.learner.step = fail
    with pytest.raises(RuntimeError):
        run.run()
    assert [record["step"] for record in outputs.records] == [2] and outputs.log[-1] == "flush"
    assert outputs.saved == []


@pytest.mark.parametrize("overrides", [[], ["replay.alpha=0.6", "agent.n_step=3"]])
def test_a_snapshot_is_complete(make_run, overrides):
    run, outputs = make_run(*overrides)
    run.run()
    snapshot = outputs.saved[-1]
    other, _ = make_run(*overrides, "total_steps=200")
    segments = [(segment.name, io.BytesIO(b"".join(segment.blocks()))) for segment in snapshot.segments]
    other.restore(snapshot.state, segments)
    assert other.core.progress() == run.core.progress() and other.core.best == run.core.best
    assert torch.equal(other.core.learner.flat.master, run.core.learner.flat.master)
    assert torch.equal(other.core.learner.target.master, run.core.learner.target.master)
    assert torch.equal(other.acting.actors[0].policy.rng.get_state(), run.acting.actors[0].policy.rng.get_state())
    assert other.core.replay.metrics()["replay/size"] >= run.core.replay.metrics()["replay/size"] > 90
    assert other.core.replay.rate_limiter.ratio == run.core.replay.rate_limiter.ratio
    other.run()
    assert other.core.progress().steps >= 200 and other.core.meter.episodes > run.core.meter.episodes


def test_actors_take_turns_and_share_one_clock(make_run):
    run, outputs = make_run("env.groups=3", "explore.kind=ladder")
    assert len(run.acting.actors) == 3 and run.run() == "total_steps"
    assert sum(actor.steps for actor in run.acting.actors) == run.core.progress().steps
    epsilons = [float(epsilon) for spec in run.setup.actor_specs for epsilon in spec.explorer.params(10**9).epsilon]
    assert len(epsilons) == 3 * run.setup.actor_specs[0].env.lanes
    assert epsilons == sorted(epsilons, reverse=True), "one ladder over all actors"
    seeds = [seed for actor in run.acting.seeds() for seed in actor]
    assert len(set(seeds)) == len(epsilons), "every lane has its own seed"
    other, _ = make_run("env.groups=3", "explore.kind=ladder", "total_steps=200")
    snapshot = outputs.saved[-1]
    segments = [(segment.name, io.BytesIO(b"".join(segment.blocks()))) for segment in snapshot.segments]
    other.restore(snapshot.state, segments)
    assert [actor.steps for actor in other.acting.actors] == [actor.steps for actor in run.acting.actors]
    other.run()


R2D2 = ["agent.algo=r2d2", "agent.burn_in=2", "agent.unroll=4", "agent.stride=2", "agent.n_step=1",
             "agent.hidden=[8]", "agent.features=[8]", "agent.units=8"]


@pytest.mark.parametrize(("overrides", "device", "staggered"), [
    ([], "cpu", False), ([], "cuda", True), (R2D2, "cuda", False)])
def test_chunks_are_staggered_on_a_gpu_unless_they_end_with_episodes(make_run, overrides, device, staggered):
    core = make_run(*overrides)[0].core
    core.plan = dataclasses.replace(core.plan, device=torch.device(device))
    assert (len(set(core.recorder(4).chunker._fill.tolist())) > 1) == staggered


AGENT57 = ["agent.algo=agent57", "agent.memory=none", "agent.arms=3", "agent.embedding=4", "agent.curious_hidden=[8]",
           "agent.episodic_capacity=50", "agent.n_step=2", "explore.kind=bandit", "explore.arms=3",
           "checkpoint.replay=false"]


def test_a_checkpoint_contains_the_arm_that_the_last_evaluation_selected(make_run):
    """As the best policy does: the latest checkpoint plays the arm that was evaluated."""
    run, outputs = make_run(*AGENT57)
    run.evaluator.bandit.update(2, 1e9)
    run.run()
    assert int(outputs.saved[-1].policy["arm"]) == 2
    assert torch.equal(outputs.saved[-1].policy["kept.distance.mean"],
                       run.evaluator.policy.flat.state()["kept.distance.mean"]), "and the persistent statistics"
    resumed, _ = make_run(*AGENT57)
    resumed.restore(outputs.saved[-1].state, [])
    assert int(resumed.snapshot().policy["arm"]) == 2, "also in a resumed run"


def test_eval_buffers_of_another_shape_are_ignored(make_run):
    run, _ = make_run(*AGENT57)
    run.core._copy_eval_buffers({"arm": torch.zeros(5)})
    run.core._copy_eval_buffers({})
    assert int(run.core.snapshot({}).policy["arm"]) == 0


def test_evaluations_and_loaded_agents_start_with_the_statistics_of_the_last_evaluation(make_run):
    run, outputs = make_run(*AGENT57)
    run.run()
    first = {name: value.clone() for name, value in run.evaluator.policy.flat.state().items() if "kept" in name}
    assert first["kept.surprise.count"] > 10 and first["kept.distance.mean"] > 0
    loaded = Policy(run.setup.agent, 0, torch.device("cpu"))
    assert not any(loaded.persistent().values()), "before any weights are loaded"
    loaded.load(outputs.saved[-1].policy, 1)
    loaded.begin(2)
    for name, value in loaded.persistent().items():
        assert torch.equal(value, first[f"kept.{name}"])
        assert torch.equal(loaded.memory[name], value)
    run.evaluator.evaluated_version = -1
    run.evaluator.evaluate()
    after = run.evaluator.policy.flat.state()["kept.surprise.count"]
    assert after > first["kept.surprise.count"] + 10, "the statistics continue"
