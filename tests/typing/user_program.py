"""A user's program, which both type checkers must accept in strict mode: `reveal_type` states the public types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

import qfleet

Reset = tuple[np.ndarray, dict[str, Any]]
Step = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class Line(gym.Env[np.ndarray, np.int64]):
    """Walk right."""

    def __init__(self, length: int = 5) -> None:
        self.length, self.at = length, 0
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> Step:
        self.at += 2 * int(action) - 1
        return np.full(1, self.at / self.length, np.float32), -1.0, self.at == self.length, False, {}


class Report(qfleet.Callback):
    """Prints evaluations and stops the run."""

    def on_evaluation(self, run: qfleet.RunControl, evaluation: qfleet.Evaluation) -> None:
        print(run.steps, evaluation.mean_reward, evaluation.is_best)
        if evaluation.mean_reward > 10:
            run.stop()

    def on_episode(self, run: qfleet.RunControl, episode: qfleet.Episode) -> None:
        print(episode.reward, episode.length)


def write(record: Mapping[str, Any]) -> None:
    print(record["env_steps"])


def main(folder: Path) -> None:
    result = qfleet.train("cartpole", ["seed=3"], total_steps=2_000, agent="c51", learner={"learning_rate": 1e-3},
                          run={"root": str(folder)}, callbacks=[Report()], sinks=[write], progress=False)
    assert_type(result, qfleet.TrainResult)
    assert_type(result.best, float | None)
    assert_type(result.score, qfleet.FinalScore | None)
    qfleet.train(env=Line, learner={"optimizer": torch.optim.NAdam, "schedule": "cosine"}, actors="auto")
    qfleet.train(env=lambda: Line(7), explore="linear", total_updates=None)
    with qfleet.Run(env=Line(), total_steps=1_000) as run:
        assert_type(run.step(500), int)
        run.until(lambda run: run.steps > 800, episodes=3)
        assert_type(run.config, qfleet.RunConfig)
        assert_type(run.directory, Path)
        assert_type(run.best, float | None)
        print(run.metrics["train/loss"], run.records[0], run.network, run.agent.act(np.zeros(1)), run.evaluate(3))
        assert_type(run.train(), qfleet.TrainResult)
    again = qfleet.Run.resume(run.directory, total_steps=2_000)
    assert_type(again.stop().steps, int)
    scores = qfleet.evaluate(result.directory, episodes=10, which="latest", on_episode=print)
    assert_type(scores, qfleet.EvalResult)
    assert_type(scores.returns, list[float])
    agent = qfleet.load(result.directory, device="cpu")
    assert_type(agent, qfleet.TrainedAgent)
    agent.reset()
    action = agent.act({"obs": np.zeros(4)}, epsilon=0.1)
    print(action, agent.spec.id, agent.config.learner.batch_size)
    for step in qfleet.rollout(str(result.directory), render=False):
        assert_type(step.reward, float)
        assert_type(step.done, bool)
    assert_type(qfleet.export(result.directory, folder / "policy"), Path)
    try:
        qfleet.resume("no-such-run", seed=3, env=Line, wrappers=[(gym.wrappers.TimeLimit, {"max_episode_steps": 9})])
    except (qfleet.UserError, qfleet.CallbackError) as error:
        print(error)
    print(qfleet.__version__)


def mistakes() -> None:
    """Each line is an error that type checkers report: an ignored error that is none would be reported, too."""
    qfleet.train("cartpole", totl_steps=3)  # type: ignore[call-arg]
    qfleet.train("cartpole", total_steps="many")  # type: ignore[arg-type]
    qfleet.train(env=3)  # type: ignore[arg-type]
    qfleet.train(env=lambda: 3)  # type: ignore[arg-type]
    qfleet.train("cartpole", sinks=[3])  # type: ignore[list-item]
    qfleet.evaluate("run", which="newest")  # type: ignore[arg-type]
    qfleet.Run("cartpole").step("10")  # type: ignore[arg-type]
    qfleet.trian("cartpole")  # type: ignore[attr-defined]
