"""What a learner believes of the messages of its members."""

import numpy as np
import pytest
import torch
from test_remote_actor_metrics import emitted, fleet, hello  # noqa: F401

from qfleet.transport.fleet_pb2 import ExchangeRequest, Judgement
from qfleet.transport.weight_codec import pack_weights


@pytest.fixture
def book(fleet):  # noqa: F811
    """The fleet with an actor and an evaluator, which saves what it takes for the best policy in `saved`."""
    hello(fleet, "local/0", "a")
    hello(fleet, "evaluator", "e", "evaluator")
    fleet.saved = []
    outside = fleet.core.hooks
    object.__setattr__(outside, "save_best", lambda score, progress, weights: fleet.saved.append(score.mean) or True)
    return fleet


def judgement(fleet, returns=(10.0, 20.0), change=lambda state: state):  # noqa: F811
    state = change(dict(fleet.core.learner.flat.state()))
    return Judgement(returns=returns, lengths=[5] * len(returns), version=0, weights=pack_weights(state))


def take(fleet, index, sequence=1, **said):  # noqa: F811
    """What becomes of a message: how many were refused because of it."""
    before = fleet.core.meter.counters["fault/bad_messages"]
    assert fleet.message_handler.inbox.offer(ExchangeRequest(index=index, incarnation=1, sequence=sequence, **said))
    fleet.message_handler.step()
    return fleet.core.meter.counters["fault/bad_messages"] - before


def test_an_evaluation_of_the_evaluator_is_booked(book):
    assert take(book, -1, judgements=[judgement(book)]) == 0
    assert book.saved == [15.0] and book.core.best == 15.0 and book.message_handler.evaluated_version == 0


def test_an_evaluation_of_any_other_member_is_refused(book):
    assert take(book, 0, judgements=[judgement(book)]) == 1
    assert book.saved == [] and book.core.best is None and book.message_handler.evaluated_version == -1


def wider(state):
    name = next(iter(state))
    return state | {name: torch.zeros(*state[name].shape, 2)}


def other_dtype(state):
    name = next(iter(state))
    return state | {name: state[name].double()}


def not_finite(state):
    name = next(iter(state))
    return state | {name: torch.full_like(state[name], np.nan)}


@pytest.mark.parametrize("change", [
    lambda state: {}, lambda state: dict(list(state.items())[1:]), lambda state: state | {"more": torch.zeros(1)},
    wider, other_dtype, not_finite])
def test_weights_that_are_not_the_learners_are_no_best_policy(book, change):
    assert take(book, -1, judgements=[judgement(book, change=change)]) == 1
    assert book.saved == [] and book.core.best is None
    assert book.message_handler.evaluated_version == 0, "the end of the run does not wait for it"


@pytest.mark.parametrize("returns", [(1.7e308, 1.7e308), (1e200, -1e200), (np.nan,), (np.inf,)])
def test_returns_without_a_finite_mean_are_no_evaluation(book, returns):
    with np.errstate(over="ignore"):
        assert take(book, -1, judgements=[judgement(book, returns)]) == 1
    assert book.saved == [] and book.core.best is None
    assert take(book, -1, 2, judgements=[judgement(book)]) == 0 and book.saved == [15.0]


@pytest.mark.parametrize("said", [
    {"counters": [{"tag": "wire/x", "by": -5}]}, {"counters": [{"tag": "wire/x", "by": 1 << 60}]},
    {"steps": 1 << 31}, {"steps": 1 << 20}, {"counters": [{"tag": "eval/mean_reward", "by": 1}]},
    {"figures": [{"tag": "eval/mean_reward", "sum": 500.0, "count": 1}]},
    {"figures": [{"tag": "loss/td", "sum": 1.7e308, "count": 1}]},
    {"episodes": [{"lane": 0, "ret": 1.7e308, "length": 1}]},
    {"part": {"save": 1, "state": b""}}])
def test_what_an_actor_cannot_know_or_do_is_refused(book, said):
    assert take(book, 0, **said) == 1
    assert book.core.progress().steps == 0 and "wire/x" not in book.core.meter.counters


def test_an_evaluator_has_no_experience(book):
    assert take(book, -1, steps=3) == take(book, -1, 2, episodes=[{"lane": 0, "ret": 1.0, "length": 1}]) == 1


def test_the_number_of_counters_is_bounded_and_the_rest_of_a_message_counts(book):
    assert take(book, 0, counters=[{"tag": f"x/{n}", "by": 1} for n in range(1001)]) == 1
    assert take(book, 0, 2, counters=[{"tag": f"x/{n}", "by": 1} for n in range(900)]) == 0
    assert take(book, 0, 3, steps=3, counters=[{"tag": f"y/{n}", "by": 1} for n in range(900)]) == 0
    assert take(book, 0, 4, counters=[{"tag": "x/7", "by": 1}]) == 0
    assert len(book.core.meter.counters) <= 1001 and book.core.meter.counters["x/7"] == 2
    assert book.message_handler.member_steps[0] == 3, "invented counters do not mute anybody"


def test_an_actor_that_is_ahead_of_the_learner_lags_by_nothing(book):
    book.registry.record_heartbeat(0, 1, 10, 1 << 62)
    assert emitted(book)["fleet/policy_lag"] == 0
