"""The actor's tape: order of events, rows at ends and cuts, scores, back-pressure."""

import dataclasses

import numpy as np
import pytest
import torch
from fakes import SPEC, ListClock, ListMetrics, TapeEnv, TapeReplay, linear_agent

from qfleet.accel import choose
from qfleet.accel.graph_policy import GraphPolicy
from qfleet.actor.actor import Actor, Recorder
from qfleet.actor.policy import Policy
from qfleet.core.agent import Decision, RecurrentState
from qfleet.core.replay import Window
from qfleet.explore.constant import Constant
from qfleet.learner.weight_store import Mailbox
from qfleet.replay.layout import Layout


def actor_with(lengths, truncate=False, chunk_steps=4, future=1, agent=None, prioritised=False):
    agent = agent or linear_agent()
    tape = []
    env = TapeEnv(lengths, truncate, tape)
    replay = TapeReplay(tape)
    metrics = ListMetrics()
    weights = Mailbox()
    layout = Layout(SPEC, Window(future=future), chunk_steps, agent.columns, agent.stored_states)
    recorder = Recorder(agent, layout, env.lanes, replay, prioritised)
    policy = Policy(agent, 0, torch.device("cpu"))
    actor = Actor(policy, env, Constant(0.0, env.lanes), metrics, weights, recorder, ListClock())
    actor.begin(list(range(env.lanes)))
    return actor, env, replay, metrics, weights, tape


def rows_of(replay, name):
    """The started rows of all chunks of one lane, joined again."""
    starts = len(replay.chunks[0].valid)
    return np.concatenate([chunk.columns[name][:starts] for chunk in replay.chunks]).ravel().tolist()


def test_a_step_begins_by_receiving_and_sends_before_it_ends():
    actor, _, _, _, _, tape = actor_with([9])
    for _ in range(3):
        actor.step()
    assert tape == ["reset", "send", "recv", "send", "recv", "send"]


def test_a_chunk_is_shipped_while_the_environment_computes():
    actor, _, replay, _, _, tape = actor_with([9], chunk_steps=2)
    for _ in range(4):
        actor.step()
    assert tape == ["reset", "send", "recv", "send", "recv", "send", "recv", "send", "add"]
    assert len(replay.chunks) == 1


def test_rows_around_a_termination():
    actor, _, replay, metrics, _, _ = actor_with([2], chunk_steps=6)
    for _ in range(9):
        actor.step()
    assert rows_of(replay, "obs.obs") == [0, 1, 2, 0, 1, 2]
    assert rows_of(replay, "last") == [False, False, True, False, False, True]
    assert rows_of(replay, "reward") == [1, 1, 0, 1, 1, 0]
    assert rows_of(replay, "discount") == [1, 0, 0, 1, 0, 0]
    assert replay.chunks[0].valid.tolist() == [True, True, False, True, True, False]
    assert metrics.episodes[:2] == [(0, 20.0, 2), (0, 20.0, 2)]


def test_truncation_keeps_the_discount():
    actor, _, replay, _, _, _ = actor_with([2], truncate=True, chunk_steps=3)
    for _ in range(6):
        actor.step()
    assert rows_of(replay, "discount")[:3] == [1, 1, 0]
    assert rows_of(replay, "last")[:3] == [False, False, True]


def test_autoreset_steps_are_no_environment_steps():
    actor, _, _, _, _, _ = actor_with([2, 9])
    for _ in range(5):
        actor.step()
    assert actor.clock.counts == [2, 2, 1, 2, 2]
    assert actor.steps == 9


def test_a_cut_by_the_environment_makes_the_row_before_final_and_counts_no_score():
    actor, env, replay, metrics, _, _ = actor_with([5], chunk_steps=6)
    actor.step()
    actor.step()
    env.cut_next[:] = True
    for _ in range(10):
        actor.step()
    assert rows_of(replay, "obs.obs")[:4] == [0, 1, 0, 1]
    assert rows_of(replay, "last")[:4] == [False, True, False, False]
    assert metrics.episodes[0] == (0, 50.0, 5)
    assert metrics.counts == {"fault/env_rebuilds": 1}


