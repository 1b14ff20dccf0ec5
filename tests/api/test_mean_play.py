"""A noisy agent explores by its noise; evaluations, films and loaded agents play what it has learnt, the mean."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import numpy as np
import pytest
import torch

from qfleet import api
from qfleet.actor.policy import Policy
from qfleet.core.clock import Progress
from qfleet.explore import constant
from qfleet.learner.weight_store import Mailbox
from qfleet.networks.noisy import Noise
from qfleet.report import eval_video
from qfleet.report.eval_video import EvalVideoRecorder
from qfleet.runconfig.build import make_agent, make_env
from qfleet.runconfig.resolution import resolve
from qfleet.training.evaluation import EvalConfig, Evaluator, EvaluatorHooks, evaluate

NOISY = ["agent.noisy=true", "agent.noisy_sigma=5", "explore.kind=constant", "explore.epsilon=0", "eval.video_period=1"]
TINY = ["agent.hidden=[16]", "env.lanes=2", "replay.chunk_steps=8", "replay.min_steps=64", "learner.batch_size=8",
        "replay.samples_per_insert=4", "eval.episodes=2", "run.tensorboard=false", "run.threads=1", "stop_at=null",
        "total_steps=200", "eval.period_steps=100", "eval.video_period=0"]


@pytest.fixture
def drawn(monkeypatch):
    """How often a network drew noise."""
    count, draw = [], Noise.draw
    monkeypatch.setattr(Noise, "draw", lambda self, size, x: count.append(size) or draw(self, size, x))
    return count


@pytest.fixture(params=["dqn", "iqn"])
def played(request):
    """A noisy agent's policy that keeps the arms it is given, with its config, and Catch to play."""
    config = resolve("catch", [*NOISY, f"agent.algo={request.param}"]).config
    with closing(make_env(config.env, 2)) as env:
        agent, arms = make_agent(config, env.spec), []

        def act(net, obs, memory, arm, rng):
            arms.append(arm.network_noise)
            return agent.act(net, obs, memory, arm, rng)

        yield config, env, Policy(dataclasses.replace(agent, act=act), 0, torch.device("cpu")), arms


def test_an_evaluator_plays_the_mean(played, drawn):
    _, env, policy, arms = played
    weights, scores = Mailbox(), []
    weights.publish(policy.flat.state(), 1)
    hooks = EvaluatorHooks(lambda: Progress(10, 1), lambda score, state: scores.append(score))
    judge = Evaluator(policy, env, weights, EvalConfig(episodes=4, epsilon=0.0), 1, hooks)
    judge.evaluate()
    assert len(scores) == 1 and set(arms) == {False} and not drawn


def test_a_film_shows_the_mean(played, drawn, tmp_path, monkeypatch):
    config, _, policy, arms = played
    pictures = []
    monkeypatch.setattr(eval_video, "write_mp4", lambda frames, path: pictures.extend(frames))
    EvalVideoRecorder(config, tmp_path).record(policy, 0, 100, lambda: False)
    assert pictures and set(arms) == {False} and not drawn


def test_exploring_draws_noise(played, drawn):
    """What the tests above would see, if evaluation explored."""
    config, env, policy, arms = played
    evaluate(policy, env, 2, 0.0, 1, explorer=constant.build(config.explore, env.lanes, 0, 1))
    assert set(arms) == {True} and drawn


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_loaded_agent_plays_the_mean(tmp_path, monkeypatch, drawn):
    monkeypatch.chdir(tmp_path)
    run = api.train("catch", [*NOISY, *TINY])
    assert drawn, "the run itself explored"
    drawn.clear()
    agent = api.load(run.directory, which="latest")
    agent.act({name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in agent.spec.observation.items()})
    api.evaluate(run.directory, episodes=2, which="latest")
    list(api.rollout(run.directory, which="latest"))
    assert not drawn
