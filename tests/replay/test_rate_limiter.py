"""Pacing is arithmetic: hand-made timelines."""

import pytest

from qfleet.replay.rate_limiter import RateLimiter


def opened(**arguments) -> RateLimiter:
    pace = RateLimiter(**arguments)
    pace.start_counting()
    return pace


def test_no_sample_before_min_steps_and_no_burst_after():
    pace = opened(samples_per_insert=8, min_steps=100)
    pace.clock.count_steps(99)
    assert not pace.may_sample(1)
    pace.clock.count_steps(1)
    assert not pace.may_sample(32)
    pace.clock.count_steps(4)
    assert pace.may_sample(32)
    pace.count_samples(32)
    assert not pace.may_sample(1)


def test_counting_waits_for_something_to_sample():
    pace = RateLimiter(samples_per_insert=8, min_steps=10)
    pace.clock.count_steps(500)
    assert not pace.may_sample(1)
    pace.start_counting()
    assert not pace.may_sample(32)
    pace.clock.count_steps(4)
    assert pace.may_sample(32) and not pace.may_sample(33)


def test_an_emptied_replay_warms_up_again():
    pace = RateLimiter(samples_per_insert=1, min_steps=10)
    pace.restart_at(50)
    pace.clock.count_steps(4)
    pace.start_counting()
    pace.clock.count_steps(6)
    assert pace.steps == 60 and not pace.may_sample(1)
    pace.clock.count_steps(5)
    assert pace.may_sample(5) and not pace.may_sample(6)


def test_opening_twice_changes_nothing():
    pace = opened(samples_per_insert=1, min_steps=10)
    pace.clock.count_steps(50)
    pace.count_samples(30)
    pace.start_counting()
    assert pace.budget == 40 and pace.may_sample(10) and not pace.may_sample(11)


def test_actors_wait_for_a_learner_that_lags():
    pace = opened(samples_per_insert=2, min_steps=0, error_buffer=10)
    pace.clock.count_steps(5)
    assert pace.may_insert()
    pace.clock.count_steps(1)
    assert not pace.may_insert()
    pace.count_samples(2)
    assert pace.may_insert()


def test_actors_never_wait_by_default():
    pace = opened(samples_per_insert=1000, min_steps=0)
    pace.clock.count_steps(10**9)
    assert pace.may_insert()


@pytest.mark.parametrize("per_insert", [0.25, 1.0, 8.0])
def test_the_long_run_ratio_is_the_one_asked_for(per_insert):
    pace, start = opened(samples_per_insert=per_insert, min_steps=64), 2**31 - 2
    pace.load_state_dict({"steps": start, "samples": 0, "origin": [start, 0], "samples_per_insert": per_insert})
    for _ in range(1000):
        pace.clock.count_steps(16)
        while pace.may_sample(32):
            pace.count_samples(32)
    assert pace.steps == start + 16_000
    assert pace.ratio == pytest.approx(per_insert, abs=32 / 16_000)


def test_a_ratio_changed_on_resume_holds_from_then_on():
    pace = opened(samples_per_insert=1, min_steps=0)
    pace.clock.count_steps(1000)
    pace.count_samples(1000)
    changed = RateLimiter(samples_per_insert=8, min_steps=0)
    changed.load_state_dict(pace.state_dict())
    assert not changed.may_sample(1)
    changed.clock.count_steps(2)
    assert changed.may_sample(16) and not changed.may_sample(17)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.7, 32.0])
def test_batches_are_those_that_can_be_drawn(ratio):
    pace = RateLimiter(ratio, 10)
    assert pace.batches_allowed(4) == 0
    pace.start_counting()
    for _ in range(200):
        pace.clock.count_steps(3)
        promised, drawn = pace.batches_allowed(4), 0
        while pace.may_sample(4):
            pace.count_samples(4)
            drawn += 1
        assert promised == drawn