def test_an_exact_boundary_truncates_every_lane_and_reseeds():
    actor, env, replay, metrics, _, _ = actor_with([7, 9], chunk_steps=4)
    for _ in range(3):
        actor.step()
    actor.truncate_episodes([70, 80])
    assert env.resets == [[0, 1], [70, 80]]
    assert [chunk.columns["last"][3] for chunk in replay.chunks] == [True, True]
    assert [chunk.columns["obs.obs"][:4, 0].tolist() for chunk in replay.chunks] == [[0, 1, 2, 3]] * 2
    assert all(chunk.valid.tolist() == [True, True, True, False] for chunk in replay.chunks)
    assert metrics.episodes == []
    actor.step()
    assert actor.steps == 8


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("steps", [3, 4, 5])
def test_the_final_row_of_an_episode_that_is_cut_keeps_arm_and_hints(steps, resumed):
    """The bootstrap there is that of the arm that played, and first priorities are judged by values, not by zeros."""
    def act(net, obs, memory, arm, rng):
        found = 7 + obs["obs"][:, 0]
        return Decision(torch.zeros(len(found), dtype=torch.int64), None, {"arm": found.int(), "q": found[:, None]})

    judged = []
    agent = dataclasses.replace(linear_agent(), act=act, columns={"arm": ((), "int32")},
                                priority_inputs={"q": ((1,), "float32")},
                                priority=lambda rows: judged.append(rows["q"]) or torch.ones(len(rows["q"])))
    actor, _, replay, _, _, _ = actor_with([99], chunk_steps=4, agent=agent, prioritised=True)
    for _ in range(steps):
        actor.step()
    if resumed:
        before, (actor, _, replay, _, _, _) = actor, actor_with([99], chunk_steps=4, agent=agent, prioritised=True)
        actor.load_state_dict(before.state_dict())
    else:
        actor.truncate_episodes([1])
    chunk = replay.chunks[-1]
    end = int(chunk.columns["last"].argmax())
    assert chunk.columns["arm"][end] == chunk.columns["arm"][end - 1] > 7
    assert judged[-1][end - 1, 1] == judged[-1][end - 1, 0] > 7


def test_a_waiting_replay_holds_the_actor_and_loses_nothing():
    actor, _, replay, _, _, _ = actor_with([99], chunk_steps=2)
    replay.waiting = True
    moved = [actor.step() for _ in range(8)]
    assert moved == [True] * 4 + [False] * 4
    replay.waiting = False
    for _ in range(6):
        assert actor.step()
    assert rows_of(replay, "obs.obs") == list(range(8))


def test_newer_weights_are_taken_and_their_lag_reported():
    actor, _, _, metrics, weights, _ = actor_with([9])
    weights.publish({"weight": torch.full((3, 1), 5.0)}, 0)
    actor.step()
    weights.publish({"weight": torch.full((3, 1), 7.0)}, 12)
    actor.step()
    assert actor.policy.version == 12
    assert (actor.policy.flat.master == 7).all()
    assert metrics.values == [{"actor/policy_lag": 0}, {"actor/policy_lag": 12}]


def test_resume_ends_running_episodes_at_the_last_observation_seen():
    actor, _, _, _, _, _ = actor_with([50], chunk_steps=8)
    for _ in range(4):
        actor.step()
    state = actor.state_dict()
    other, _, replay, _, _, _ = actor_with([50], chunk_steps=8)
    other.load_state_dict(state)
    other.begin([0])
    assert replay.chunks[0].columns["obs.obs"][:4, 0].tolist() == [0, 1, 2, 3]
    assert replay.chunks[0].columns["last"][:4].tolist() == [False, False, False, True]
    assert other.steps == 4


