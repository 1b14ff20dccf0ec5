"""A run stated for one of several ranks: batch, rate, updates and replay, divided once and not again."""

import pytest

from qfleet.config import to_yaml
from qfleet.core.errors import UserError
from qfleet.runconfig import resolution
from qfleet.runconfig.per_rank import per_rank

RUN = ["sync=allreduce", "learner.batch_size=64", "learner.learning_rate=1e-3", "total_updates=1000",
       "replay.capacity=10000", "replay.min_steps=1001"]


def config(*more):
    return resolution.resolve("cartpole", [*RUN, *more]).config


def figures(cfg):
    return (cfg.learner.batch_size, pytest.approx(cfg.learner.learning_rate), cfg.total_updates, cfg.replay.capacity,
            cfg.replay.min_steps)


def test_a_global_batch_is_divided_and_nothing_else_changes_for_the_run():
    assert figures(per_rank(config(), 4)) == (16, 1e-3, 1000, 2500, 251)


@pytest.mark.parametrize("scaling,rate", [("none", 1e-3), ("sqrt", 2e-3), ("linear", 4e-3)])
def test_a_batch_that_grows_scales_rate_and_updates(scaling, rate):
    shared = per_rank(config("allreduce.batch=per_rank", f"allreduce.rate_scaling={scaling}"), 4)
    assert figures(shared) == (64, rate, 250, 2500, 251)
    assert shared.total_steps == config().total_steps and shared.learners == 4


def test_one_rank_has_what_was_asked_for():
    assert figures(per_rank(config(), 1)) == figures(config())


@pytest.mark.parametrize("batch", [[], ["allreduce.batch=per_rank", "allreduce.rate_scaling=linear"]])
def test_sharing_out_is_done_once_and_survives_the_file(batch, tmp_path):
    once = per_rank(config(*batch), 2)
    (tmp_path / "config.yaml").write_text(to_yaml(once))
    read = resolution.resolve(str(tmp_path / "config.yaml"), []).config
    assert read == once and per_rank(read, 2) == once
    assert figures(per_rank(once, 4)) == figures(per_rank(config(*batch), 4)), "another number of ranks, on resume"
    assert figures(per_rank(once, 1))[:3] == figures(config(*batch))[:3]


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(UserError, match=r"learner\.batch_size=64 cannot be divided among 3 ranks"):
        per_rank(config(), 3)


def test_min_steps_never_fall_below_a_batch():
    assert per_rank(config("allreduce.batch=per_rank", "replay.min_steps=100"), 4).replay.min_steps == 64


@pytest.mark.parametrize("overrides,message", [
    (["sync=none", "learners=2"], "learners=2 with sync=none"),
    (["sync=none", "allreduce.timeout_s=5"], "unless sync=allreduce"),
    (["allreduce.rate_scaling=linear"], "the batch does not grow"),
    (["learners=4", "actors=3"], "actors=3 with learners=4: a learner without an actor"),
    (["run.exact_resume=true", "checkpoint.period_steps=100000"], "exact_resume=true with sync=allreduce"),
])
def test_what_has_no_effect_or_contradicts_itself_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        config(*overrides)
