"""Agents that remember, as whole runs: in one process and in several, and where an agent without memory fails."""

import pytest
from chain_rows import REMEMBERING, curious
from fleet_runs import FleetRun
from real_runs import newest, train

from qfleet import api
from qfleet.runs.checkpoint_parts import unpack_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CUE = ["env.kwargs={delay: 8}", "agent.unroll=9", "agent.stride=9", "agent.n_step=8", "replay.chunk_steps=9",
       "run.threads=1", "run.tensorboard=false"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("where", [[], ["actors=2"]], ids=["one process", "actors"])
def test_r2d2_learns_the_chain_from_random_behaviour(where):
    result = train("toy/Chain-v0", *REMEMBERING, *where)
    assert result.best == 1 and newest(result.directory).manifest.updates > 800


@pytest.mark.parametrize("seed", [1, 2])
def test_r2d2_answers_as_the_cue_said(seed):
    result = api.train("memory-cue", [*CUE, f"seed={seed}", "total_steps=40000"])
    assert result.reason == "stop_at"
    assert api.evaluate(result.directory, episodes=40, seed=9).mean_reward >= 0.9
    agent = api.load(result.directory)
    for cue in (-1.0, 1.0):
        agent.reset()
        answers = [agent.act([cue * (t == 0), t == 8, t / 8]) for t in range(9)]
        assert answers[-1] == (cue > 0), "a script's agent remembers, too"


def test_dqn_does_not():
    words = ["env.id=toy/MemoryCue-v0", "env.kwargs={delay: 8}", "total_steps=4000", "agent.hidden=[32]"]
    result = api.train("vector", [*words, "run.threads=1", "run.tensorboard=false"])
    assert api.evaluate(result.directory, episodes=200, seed=9).mean_reward < 0.4


@pytest.mark.parametrize("algo,kind,where", [("ngu", "mixture", []), ("agent57", "bandit", ["actors=1"])])
def test_curious_agents_learn_the_chain_from_random_behaviour(algo, kind, where):
    result = train("toy/Chain-v0", *curious(algo, kind), *where)
    assert result.best == 1


def test_a_killed_actor_goes_on_with_what_its_bandit_has_learnt(tmp_path):
    def histories(fleet):
        memories = newest(fleet.run).state()["actor_registry"]["memories"] if fleet.checkpoints else {}
        states = {index: unpack_state(bytes(memory)) for index, memory in memories.items()}
        bandits = {index: state[0]["bandit"] if isinstance(state, list) else state for index, state in states.items()}
        return {index: bandit["history"].tolist() for index, bandit in bandits.items()}

    words = ["toy/Chain-v0", *curious("agent57", "bandit"), "explore.window=100000", "actors=1",
             "total_steps=1000000", "eval.period_steps=500", "checkpoint.period_steps=300",
             "checkpoint.keep=999", "run.tensorboard=false", "run.threads=1", "run.name=x", "device=cpu"]
    with FleetRun("train", *words, cwd=tmp_path) as fleet:
        before = fleet.until(lambda: (found := histories(fleet)) and len(found.get("0", ())) > 5 and found)
        pid = fleet.kill("actor/0")
        fleet.until(lambda: (now := fleet.member("actor/0")) and now.pid != pid)
        since = fleet.checkpoints[-1]
        after = fleet.until(lambda: fleet.checkpoints[-1] > since and (found := histories(fleet))
                            and len(found["0"]) > len(before["0"]) and "-1" in found and found)
    assert after["0"][:len(before["0"])] == before["0"], "what was told before the death is known after it"
    assert len(after["-1"]) >= 4, "the evaluator has its own"