def test_what_the_agent_remembers_of_its_choice_travels_with_the_row():
    def act(net, obs, memory, arm, rng):
        return Decision(torch.zeros(len(obs["obs"]), dtype=torch.int64), extras={"mu": obs["obs"][:, 0] * 10})

    agent = dataclasses.replace(linear_agent(), act=act, columns={"mu": ((), "float32")})
    actor, _, replay, _, _, _ = actor_with([50], chunk_steps=4, agent=agent)
    for _ in range(6):
        actor.step()
    assert replay.chunks[0].columns["mu"][:5].tolist() == [0, 10, 20, 30, 40]
    other, _, resumed, _, _, _ = actor_with([50], chunk_steps=4, agent=agent)
    other.load_state_dict(actor.state_dict())
    assert resumed.chunks[0].columns["mu"][:2].tolist() == [40, 40], "the final row repeats the one before"


def counting_agent():
    """Remembers how many steps its episode has had, and all it was paid; the observation counts the same."""
    def act(net, obs, memory, arm, rng):
        after = memory | {"count": memory["count"] + 1}
        return Decision(torch.zeros(len(obs["obs"]), dtype=torch.int64), after, memory)

    recall = RecurrentState(
        initial=lambda lanes, device: {name: torch.zeros(lanes) for name in ("count", "paid", "kept")},
        observe=lambda memory, reward: memory | {"paid": memory["paid"] + reward, "kept": memory["kept"] + reward},
        reset=lambda memory, over: memory | {name: memory[name] * ~over for name in ("count", "paid")},
        persistent=("kept",))
    columns = {name: ((), "float32") for name in ("count", "paid", "kept")}
    return dataclasses.replace(linear_agent(), act=act, recurrent_state=recall, columns=columns)


def interrupted(agent):
    """60 steps in two lanes, one of which loses an episode, and all of which are broken off."""
    actor, env, replay, _, _, _ = actor_with([3, 5], chunk_steps=6, agent=agent)
    for step in range(40):
        env.cut_next[:] = [False, step == 17]
        actor.step()
    actor.truncate_episodes([3, 4])
    for _ in range(20):
        actor.step()
    return actor, replay


def test_each_lane_remembers_its_own_episode_and_no_other():
    _, replay = interrupted(counting_agent())
    assert len(replay.chunks) > 10
    for chunk in replay.chunks:
        steps, before = chunk.columns["obs.obs"][:, 0], np.roll(chunk.columns["count"], 1)
        cut = chunk.columns["last"] & (chunk.columns["count"] == before)  # the row before, once more
        for name in ("count", "paid"):
            assert (chunk.columns[name] == np.where(cut, before, steps)).all()
    assert replay.chunks[-1].columns["kept"].max() > 10, "of this nothing is forgotten"


def test_by_reflex_it_remembers_the_same(monkeypatch):
    """Rewards and ends reach the reflex instead of the policy, and states come back to be stored."""
    plain = counting_agent()
    agent = dataclasses.replace(plain, recurrent_state=dataclasses.replace(plain.recurrent_state, persistent=()),
                                columns={"count": ((), "float32")}, stored_states={"paid": ((), "float32")})
    runs = []
    for quick in (False, True):
        if quick:
            monkeypatch.setattr(choose, "acts_captured", lambda policy: True)
        actor, replay = interrupted(agent)
        assert isinstance(actor._acting, GraphPolicy) == quick
        runs.append(replay.chunks)
    assert len(runs[0]) == len(runs[1]) > 10
    for one, other in zip(*runs, strict=True):
        for name in one.columns:
            np.testing.assert_array_equal(one.columns[name], other.columns[name])
    assert max(chunk.columns["paid"].max() for chunk in runs[0]) > 1


def test_what_outlives_episodes_is_saved_and_the_rest_begins_anew():
    actor, _, _, _, _, _ = actor_with([50], agent=counting_agent())
    for _ in range(8):
        actor.step()
    state = actor.state_dict()
    assert set(state["policy"]["memory"]) == {"kept"}
    other, _, replay, _, _, _ = actor_with([50], agent=counting_agent())
    other.load_state_dict(state)
    other.begin([0])
    for _ in range(8):
        other.step()
    assert replay.chunks[-1].columns["count"][:2].tolist() == [0, 1]
    assert replay.chunks[-1].columns["kept"][:2].tolist() == [7, 8]
