"""What limits a run: records as each of the limits makes them."""

import re

import pytest

from qfleet.report.bottleneck import (
    ADVICE,
    INLINE_ADVICE,
    SERVER_ADVICE,
    SILENT,
    WARMING_UP,
    find_bottleneck,
    recent_means,
    time_shares,
)
from qfleet.report.status import RunGoal, RunStatus
from qfleet.runconfig.describe import key_table

KEYS = set(re.findall(r"^\| `([\w.]+)`", key_table(), re.M))


def fleet(env=1.0, act=1.0, store=0.1, wait=0.0, sample=0.5, update=2.0, **tags):
    """A record of a fleet that nothing is wrong with; times in ms, shares of the learner's process from 0 to 1."""
    record = {"actor/env_ms": env, "actor/act_ms": act, "actor/store_ms": store, "actor/wait_ms": wait,
              "train/sample_ms": sample, "train/update_ms": update, "time/learner_share": 0.5,
              "time/inbox_share": 0.05, "time/save_share": 0.0, "time/idle_share": 0.4,
              "fleet/backpressure_share": 0.0, "fleet/actors": 4.0}
    return record | {tag.replace("__", "/"): value for tag, value in tags.items()}


def one_process(env=1.0, act=1.0, store=0.1, sample=0.5, update=2.0, **tags):
    record = {"actor/env_ms": env, "actor/act_ms": act, "actor/store_ms": store, "actor/wait_ms": 0.0,
              "train/sample_ms": sample, "train/update_ms": update, "time/actor_share": 0.5, "time/learner_share": 0.4,
              "time/eval_share": 0.05, "time/save_share": 0.05}
    return record | {tag.replace("__", "/"): value for tag, value in tags.items()}


def run_of(*records):
    """The same records again and again, a second and a thousand steps apart."""
    return [{"step": 1000 * (i + 1), "updates": 100 * i, "time_s": i + 1.0, **records[i % len(records)]}
            for i in range(12)]


HELD = {"fleet__backpressure_share": 0.95, "time__idle_share": 0.01, "time__learner_share": 0.95}
CASES = {
    "env": fleet(env=9.0),
    "inference": fleet(act=9.0),
    "wire, packing": fleet(store=9.0),
    "wire, messages are slow": fleet(wait=9.0, time__idle_share=0.8, time__learner_share=0.1),
    "wire, taking in": fleet(wait=9.0, time__idle_share=0.02, time__inbox_share=0.9, time__learner_share=0.05),
    "decode": fleet(wait=9.0, sample=5.0, update=1.0, **HELD),
    "learner": fleet(wait=9.0, **HELD),
    "learner, hardly": fleet(wait=0.2, fleet__backpressure_share=0.1, time__idle_share=0.01),
    "pace": fleet(wait=2.0, fleet__backpressure_share=0.5, time__idle_share=0.4),
    "pace, the other way round": fleet(wait=2.0, fleet__backpressure_share=0.3, time__idle_share=0.5),
    "learner, and nobody has told of waiting yet": fleet(**HELD),
    "checkpoints": fleet(wait=9.0, time__save_share=0.8, time__learner_share=0.1, time__idle_share=0.02),
}
ONE_PROCESS = {
    "env": one_process(env=9.0, time__actor_share=0.8, time__learner_share=0.1),
    "inference": one_process(act=9.0, time__actor_share=0.8, time__learner_share=0.1),
    "storing": one_process(store=9.0, time__actor_share=0.8, time__learner_share=0.1),
    "decode": one_process(sample=5.0, update=1.0, time__actor_share=0.1, time__learner_share=0.8),
    "learner": one_process(time__actor_share=0.1, time__learner_share=0.8),
    "evaluation": one_process(time__eval_share=0.7, time__actor_share=0.1, time__learner_share=0.1),
    "checkpoints": one_process(time__save_share=0.7, time__actor_share=0.1, time__learner_share=0.1),
}


@pytest.mark.parametrize("name", CASES)
def test_limits_of_a_fleet(name):
    verdict = find_bottleneck(run_of(CASES[name]), faster=())
    assert verdict.limit == name.partition(",")[0], verdict
    assert verdict.advice == ADVICE[verdict.limit] and "%" in verdict.evidence


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_limits_of_one_process(name):
    verdict = find_bottleneck(run_of(ONE_PROCESS[name]), faster=())
    assert verdict.limit == name, verdict
    assert verdict.advice == {**ADVICE, **INLINE_ADVICE}[name] and "%" in verdict.evidence


@pytest.mark.parametrize(("settings", "advised"), [
    ({}, "a GPU (device=cuda) or learner.precision=bf16 may make an update faster; a larger"),
    ({"device": "cpu", "learner": {"precision": "bf16", "capture": False}},
     "a GPU (device=cuda) may make an update faster; a larger"),
    ({"device": "cuda", "learner": {"precision": "fp32", "capture": False}},
     "learner.precision=bf16 or learner.capture=true may make an update faster; a larger"),
    ({"device": "cuda:1", "learner": {"precision": "fp32", "capture": True}},
     "learner.precision=bf16 may make an update faster; a larger"),
    ({"device": "cuda", "learner": {"precision": "bf16", "capture": True}}, "a larger learner.batch_size"),
])
def test_a_run_is_not_told_to_take_what_it_has(settings, advised):
    tally = RunStatus(RunGoal.from_settings(settings))
    for record in run_of(ONE_PROCESS["learner"]):
        tally.add(record)
    assert tally.bottleneck().advice.startswith(advised)


