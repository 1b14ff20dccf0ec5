"""An update made whole on a device is the learner's own."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from fakes import ListMetrics
from image_learners import AGENTS, CURIOUS, RECURRENT, SPEC, learner_of

from qfleet.accel.graph_update import GraphUpdate
from qfleet.algos import dqn
from qfleet.core.env import EnvSpec, Leaf
from qfleet.learner.learner import Diverged


def in_one(learner):
    """What a GPU would do, operation by operation."""
    learner._graph_update = GraphUpdate(
        learner.replay, learner._autograds[0], learner.flat, learner.gradient_sync.optimizer, learner.cfg.batch_size
    )
    return learner


@pytest.mark.parametrize(("module", "switches"), [*AGENTS, RECURRENT, *CURIOUS])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_whole_updates_are_the_learners_own(module, switches, optimizer, alpha):
    one = learner_of(module, switches, alpha=alpha, optimizer=optimizer, optimizer_eps=1e-2, clip_norm=0.5)
    other = in_one(learner_of(module, switches, alpha=alpha, optimizer=optimizer, optimizer_eps=1e-2, clip_norm=0.5))
    for learner in (one, other):
        learner.max_updates_per_step = 7
        learner.step()
    assert one.updates == other.updates == 7
    torch.testing.assert_close(one.flat.master, other.flat.master, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(one.target.master, other.target.master, rtol=1e-5, atol=1e-7)
    first, second = one.replay.state_dict(), other.replay.state_dict()
    np.testing.assert_allclose(first["leaves"], second["leaves"], rtol=1e-4)
    assert first["priorities"]["largest"] == pytest.approx(second["priorities"]["largest"], rel=1e-4)
    assert first["pace"] == second["pace"] and torch.equal(first["rng"], second["rng"])
    other.replay.check_valid()


@pytest.mark.parametrize(("module", "switches"), [AGENTS[0], RECURRENT])
def test_whole_updates_use_the_newest_statistics(module, switches):
    spec = EnvSpec("mixed", {"speed": Leaf((3,), "float32", "vector"), **SPEC.observation}, 3)
    learners = [learner_of(module, switches, spec=spec, normalise={"observations": True, "rewards": True})
                for _ in range(2)]
    rng = np.random.default_rng(0)
    columns = {"obs.speed": rng.normal(2, 4, (50, 3)), "reward": rng.normal(size=50),
               "discounted_return": rng.normal(size=50)}
    for learner in (learners[0], in_one(learners[1])):
        learner.row_moments.add(columns)
        learner.max_updates_per_step = 7
        learner.step()
        assert float(learner.flat.buffer("row_count")) == 50
    torch.testing.assert_close(learners[0].flat.master, learners[1].flat.master, rtol=1e-5, atol=1e-6)
    plain = learner_of(module, switches, spec=spec)
    plain.max_updates_per_step = 7
    plain.step()
    assert not torch.allclose(plain.flat.master, learners[0].flat.master, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
def test_schedules_and_weight_decay_are_the_learners_own(optimizer):
    options = {"optimizer": optimizer, "optimizer_eps": 1e-2, "clip_norm": 0.5, "learning_rate": 0.01,
               "schedule": "cosine", "warmup_updates": 2, "schedule_updates": 6, "metrics_period_updates": 1}
    options |= {"weight_decay": 0.5} if optimizer == "adamw" else {}
    metrics, plain = (ListMetrics(), ListMetrics()), learner_of(*AGENTS[0])
    one, other = learner_of(*AGENTS[0], metrics=metrics[0], **options), in_one(
        learner_of(*AGENTS[0], metrics=metrics[1], **options))
    for learner in (one, other):
        learner.max_updates_per_step = 7
        learner.step()
    torch.testing.assert_close(one.flat.master, other.flat.master, rtol=1e-5, atol=1e-7)
    assert not torch.equal(one.flat.master, plain.flat.master)
    rates = [[values["train/learning_rate"] for values in each.values if "train/learning_rate" in values]
             for each in metrics]
    assert rates[0][:3] == [0.005, 0.01, 0.01] and rates[0][-1] == 0.0
    assert rates[1] == rates[0][1:], "reported one update late"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("works", [True, False])
def test_compiled_updates_are_the_learners_own_also_where_that_fails(caplog, works):
    from torch._inductor import config as inductor  # takes a second

    torch.compiler.reset()
    plain, other = (learner_of(dqn, {"dueling": True}, compile=it, optimizer_eps=1e-2) for it in (False, True))
    compiler = {} if works else {"cpp.cxx": ("no-such-compiler",)}
    with inductor.patch({"force_disable_caches": True} | compiler):
        for learner in (plain, other):
            learner.max_updates_per_step = 4
            learner.step()
    told = [record.message for record in caplog.records if "learner.compile" in record.message]
    assert len(told) == (0 if works else 1), told
    assert all("compiling failed" in message and "no-such-compiler" in message for message in told)
    assert all((net._compiled_call_impl is not None) == works for net in (other.flat.net, other.target.net))
    torch.testing.assert_close(plain.flat.master, other.flat.master, rtol=1e-4, atol=1e-6)


def test_figures_are_those_of_the_period_before():
    metrics = ListMetrics()
    learner = in_one(learner_of(*AGENTS[0], metrics=metrics))
    learner.max_updates_per_step = 6
    learner.step()
    tags = {"train/loss", "train/grad_norm", "train/q_mean", "train/priority", "train/learning_rate"}
    told = [values for values in metrics.values if "train/loss" in values]
    assert len(told) == 2 and all(tags <= set(values) for values in told)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
def test_a_bad_batch_moves_nothing_and_many_end_the_run(optimizer):
    metrics = ListMetrics()
    learner = in_one(learner_of(*AGENTS[0], metrics=metrics, reward=np.nan, optimizer=optimizer, max_bad_updates=4))
    before, leaves = learner.flat.master.clone(), learner.replay.state_dict()["leaves"]
    learner.max_updates_per_step = 3
    learner.step()
    assert torch.equal(learner.flat.master, before)
    assert not learner.gradient_sync.optimizer.mean.any() and float(learner.gradient_sync.optimizer.steps) == 0
    np.testing.assert_array_equal(learner.replay.state_dict()["leaves"], leaves)
    learner.max_updates_per_step = 20
    with pytest.raises(Diverged, match="not finite in"):
        learner.step()
    assert torch.equal(learner.flat.master, before) and metrics.counts["fault/bad_updates"] > 0


def test_where_nobody_waits_for_updates_the_last_finite_weights_are_published():
    learner = in_one(learner_of(*AGENTS[0], optimizer="rmsprop", learning_rate=1e38))
    before = learner.flat.master.clone()
    learner.max_updates_per_step = 1
    learner.step()
    assert not torch.isfinite(learner.flat.master).all()
    version, state = learner.weights.fetch(-1)
    assert version == 1 and torch.equal(torch.cat([state[name].flatten() for name in learner.flat.shapes]), before)
    with pytest.raises(Diverged, match="weights are not finite"):
        learner.state_dict()


def some_bad(learner, every):
    """Let the loss of every so many updates be NaN."""
    derive, calls = learner._graph_update.autograd, itertools.count(1)

    def spoilt(sample):
        bad = torch.tensor(float("nan") if next(calls) % every == 0 else 1.0)
        return derive(dataclasses.replace(sample, weight=sample.weight * bad))

    learner._graph_update.autograd = spoilt


def test_updates_count_what_moved_and_never_go_back():
    """Whenever it is asked, the count is that of the optimizer and of those that are still owed."""
    metrics = ListMetrics()
    learner = in_one(learner_of(*AGENTS[0], metrics=metrics, metrics_period_updates=4))
    some_bad(learner, 5)
    learner.max_updates_per_step, counts, made = 3, [], 0
    for turn in range(30):
        learner.step()
        made += 3
        counts.append(learner.updates)
        moved = int(learner.gradient_sync.optimizer.steps)
        assert moved == made - made // 5
        if turn % 7 == 6:
            state = learner.state_dict()
            assert state["updates"] - state["owed"] == moved
            assert metrics.counts["fault/bad_updates"] == made // 5
    assert counts == sorted(counts)


def test_what_is_owed_is_remembered():
    learner = in_one(learner_of(*AGENTS[0], reward=np.nan))
    learner.max_updates_per_step = 3
    learner.step()
    state = learner.state_dict()
    assert (state["updates"], state["owed"]) == (3, 3)
    again = in_one(learner_of(*AGENTS[0]))
    again.load_state_dict(state)
    again.max_updates_per_step = 4
    again.step()
    assert again.updates == 4 and int(again.gradient_sync.optimizer.steps) == 4
    assert again.state_dict()["owed"] == 0
