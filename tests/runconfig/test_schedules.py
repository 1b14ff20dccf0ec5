"""The updates of a learning-rate schedule: derived for every topology when a run starts, and kept on resume."""

import pytest

from qfleet import api
from qfleet.core.errors import UserError
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_env
from qfleet.runconfig.resolution import resolve
from qfleet.runconfig.resumable import changed_on_resume

RUN = ["total_steps=11000", "replay.min_steps=1000", "replay.samples_per_insert=8", "learner.batch_size=40",
       "replay.capacity=5000", "device=cpu"]


def settled(*words):
    config = resolve("toy/Catch-v0", [*RUN, *words]).config
    env = make_env(config.env, 1)
    env.close()
    return resolve_auto(config, env.spec)


def horizon(*words):
    return settled("learner.schedule=linear", *words).learner.schedule_updates


@pytest.mark.parametrize(("words", "expected"), [
    ([], 2000),
    (["total_updates=500"], 500),
    (["total_updates=5000"], 2000),
    (["learner.schedule_updates=70"], 70),
    (["sync=allreduce"], 2000),
    (["sync=allreduce", "learners=2"], 2000),  # each rank: half the steps, half the warm-up, half the batch
    (["sync=allreduce", "learners=2", "allreduce.batch=per_rank"], 1000),
    (["sync=server"], 2000),
    (["sync=server", "learners=2"], 1800),  # each learner has a warm-up of its own
    (["sync=server", "parameter_server.push_period_updates=4"], 500),
    (["actors=2"], 2000),
])
def test_a_schedule_ends_with_the_updates_of_the_run(words, expected):
    assert horizon(*words) == expected


def test_the_plan_states_a_schedule_and_no_constant_rate():
    def planned(*words):
        config = resolve("toy/Catch-v0", [*RUN, "learner.learning_rate=0.002", *words]).config
        return dict(api.plan(config)).get("learning rate")

    assert planned() is None
    assert planned("learner.warmup_updates=1500") == "0.002, reached after a warm-up of 1,500 updates"
    assert planned("learner.schedule=cosine", "learner.warmup_updates=50", "learner.final_rate_fraction=0.1") == (
        "0.002, reached after a warm-up of 50 updates, cosine to 0.0002 at update 2,000")


def test_a_constant_rate_needs_no_number_of_updates():
    learner = settled("learner.warmup_updates=100000").learner
    assert learner.schedule_updates is None and learner.schedule == "constant"


def test_a_resumed_run_keeps_its_schedule_or_gets_a_stated_one():
    first = settled("learner.schedule=cosine")
    longer = first.model_copy(update={"total_steps": 101_000})
    env = make_env(first.env, 1)
    env.close()
    assert resolve_auto(longer, env.spec).learner.schedule_updates == 2000
    stated = first.model_copy(update={"learner": first.learner.model_copy(update={"schedule_updates": 9000})})
    assert [change.key for change in changed_on_resume(first, stated)] == ["learner.schedule_updates"]
    exact = first.model_copy(update={"run": first.run.model_copy(update={"exact_resume": True})})
    with pytest.raises(UserError, match="schedule_updates: is 9000, but the run was started with 2000"):
        changed_on_resume(exact, exact.model_copy(update={"learner": stated.learner}))
    other = first.model_copy(update={"learner": first.learner.model_copy(update={"schedule": "linear"})})
    with pytest.raises(UserError, match=r"learner.schedule: is linear"):
        changed_on_resume(first, other)


@pytest.mark.parametrize(("words", "message"), [
    (["learner.schedule=linear", "learner.warmup_updates=2000"], "leaves nothing of the 2000 updates"),
    (["learner.optimizer=torch.optim:Adafactor", "sync=server"], "cannot be divided among shards"),
    (["learner.optimizer=torch.optim:Adafactor", "sync=allreduce", "allreduce.shard_optimizer=true"], "cannot be"),
    (["learner.weight_decay=0.1"], "has no effect unless learner.optimizer=adamw"),
    (["learner.optimizer=torch.optim:NAdam", "learner.weight_decay=0.1"],
     "for torch.optim:NAdam write learner.optimizer_options={weight_decay: 0.1}"),
    (["learner.optimizer=torch.optim:SGD", "learner.optimizer_eps=1e-3"], "set learner.optimizer_options"),
    (["learner.optimizer_options={momentum: 0.9}"], "no effect unless learner.optimizer=module:attribute"),
    (["learner.schedule_updates=100"], "no effect with learner.schedule=constant"),
    (["learner.final_rate_fraction=0.1"], "no effect unless learner.schedule is linear or cosine"),
    (["learner.optimizer=nadam"], "did you mean torch.optim:NAdam"),
    (["learner.optimizer=torch.optim.NAdam"], "did you mean torch.optim:NAdam"),
    (["learner.schedule=cosin"], "is not one of constant, linear, cosine, or module:attribute; did you mean cosine"),
    (["learner.lr_schedule=cosine"], "did you mean learner.schedule"),
])
def test_what_does_not_fit_is_refused_in_words(words, message):
    with pytest.raises(UserError, match=message):
        settled(*words)