def test_talking_to_a_parameter_server_is_a_part_of_the_updates():
    learner = one_process(update=4.0, time__learner_share=0.8) | {"server/learners": 3.0}
    verdict = find_bottleneck(run_of(learner | {"server/push_pull_ms": 3.0}))
    assert verdict.limit == "server" and verdict.advice == SERVER_ADVICE["server"]
    assert verdict.evidence.startswith("communication with the parameter server takes")
    assert find_bottleneck(run_of(learner | {"server/push_pull_ms": 0.5})).limit == "learner"


def test_the_evidence_is_in_numbers():
    assert find_bottleneck(run_of(fleet(env=7.9, time__idle_share=0.62))).evidence == \
        "the learner idles 62 % of its time; the environment takes 88 % of an actor's"
    assert find_bottleneck(run_of(CASES["learner"])).evidence == \
        "actors are held back 95 % of the time; the learner spends 76 % on updates"


@pytest.mark.parametrize("make", [fleet, one_process])
def test_before_learning_begins_pace_is_the_limit(make):
    record = {tag: value for tag, value in make().items() if not tag.startswith("train/")}
    verdict = find_bottleneck(run_of(record))
    assert verdict.limit == "pace" and "replay.min_steps" in verdict.evidence and verdict.advice == WARMING_UP


def test_a_fleet_without_actors_is_told_so():
    verdict = find_bottleneck([*run_of(fleet()), {"step": 12_500, "time_s": 13.0, "fleet/actors": 0.0}])
    assert verdict.limit == "wire" and "no actor" in verdict.evidence and verdict.advice == SILENT


@pytest.mark.parametrize("records", [[], [{}], [{"step": 1, "time_s": 1.0}], [{"step": 5, "time/fps": None}],
                                     [{"actor/env_ms": None}], [{"actor/env_ms": 0.0}]])
def test_records_that_do_not_say(records):
    assert find_bottleneck(records) is None


def test_only_the_latest_records_count():
    early, late = run_of(CASES["learner"]), run_of(CASES["env"])
    assert find_bottleneck([*early, *late]).limit == "env" and find_bottleneck([*late, *early]).limit == "learner"


def test_a_record_counts_by_the_time_it_spans():
    """An evaluation's record follows another at once: what it says of those milliseconds is not half of the truth."""
    long, short = {"x": 1.0}, {"x": 0.0}
    records = [{"step": i, "time_s": time, **record} for i, (time, record) in enumerate(
        [(10.0, short), (20.0, long), (20.1, short), (30.0, long), (30.1, short)])]
    assert recent_means(records)["x"] == pytest.approx(0.99, abs=0.005)
    assert recent_means([{"x": 4.0, "time_s": 3.0}])["x"] == 4.0


def test_first_updates_are_slow_and_say_nothing():
    """Code is compiled for seconds, in which actors wait; a limit is what stays."""
    acting = {tag: value for tag, value in CASES["env"].items() if not tag.startswith("train/")}
    first = [{**acting, "step": 1000, "updates": 0, "time_s": 1.0},
             {**CASES["learner"], "step": 2000, "updates": 9, "time_s": 31.0}]
    later = [{**CASES["env"], "step": 1000 * i, "updates": 100 * i, "time_s": 30.0 + i} for i in (3, 4)]
    assert find_bottleneck(first).limit == "learner" and find_bottleneck([*first, *later]).limit == "env"


def test_the_wait_for_the_last_evaluation_is_no_limit():
    end = [{**fleet(wait=0.0, time__idle_share=1.0, time__learner_share=0.0), "step": 12_000, "time_s": time}
           for time in (30.0, 60.0)]
    assert find_bottleneck([*run_of(CASES["learner"]), *end]).limit == "learner"


def test_shares_divide_what_there_is():
    assert time_shares(
        {"a_ms": 3.0, "b_ms": 1.0, "c_ms": None}, {"a": "a_ms", "b": "b_ms", "c": "c_ms", "d": "d_ms"}
    ) == {"a": 0.75, "b": 0.25}


ALL_ADVICE = [*ADVICE.values(), *INLINE_ADVICE.values(), *SERVER_ADVICE.values(), SILENT, WARMING_UP]


@pytest.mark.parametrize("text", ALL_ADVICE)
def test_the_keys_that_are_advised_exist(text):
    named = re.findall(r"\b((?:env|agent|replay|learner|eval|checkpoint|fleet|parameter_server)\.[a-z_]+)", text)
    named += re.findall(r"\b(actors|learners|device|launcher)\b(?==|, or let|, so that)", text)
    assert [key for key in named if key not in KEYS] == []
    assert named or "qfleet join" in text
