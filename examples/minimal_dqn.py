"""DQN on CartPole, connected by hand: every object of a training run and the loop that drives them.

    python examples/minimal_dqn.py [seed] [steps]

This is what `qfleet train cartpole` does in one process, without config file, checkpoints or command line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from qfleet import envs
from qfleet.actor.actor import Actor, Recorder
from qfleet.actor.policy import Policy
from qfleet.algos import dqn
from qfleet.core.clock import RunClock, Schedule
from qfleet.core.seeds import lane_seeds, seed_for
from qfleet.explore import linear
from qfleet.learner.learner import Learner, LearnerConfig, LearnerContext
from qfleet.learner.weight_store import Mailbox
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout
from qfleet.training.evaluation import evaluate
from qfleet.training.loop import drive
from qfleet.training.meter import FunctionSink, Meter

LANES = 8  # environments that are stepped together
DEVICE = torch.device("cpu")


def print_record(record: Mapping[str, Any]) -> None:
    """One line per log period. `record` holds every metric of the period by tag."""
    print(f"step {record['step']:6d}   updates {record['updates']:5d}   episodes {record['episodes']:4d}   "
          f"return {record.get('rollout/ep_rew_mean', float('nan')):6.1f}")


class Training:
    """The parts of a run. Each is built from the parts above it."""

    def __init__(self, seed: int, explore_steps: int) -> None:
        # Clock: counts environment steps when they are taken, and updates when they are made.
        self.clock = RunClock()

        # Environment: 8 lanes of CartPole. `spec` describes observations and actions to all other parts.
        self.env = envs.make(envs.EnvConfig(id="CartPole-v1", lanes=LANES), LANES)
        spec = self.env.spec

        # Agent: the functions network, act and loss, and the window of rows that the loss needs (n + 1 for n-step DQN).
        agent_config = dqn.Config(n_step=3, double=True, hidden=(256, 256))
        self.agent = dqn.build(agent_config, spec)

        # Replay: compressed chunks of 16 steps in main memory. Its rate limiter allows 32 samples per step: with
        # batches of 64, one update every two environment steps.
        replay_config = ReplayConfig(capacity=50_000, min_steps=1_000, samples_per_insert=32, chunk_steps=16)
        layout = Layout(spec, self.agent.window, replay_config.chunk_steps)
        self.replay = HostReplay(layout, replay_config, seed_for(seed, "replay"), DEVICE, clock=self.clock)

        # Metrics: means per log period, and the mean return of the last 100 episodes.
        self.meter = Meter([FunctionSink(print_record)], self.clock.progress, spec.frames_per_step,
                           Schedule(1_000, None))

        # Learner: samples, computes loss and gradient, applies it, and publishes weights to the mailbox.
        weights = Mailbox()
        learner_config = LearnerConfig(batch_size=64, learning_rate=1e-3, precision="fp32",
                                       target_period_updates=0, target_tau=0.01)
        self.learner = Learner(self.agent, self.replay, weights, self.meter, learner_config, seed, DEVICE,
                               LearnerContext(self.clock))
        self.learner.publish()

        # Actor: fetches weights from the mailbox, chooses actions, steps the environment. The recorder cuts its
        # rows into chunks and adds them to the replay.
        explorer = linear.Linear(linear.Config(start=1.0, end=0.04, steps=explore_steps), LANES)
        recorder = Recorder(self.agent, layout, LANES, self.replay)
        policy = Policy(self.agent, seed_for(seed, "actor"), DEVICE)
        self.actor = Actor(policy, self.env, explorer, self.meter, weights, recorder, self.clock)
        self.actor.begin(lane_seeds(seed, LANES, "begin"))


def train(seed: int, steps: int) -> Training:
    """Step actor, learner and meter in turn until enough environment steps are taken."""
    training = Training(seed, explore_steps=steps // 2)
    drive([training.actor, training.learner, training.meter], stop=lambda: training.clock.steps >= steps)
    return training


def greedy_return(training: Training, seed: int, episodes: int = 20) -> float:
    """Mean return of the greedy policy with the learner's final weights."""
    policy = Policy(training.agent, seed_for(seed, "evaluator"), DEVICE)
    policy.load(training.learner.flat.state(), training.learner.updates)
    env = envs.make(envs.EnvConfig(id="CartPole-v1", lanes=LANES), LANES)
    try:
        return evaluate(policy, env, episodes, epsilon=0.0, seed=seed).mean
    finally:
        env.close()


def main(seed: int = 0, steps: int = 15_000) -> None:
    torch.set_num_threads(1)  # the network is too small to gain from more
    training = train(seed, steps)
    print(f"greedy return over 20 episodes: {greedy_return(training, seed):.1f}")
    training.env.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
