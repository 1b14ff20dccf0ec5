"""The rate limiter on hand-made timelines."""

import pytest

from qfleet.replay.rate_limiter import RateLimiter


def counting(**arguments) -> RateLimiter:
    limiter = RateLimiter(**arguments)
    limiter.start_counting()
    return limiter


def test_no_sample_before_min_steps_and_no_burst_after():
    limiter = counting(samples_per_insert=8, min_steps=100)
    limiter.clock.count_steps(99)
    assert not limiter.may_sample(1)
    limiter.clock.count_steps(1)
    assert not limiter.may_sample(32)
    limiter.clock.count_steps(4)
    assert limiter.may_sample(32)
    limiter.count_samples(32)
    assert not limiter.may_sample(1)


def test_counting_begins_when_a_window_can_be_sampled():
    limiter = RateLimiter(samples_per_insert=8, min_steps=10)
    limiter.clock.count_steps(500)
    assert not limiter.may_sample(1)
    limiter.start_counting()
    assert not limiter.may_sample(32)
    limiter.clock.count_steps(4)
    assert limiter.may_sample(32) and not limiter.may_sample(33)


def test_a_restarted_limiter_warms_up_again():
    limiter = RateLimiter(samples_per_insert=1, min_steps=10)
    limiter.restart_at(50)
    limiter.clock.count_steps(4)
    limiter.start_counting()
    limiter.clock.count_steps(6)
    assert limiter.steps == 60 and not limiter.may_sample(1)
    limiter.clock.count_steps(5)
    assert limiter.may_sample(5) and not limiter.may_sample(6)


def test_starting_to_count_twice_has_no_effect():
    limiter = counting(samples_per_insert=1, min_steps=10)
    limiter.clock.count_steps(50)
    limiter.count_samples(30)
    limiter.start_counting()
    assert limiter.budget == 40 and limiter.may_sample(10) and not limiter.may_sample(11)


def test_inserts_are_refused_while_too_many_samples_are_unused():
    limiter = counting(samples_per_insert=2, min_steps=0, error_buffer=10)
    limiter.clock.count_steps(5)
    assert limiter.may_insert()
    limiter.clock.count_steps(1)
    assert not limiter.may_insert()
    limiter.count_samples(2)
    assert limiter.may_insert()


def test_inserts_are_never_refused_by_default():
    limiter = counting(samples_per_insert=1000, min_steps=0)
    limiter.clock.count_steps(10**9)
    assert limiter.may_insert()


@pytest.mark.parametrize("per_insert", [0.25, 1.0, 8.0])
def test_the_long_run_ratio_is_samples_per_insert(per_insert):
    limiter, start = counting(samples_per_insert=per_insert, min_steps=64), 2**31 - 2
    limiter.load_state_dict({"steps": start, "samples": 0, "origin": [start, 0], "samples_per_insert": per_insert})
    for _ in range(1000):
        limiter.clock.count_steps(16)
        while limiter.may_sample(32):
            limiter.count_samples(32)
    assert limiter.steps == start + 16_000
    assert limiter.ratio == pytest.approx(per_insert, abs=32 / 16_000)


def test_a_ratio_changed_on_resume_applies_to_later_steps():
    limiter = counting(samples_per_insert=1, min_steps=0)
    limiter.clock.count_steps(1000)
    limiter.count_samples(1000)
    changed = RateLimiter(samples_per_insert=8, min_steps=0)
    changed.load_state_dict(limiter.state_dict())
    assert not changed.may_sample(1)
    changed.clock.count_steps(2)
    assert changed.may_sample(16) and not changed.may_sample(17)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.7, 32.0])
def test_batches_allowed_equals_the_batches_that_can_be_sampled(ratio):
    limiter = RateLimiter(ratio, 10)
    assert limiter.batches_allowed(4) == 0
    limiter.start_counting()
    for _ in range(200):
        limiter.clock.count_steps(3)
        allowed, sampled = limiter.batches_allowed(4), 0
        while limiter.may_sample(4):
            limiter.count_samples(4)
            sampled += 1
        assert allowed == sampled
