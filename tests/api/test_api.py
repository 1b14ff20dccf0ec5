"""The Python face: agents act in the environment's own words, failures leave runs as they were, threads stay."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import closing
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from qfleet import api
from qfleet.cli.commands import main
from qfleet.core.errors import UserError
from qfleet.learner.learner import Learner
from qfleet.runconfig.auto import training_device
from qfleet.runconfig.build import make_eval_env
from qfleet.runconfig.resolution import resolve
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TINY = ["agent.hidden=[16]", "env.lanes=2", "replay.chunk_steps=8", "replay.min_steps=64", "learner.batch_size=8",
        "replay.samples_per_insert=4", "eval.episodes=2", "run.tensorboard=false", "run.log_period_steps=50",
        "run.threads=1", "stop_at=null"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Fields(gymnasium.Env):
    """Answers with random members of its spaces and remembers what it was told to do."""

    def __init__(self, observation, action):
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.2), False, {}


def nested():
    inner = spaces.Dict({"cell": spaces.Discrete(3, start=5), "speed": spaces.Box(-1, 1, (2,))})
    return Fields(spaces.Dict({"a": inner, "b": spaces.MultiBinary(4)}), spaces.Discrete(3, start=2))


def levers():
    return Fields(spaces.MultiDiscrete([3, 4], start=[1, -1]), spaces.MultiDiscrete([2, 3], start=[0, 7]))


def endless():
    class Endless(Fields):
        def step(self, action):
            return self.observation_space.sample(), 1.0, False, False, {}

    return Endless(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))


def picture():
    return Fields(spaces.Box(0, 255, (12, 10, 3), np.uint8), spaces.Discrete(2))


ENVS = {"FrozenLake-v1": None, "Blackjack-v1": None, "test_api:nested": nested, "test_api:levers": levers,
        "test_api:picture": picture}


def trained(env_id, *overrides):
    limit = ["env.max_episode_steps=20"] if ":" in env_id else []
    torso = ["agent.torso=mlp", "env.stack=1", "env.frame_size=null"] if "picture" in env_id else []
    words = ["agent.algo=dqn", *TINY, "total_steps=100", "run.name=x", *limit, *torso, *overrides]
    result = api.train(env_id, words)
    return api.load(result.directory, which="latest")


@pytest.mark.parametrize("env_id", ENVS)
def test_an_agent_acts_in_the_words_of_its_environment(env_id):
    agent = trained(env_id)
    env = ENVS[env_id]() if ENVS[env_id] else gymnasium.make(env_id)
    obs, _ = env.reset(seed=1)
    env.action_space.seed(1)
    seen = set()
    for _ in range(60):
        action = agent.act(obs, epsilon=0.8)
        assert env.action_space.contains(action), action
        seen.add(str(action))
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            obs, _ = env.reset()
    assert len(seen) == agent.spec.num_actions, "every action can be chosen, each under its own name"


@pytest.mark.parametrize(("env_id", "shape"), [("FrozenLake-v1", (5,)), ("test_api:levers", (5, 2)),
                                               ("test_api:picture", (5,))])
def test_a_batch_of_plain_observations_is_as_good_as_one_by_one(env_id, shape):
    agent = trained(env_id)
    space = (ENVS[env_id]() if ENVS[env_id] else gymnasium.make(env_id)).observation_space
    batch = np.stack([space.sample() for _ in range(5)])
    actions = agent.act(batch)
    assert actions.shape == shape
    assert [np.asarray(agent.act(one)).tolist() for one in batch] == actions.tolist()


def test_leaves_do_as_well_alone_and_in_batches():
    agent = trained("test_api:nested")
    raw = {"a": {"cell": np.int64(6), "speed": np.array([0.5, -0.5], np.float32)}, "b": np.array([1, 0, 1, 1], np.int8)}
    leaves = {"a.cell": [1], "a.speed": [0.5, -0.5], "b": [1, 0, 1, 1]}
    batch = {name: np.repeat([leaf], 3, 0) for name, leaf in leaves.items()}
    assert agent.act(raw) == agent.act(leaves) and agent.act(batch).tolist() == [agent.act(raw)] * 3
    lake = trained("FrozenLake-v1", "run.name=lake")
    assert lake.act(np.array([[3], [9]])).tolist() == [lake.act(3), lake.act(9)]


@pytest.mark.parametrize(("obs", "message"), [
    (16, "counts from"), (-1, "counts from"), ("north", "cannot be read"), (0.5, "integers"),
    ({"north": 1}, "observes"), (np.zeros((2, 2, 2), int), "must be")])
def test_what_is_no_observation_is_refused(obs, message):
    agent = trained("FrozenLake-v1")
    with pytest.raises(UserError, match=message):
        agent.act(obs)


def test_an_agent_says_what_it_is_and_refuses_observations_that_are_not_finite():
    records = []
    result = api.train("CartPole-v1", [*TINY, "total_steps=100", "run.name=x"], sinks=[records.append])
    assert records and records[-1]["step"] == result.steps, "a plain function gets the records"
    agent = api.load(result.directory, which="latest")
    assert repr(api.load(result, which="latest")) == repr(agent), "a result names its run"
    assert api.evaluate(result, episodes=1).episodes == 1 and api.resume(result).already_finished
    assert repr(agent) == f"TrainedAgent(CartPole-v1, dqn, step-{result.steps:012d}, cpu)"
    for epsilon in (5, -1, float("nan"), "0.1"):
        with pytest.raises(UserError, match=r"epsilon=.* must be a probability, 0 to 1"):
            agent.act(np.zeros(4, np.float32), epsilon=epsilon)
    for bad in (np.nan, np.inf):
        with pytest.raises(UserError, match="observation 'obs' contains NaN or infinity"):
            agent.act(np.array([0, bad, 0, 0], np.float32))
        with pytest.raises(UserError, match="observation 'obs' contains NaN or infinity"):
            agent.act(np.array([[0, 0, 0, 0], [0, bad, 0, 0]], np.float32))


def test_stacked_frames_are_taken_as_the_network_sees_them():
    agent = trained("test_api:picture", "env.stack=2")
    assert agent.act(np.zeros((6, 12, 10), np.uint8)) in (0, 1)
    assert agent.act(np.zeros((4, 6, 12, 10), np.uint8)).shape == (4,)
    with pytest.raises(UserError, match=r"must be \(6, 12, 10\).*stacked"):
        agent.act(np.zeros((12, 10, 3), np.uint8))


def test_atari_agents_speak_the_words_of_the_emulator():
    agent = trained("ALE/Pong-v5", "agent.torso=mlp", "env.frame_size=16", "env.max_episode_steps=20",
                    "replay.capacity=1000")
    assert agent.interpreter is None and agent.act(np.zeros((4, 16, 16), np.uint8)) in range(18)
    assert agent.act(np.zeros((3, 4, 16, 16), np.uint8)).shape == (3,)


def test_threads_are_left_as_they_were():
    before = torch.get_num_threads()
    seen = []

    class Spy:
        def write(self, record):
            seen.append(torch.get_num_threads())

        def flush(self): ...

        def close(self): ...

    try:
        torch.set_num_threads(3)
        result = api.train("cartpole", [*TINY, "run.threads=2", "total_steps=200", "run.name=x"], sinks=[Spy()])
        assert torch.get_num_threads() == 3 and set(seen) == {2}
        api.load(result.directory)
        assert torch.get_num_threads() == 3
        told = []
        api.evaluate(result.directory, episodes=3, on_episode=told.append)
        assert torch.get_num_threads() == 3 and told[-1] >= 3
        steps = api.rollout(result.directory, render=False)
        next(steps)
        steps.close()
        api.resume(result.directory, ["total_steps=250"])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_episodes_of_evaluation_have_a_limit_of_their_own():
    lengths = []

    class Spy:
        def write(self, record):
            lengths.extend([record["eval/mean_ep_length"]] if "eval/mean_ep_length" in record else [])

        def flush(self): ...

        def close(self): ...

    result = api.train("cartpole", [*TINY, "total_steps=200", "eval.max_episode_steps=5"], sinks=[Spy()])
    assert set(lengths) == {5}
    assert max(api.evaluate(result.directory, episodes=3).lengths) > 5, "whoever asks for whole episodes gets them"


@pytest.mark.parametrize(("words", "steps"), [
    (["ALE/Pong-v5", "eval.max_episode_steps=7"], 7), (["test_api:endless", "eval.max_episode_steps=3"], 3),
    (["CartPole-v1", "env.isolate=true", "eval.max_episode_steps=4"], 4),
    (["CartPole-v1", "env.max_episode_steps=6", "eval.max_episode_steps=9"], 6),
    (["test_api:endless", "env.isolate=true", "env.unlimited_episode_steps=5"], 5),
])
def test_the_limit_of_evaluations_holds_in_every_environment(words, steps):
    config = resolve(words[0], words[1:]).config
    with closing(make_eval_env(config)) as env:
        env.reset(range(env.lanes))
        for step in range(1, steps + 1):
            env.send(np.zeros(env.lanes, np.int64))
            last = env.recv().last
            assert step == steps or not last.all()
    assert last.all()


def test_an_environment_that_never_ends_is_trained_in_and_evaluated():
    """It has no time limit, and its episodes are truncated in training and in evaluation."""
    result = api.train("test_api:endless", [*TINY, "total_steps=200", "env.unlimited_episode_steps=30"])
    assert result.exit_code == 0 and result.best == 30 and result.episodes
    assert api.evaluate(result.directory, episodes=3, trust=True).lengths == [30, 30, 30]


def test_without_any_limit_evaluation_ends_some_time(monkeypatch):
    monkeypatch.setattr("qfleet.runconfig.build.UNLIMITED_STEPS", 30)
    monkeypatch.setattr("qfleet.training.evaluation.ENDLESS_STEPS", 200)
    result = api.train("test_api:endless", [*TINY, "total_steps=200", "env.unlimited_episode_steps=null"])
    assert result.exit_code == 0 and result.best == 30 and not result.episodes


def test_without_a_gpu_evaluation_is_on_the_cpu_wherever_the_run_was_trained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cpu", "cuda", "auto"):
        assert training_device(resolve("cartpole", [f"device={name}"]).config).type == "cpu"


def test_evaluation_is_where_the_run_was_trained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, home in (("cpu", "cpu"), ("cuda:1", "cuda:1"), ("cuda:2", "cpu")):
        assert str(training_device(resolve("cartpole", [f"device={name}"]).config)) == home
    monkeypatch.undo()
    result = api.train("cartpole", [*TINY, "total_steps=100"])
    assert api.evaluate(result.directory, episodes=1).device == "cpu"


def test_nested_settings_may_extend_a_recipe():
    result = api.train({"extends": "cartpole", "run": {"name": "x"}, "total_steps": 100}, TINY)
    assert result.steps >= 100 and api.load("x").config.env.id == "CartPole-v1"


class Old(Fields):
    """Written for Gym before 0.26."""

    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


def old():
    return Old(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))


@pytest.mark.parametrize("isolate", ["false", "true"])
def test_an_environment_for_the_old_gym_is_refused_without_a_traceback(isolate, capsys):
    args = [*TINY, "total_steps=100", "run.name=x", "env.max_episode_steps=20", f"env.isolate={isolate}"]
    assert main(["train", "test_api:old", *args]) == 2
    err = capsys.readouterr().err
    assert "error: test_api:old does not implement the Gymnasium API: step must return (observation, reward, " \
           "terminated, truncated, info); it returned a tuple of 4" in err and "Traceback" not in err


@pytest.mark.parametrize(("lack", "advice"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "learner.batch_size=8 .*device=cpu"),
    (MemoryError("cannot allocate"), "replay.capacity=100000 .*env.lanes=2")])
def test_a_lack_of_memory_comes_with_advice(monkeypatch, capsys, lack, advice):
    def step(self):
        raise lack

    monkeypatch.setattr(Learner, "step", step)
    assert main(["train", "cartpole", *TINY, "total_steps=200", "run.name=x"]) == 1
    err = capsys.readouterr().err
    assert f"out of memory: {lack}" in err and re.search(advice, err) and "Traceback" not in err


@pytest.mark.parametrize(("ask", "said"), [(lambda: torch.empty(10**16), "out of memory: 40 PB could not be allocated"),
                                           (lambda: np.empty(10**16), "out of memory: Unable to allocate 71.1 PiB")])
def test_a_cpu_without_enough_memory_is_a_message_with_a_remedy(monkeypatch, capsys, ask, said):
    """torch says so by a RuntimeError, numpy by a MemoryError of its own."""
    monkeypatch.setattr(Learner, "step", lambda self: ask())
    assert main(["train", "cartpole", *TINY, "total_steps=200", "run.name=x"]) == 1
    err = capsys.readouterr().err
    assert said in err and "lower replay.capacity=100000" in err and "agent.hidden" in err
    assert "Traceback" not in err and "unexpectedly" not in err


def contents(run):
    return {path: path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


def test_a_resume_that_fails_changes_nothing():
    result = api.train("cartpole", [*TINY, "total_steps=200", "run.name=x"])
    store = Checkpoints(result.directory / "checkpoints", 9)
    found = store.newest()
    state = found.state()
    del state["learner"]  # whole by its hashes, and yet nothing to go on from
    store.save(found.manifest.step - 100, found.manifest.updates, found.policy(), state, [],
               CheckpointMeta(found.config_text, found.spec))
    for folder in store.series():
        if folder == found.path:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    before, files = contents(result.directory), len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match="does not fit this run"):
        api.resume("x", ["total_steps=400"])
    assert contents(result.directory) == before and len(os.listdir("/proc/self/fd")) <= files


def test_a_writer_that_cannot_be_had_is_missed_before_anything_is_written(monkeypatch):
    api.train("cartpole", [*TINY, "total_steps=200", "run.name=x"])
    before = contents("runs/x")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"qfleet\[wandb\]"):
        api.resume("x", ["run.wandb=true", "total_steps=400"])
    assert contents("runs/x") == before


def test_an_interrupted_exact_run_says_where_it_goes_on(capsys, monkeypatch):
    original = api.attempt.JsonlWriter.write

    def write(self, record):
        original(self, record)
        if record["step"] >= 450:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(api.attempt.JsonlWriter, "write", write)
    exact = ["run.exact_resume=true", "env.max_episode_steps=50", "checkpoint.period_steps=200", "total_steps=5000"]
    assert main(["train", "cartpole", *TINY, *exact, "run.name=x"]) == 130
    saved = Checkpoints(Path("runs/x/checkpoints"), 9).newest().manifest.step
    assert 400 <= saved < 450
    out = capsys.readouterr().out
    assert f"interrupted, resume continues from the checkpoint at step {saved}: " in out and "is saved" not in out
