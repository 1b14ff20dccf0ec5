"""Pong end to end against Stable-Baselines3: Nature CNN, batch 32, one update per 4 steps, in one run.

    python benchmarks/atari_speed.py [--rounds 3] [--steps 4000] [--out benchmarks/results/atari_speed.json]

Plain one-step DQN with uniform replay on both sides, two torch threads, no evaluation, no checkpoint. Ours steps 8
lanes of the C++ emulators; SB3 its one wrapped environment. Alternating rounds in fresh processes, steps/s after
warm-up. Needs `pip install stable-baselines3 qfleet[atari]`.
"""

from __future__ import annotations

import sys
import tempfile

from side_by_side import Marks, Rate, main

WARM_UP = 1_200


def ours(steps: int, precision: str) -> Rate:
    import qfleet

    marks = Marks()
    with tempfile.TemporaryDirectory() as root:
        qfleet.train("pong", [
            f"total_steps={steps}", "stop_at=null", "eval.period_steps=null", "checkpoint.period_steps=null",
            "env.lanes=8", "agent.double=false", "replay.min_steps=1000", "replay.capacity=10000",
            f"learner.precision={precision}", f"run.root={root}",
            "run.log_period_steps=200", "run.tensorboard=false",
        ], sinks=[marks])
    return marks.rate(WARM_UP)


def stable_baselines3(steps: int) -> Rate:
    import ale_py
    import gymnasium
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)
    torch.set_num_threads(2)
    marks = Marks()

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % 200 == 0:
                marks.write({"step": self.num_timesteps})
            return True

    env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=1, seed=0), n_stack=4)
    model = DQN("CnnPolicy", env, learning_rate=1e-4, batch_size=32, buffer_size=10_000, learning_starts=1000,
                target_update_interval=1000, train_freq=4, gradient_steps=1, device="cpu", verbose=0)
    model.learn(steps, callback=Watch())
    return marks.rate(WARM_UP)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"qfleet_bf16": lambda steps: ours(steps, "bf16"),
                            "qfleet_fp32": lambda steps: ours(steps, "fp32"),
                            "stable_baselines3": stable_baselines3}, default_steps=4_000))
