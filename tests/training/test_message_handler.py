"""Validation of the messages that members send to the learner."""

import numpy as np
import pytest
import torch
from test_remote_actor_metrics import emitted, fleet, hello  # noqa: F401

from qfleet.actor.policy import Policy
from qfleet.core.agent import ROW_MOMENTS, ExplorationParams
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.episode import Episode
from qfleet.optim.flat_params import Flat
from qfleet.optim.row_moments import RowMoments
from qfleet.replay.codec import Codec, PackedChunk
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout
from qfleet.runconfig.build import make_agent
from qfleet.runconfig.resolution import resolve
from qfleet.training.learner_core import ObservedReplay
from qfleet.training.meter import FunctionSink
from qfleet.transport.fleet_pb2 import ExchangeRequest, Judgement
from qfleet.transport.weight_codec import pack_weights, unpack_weights


@pytest.fixture
def run(fleet):  # noqa: F811
    """A run with one actor and an evaluator; `run.saved` lists the scores of the best policies saved."""
    hello(fleet, "actor/0", "a")
    hello(fleet, "evaluator", "e", "evaluator")
    fleet.saved = []
    hooks = fleet.core.hooks
    object.__setattr__(hooks, "save_best", lambda score, progress, weights: fleet.saved.append(score.mean) or True)
    return fleet


def evaluation(run, returns=(10.0, 20.0), change=lambda state: state):
    state = change(dict(run.core.learner.flat.state()))
    return Judgement(returns=returns, lengths=[5] * len(returns), version=0, weights=pack_weights(state))


def handle(run, index, sequence=1, **fields):
    """Handle one message; returns the number of messages rejected (0 or 1)."""
    before = run.core.meter.counters["fault/bad_messages"]
    message = ExchangeRequest(index=index, incarnation=1, sequence=sequence, **fields)
    assert run.acting.message_handler.inbox.offer(message)
    run.acting.message_handler.step()
    return run.core.meter.counters["fault/bad_messages"] - before


def test_an_evaluation_from_the_evaluator_is_recorded(run):
    assert handle(run, -1, judgements=[evaluation(run)]) == 0
    assert run.saved == [15.0] and run.core.best == 15.0 and run.acting.message_handler.evaluated_version == 0


def test_rows_of_remote_actors_enter_the_statistics_as_those_of_local_ones_do():
    """Packed and sent, with a column that is compressed; and the actor's policy gets the learner's statistics."""
    spec = EnvSpec("toy", {"obs": Leaf((80,), "float32", "vector")}, 3)
    config = resolve("cartpole", ["agent.hidden=[8]", "normalise.observations=true", "normalise.rewards=true"]).config
    agent = make_agent(config, spec)
    layout = Layout(spec, agent.window, 8, agent.columns)
    rng, policy = np.random.default_rng(0), Policy(agent, 1, torch.device("cpu"))
    chunk = layout.blank()
    for column in chunk.columns.values():
        if column.dtype == np.float32:
            column[:] = rng.normal(100, 5, column.shape)
    chunk.columns["last"][:] = np.arange(layout.rows) == 3
    chunk.valid[:] = True
    chunk.valid[3] = False
    sent = PackedChunk.from_bytes(Codec(layout).pack(chunk).to_bytes(), layout)
    found = []
    for remote in (False, True):
        flat = Flat(agent.network())
        moments = RowMoments(agent.row_values, flat, exchanged=False)
        observed = ObservedReplay(HostReplay(layout, ReplayConfig(min_steps=1), 1, torch.device("cpu")), moments)
        assert (observed.add_packed(sent) if remote else observed.add(chunk)) == 0
        moments.write()
        found.append([flat.buffer(name) for name in ROW_MOMENTS])
    assert float(found[0][0]) == 7, "all new rows but the final one"
    assert all(map(torch.equal, *found))
    policy.load(unpack_weights(pack_weights(flat.state())), 1)
    params, obs = ExplorationParams(torch.zeros(2)), rng.normal(100, 5, (2, 80)).astype(np.float32)
    taken = policy.act({"obs": obs}, params)[1]
    mean, square = (values.numpy() for values in found[0][1:])
    clean = np.clip((obs - mean[:80]) / np.sqrt(square[:80] / 7 + 1e-8), -10, 10).astype(np.float32)
    expected = flat.net({"obs": torch.from_numpy(clean)}, None).detach()
    np.testing.assert_allclose(taken["distribution"], expected, rtol=1e-3)
    assert taken["reward_scale"] == pytest.approx([np.sqrt(square[80] / 7)] * 2)


def test_an_evaluation_from_any_other_member_is_rejected(run):
    assert handle(run, 0, judgements=[evaluation(run)]) == 1
    assert run.saved == [] and run.core.best is None and run.acting.message_handler.evaluated_version == -1


