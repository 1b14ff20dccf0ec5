"""Schedules of the learning rate: tables worked out by hand."""

import math
import re

import pytest
from pydantic import ValidationError

from qfleet.core.errors import UserError
from qfleet.learner.learner import LearnerConfig
from qfleet.optim.optimizer import LearningRate
from qfleet.optim.torch_optimizer import check_optimizer

HALF = 0.5 * (1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(("cfg", "expected"), [
    ({}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ({"warmup_updates": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ({"schedule": "linear", "schedule_updates": 4}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    ({"schedule": "linear", "schedule_updates": 4, "final_rate_fraction": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
    ({"schedule": "linear", "schedule_updates": 4, "warmup_updates": 2}, [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]),
    ({"schedule": "cosine", "schedule_updates": 4}, [1.0, HALF, 0.5, 1 - HALF, 0.0, 0.0]),
    ({"schedule": "cosine", "schedule_updates": 2, "final_rate_fraction": 0.5}, [1.0, 0.75, 0.5, 0.5, 0.5, 0.5]),
    ({"schedule": "test_learning_rate:steps", "schedule_updates": 4}, [1.0, 1.0, 0.1, 0.1, 0.1, 0.1]),
])
def test_the_rate_of_every_update_is_the_tables(cfg, expected):
    rate = LearningRate(LearnerConfig(learning_rate=3.0, **cfg))
    assert [rate.at(step) for step in range(6)] == pytest.approx([3 * each for each in expected], abs=1e-12)
    assert rate.is_constant == (cfg == {})


def steps(progress):
    return 1 if progress < 0.5 else 0.1


def negative(progress):
    return 0.5 - progress


@pytest.mark.parametrize(("cfg", "message"), [
    ({"schedule": "linear"}, "needs the number of updates .* set learner.schedule_updates"),
    ({"schedule": "test_learning_rate:negative", "schedule_updates": 4}, "returned -0.5 at progress 1; .* at least 0"),
    ({"schedule": "test_learning_rate:HALF", "schedule_updates": 4}, "must be a function of the progress"),
    ({"schedule": "test_learning_rate:step", "schedule_updates": 4}, "did you mean steps"),
])
def test_unusable_schedules_are_refused_in_words(cfg, message):
    with pytest.raises(UserError, match=message):
        check_optimizer(LearnerConfig(**cfg), False)


@pytest.mark.parametrize(("name", "message"), [
    ("adamm", "not one of adam, adamw, rmsprop, or module:attribute; did you mean adam"),
    ("nadam", "not one of adam, adamw, rmsprop, or module:attribute; did you mean torch.optim:NAdam"),
    ("sgd", "not one of adam, adamw, rmsprop, or module:attribute; did you mean torch.optim:SGD"),
    ("xyz", "not one of adam, adamw, rmsprop, or module:attribute$"),
])
def test_an_unknown_optimizer_is_answered_with_the_known_ones(name, message):
    with pytest.raises(ValidationError) as error:
        LearnerConfig(optimizer=name)
    assert re.search(message, error.value.errors()[0]["msg"])
