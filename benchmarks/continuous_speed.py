"""HalfCheetah-v5 end to end against Stable-Baselines3's TD3 and DDPG, in one run.

    python benchmarks/continuous_speed.py [--rounds 3] [--steps 6000] [--out benchmarks/results/continuous_speed.json]

Equal work: 2 × 256 networks, batch 256, an update after every step, Adam, no evaluation, no checkpoint; one
environment, as SB3 has it, and ours with 8 lanes as well. TD3's policy moves in every second update, on both sides.
The contenders alternate, each round in a fresh process with one torch thread; steps/s after warm-up, by wall clock and
by CPU time. Needs `pip install stable-baselines3` and the extra mujoco.
"""

from __future__ import annotations

import sys
import tempfile

from side_by_side import Marks, Rate, main

LEARNING_STARTS = 1_000
WARM_UP = 2_000
PLAIN = ["agent.twin=false", "agent.smoothing=0", "agent.policy_delay=1"]


def ours(steps: int, lanes: int, *overrides: str) -> Rate:
    import qfleet

    marks = Marks()
    with tempfile.TemporaryDirectory() as root:
        qfleet.train("halfcheetah", [
            f"total_steps={steps}", "eval.period_steps=null", "eval.episodes=1", "checkpoint.period_steps=null",
            "checkpoint.replay=false", f"env.lanes={lanes}", "learner.learning_rate=1e-3",
            f"replay.min_steps={LEARNING_STARTS}", f"explore.warmup_steps={LEARNING_STARTS}", "run.threads=1",
            f"run.root={root}", "run.log_period_steps=500", "run.tensorboard=false", *overrides,
        ], sinks=[marks])
    return marks.rate(WARM_UP)


def stable_baselines3(steps: int, name: str) -> Rate:
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    marks = Marks()

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % 500 == 0:
                marks.write({"step": self.num_timesteps})
            return True

    model = getattr(stable_baselines3, name)(
        "MlpPolicy", "HalfCheetah-v5", learning_rate=1e-3, batch_size=256, buffer_size=1_000_000,
        learning_starts=LEARNING_STARTS, gamma=0.99, train_freq=1, gradient_steps=1,
        action_noise=NormalActionNoise(np.zeros(6), 0.1 * np.ones(6)), policy_kwargs={"net_arch": [256, 256]},
        device="cpu", verbose=0)
    model.learn(steps, callback=Watch())
    return marks.rate(WARM_UP)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"qfleet_td3_1_lane": lambda steps: ours(steps, 1),
                            "qfleet_td3_8_lanes": lambda steps: ours(steps, 8),
                            "stable_baselines3_td3": lambda steps: stable_baselines3(steps, "TD3"),
                            "qfleet_ddpg_1_lane": lambda steps: ours(steps, 1, *PLAIN),
                            "qfleet_ddpg_8_lanes": lambda steps: ours(steps, 8, *PLAIN),
                            "stable_baselines3_ddpg": lambda steps: stable_baselines3(steps, "DDPG")},
                  default_steps=6_000))