def test_metrics_from_info_of_episodes_and_evaluations_reach_callbacks_and_records(run):
    seen, records = [], []
    run.core.meter.on_episode = seen.append
    run.core.meter.sinks = [FunctionSink(records.append)]
    episodes = [{"lane": 1, "ret": 2.5, "length": 3, "info": [{"tag": "success", "sum": value, "count": 1}]}
                for value in (1.0, 0.0)]
    figures = [{"tag": "rollout/info/success", "sum": 1.0, "count": 2}]
    assert handle(run, 0, steps=6, episodes=episodes, figures=figures) == 0
    assert seen == [Episode(2.5, 3, 1, 0, {"success": value}) for value in (1.0, 0.0)]
    score = evaluation(run)
    score.info.add(tag="success", sum=0.75, count=1)
    assert handle(run, -1, judgements=[score]) == 0
    assert records[-1]["eval/info/success"] == 0.75 and records[-1]["rollout/info/success"] == 0.5
    score.info[0].sum = np.inf
    assert handle(run, -1, 2, judgements=[score]) == 1


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
def test_weights_that_do_not_match_the_learner_are_not_saved_as_best_policy(run, change):
    assert handle(run, -1, judgements=[evaluation(run, change=change)]) == 1
    assert run.saved == [] and run.core.best is None
    assert run.acting.message_handler.evaluated_version == 0, "the end of the run does not wait for it"


@pytest.mark.parametrize("returns", [(1.7e308, 1.7e308), (1e200, -1e200), (np.nan,), (np.inf,)])
def test_returns_without_a_finite_mean_are_rejected(run, returns):
    with np.errstate(over="ignore"):
        assert handle(run, -1, judgements=[evaluation(run, returns)]) == 1
    assert run.saved == [] and run.core.best is None
    assert handle(run, -1, 2, judgements=[evaluation(run)]) == 0 and run.saved == [15.0]


@pytest.mark.parametrize("fields", [
    {"counters": [{"tag": "wire/x", "by": -5}]}, {"counters": [{"tag": "wire/x", "by": 1 << 60}]},
    {"steps": 1 << 31}, {"steps": 1 << 20}, {"counters": [{"tag": "eval/mean_reward", "by": 1}]},
    {"figures": [{"tag": "eval/mean_reward", "sum": 500.0, "count": 1}]},
    {"figures": [{"tag": "loss/td", "sum": 1.7e308, "count": 1}]},
    {"episodes": [{"lane": 0, "ret": 1.7e308, "length": 1}]},
    {"episodes": [{"length": 1, "info": [{"tag": "cost", "sum": 1e101, "count": 1}]}]},
    {"episodes": [{"length": 1, "info": [{"tag": f"x{n}", "count": 1} for n in range(1001)]}]},
    {"part": {"save": 1, "state": b""}}])
def test_fields_that_an_actor_may_not_send_are_rejected(run, fields):
    assert handle(run, 0, **fields) == 1
    assert run.core.progress().steps == 0 and "wire/x" not in run.core.meter.counters


def test_experience_from_an_evaluator_is_rejected(run):
    assert handle(run, -1, steps=3) == handle(run, -1, 2, episodes=[{"lane": 0, "ret": 1.0, "length": 1}]) == 1


def test_the_number_of_counters_is_bounded_and_the_rest_of_a_message_is_applied(run):
    assert handle(run, 0, counters=[{"tag": f"x/{n}", "by": 1} for n in range(1001)]) == 1
    assert handle(run, 0, 2, counters=[{"tag": f"x/{n}", "by": 1} for n in range(900)]) == 0
    assert handle(run, 0, 3, steps=3, counters=[{"tag": f"y/{n}", "by": 1} for n in range(900)]) == 0
    assert handle(run, 0, 4, counters=[{"tag": "x/7", "by": 1}]) == 0
    assert len(run.core.meter.counters) <= 1001 and run.core.meter.counters["x/7"] == 2
    assert run.acting.message_handler.member_steps[0] == 3, "steps count although the counters are dropped"


def test_the_number_of_metrics_is_bounded_too(run):
    for sequence in range(1, 5):
        figures = [{"tag": f"{sequence}/{n}", "sum": 1.0, "count": 1} for n in range(900)]
        assert handle(run, 0, sequence, figures=figures) == 0
        emitted(run)
    assert handle(run, 0, 5, figures=[{"tag": "1/7", "sum": 5.0, "count": 1}]) == 0
    assert emitted(run)["1/7"] == 5.0
    assert 900 <= sum(tag[0].isdigit() for tag in run.core.meter.latest) <= 1000


def test_an_actor_that_is_ahead_of_the_learner_has_zero_policy_lag(run):
    run.setup.registry.record_heartbeat(0, 1, 10, 1 << 62)
    assert emitted(run)["fleet/policy_lag"] == 0
