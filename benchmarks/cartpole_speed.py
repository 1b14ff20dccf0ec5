"""CartPole end to end against Stable-Baselines3 with rl-zoo3's hyper-parameters, in one run.

    python benchmarks/cartpole_speed.py [--rounds 5] [--steps 20000] [--out benchmarks/results/cartpole_speed.json]

Equal work: 2 × 256 network, batch 64, 256 steps for 128 updates, Adam, no evaluation, no checkpoint; one environment,
as the zoo has it, and ours with 8 lanes as well.
The two libraries alternate, each round in a fresh process with one torch thread; steps/s after warm-up, by wall clock
and by CPU time. Needs `pip install stable-baselines3`.
"""

from __future__ import annotations

import sys
import tempfile

from side_by_side import Marks, Rate, main

WARM_UP = 2_000


def ours(steps: int, lanes: int) -> Rate:
    import qfleet

    marks = Marks()
    with tempfile.TemporaryDirectory() as root:
        qfleet.train("cartpole", [
            f"total_steps={steps}", "stop_at=null", "eval.period_steps=null", "checkpoint.period_steps=null",
            f"env.lanes={lanes}", "agent.n_step=1", "agent.double=false", "agent.hidden=[256,256]",
            "replay.samples_per_insert=32", "replay.min_steps=1000", "learner.batch_size=64",
            "learner.target_period_updates=128", "learner.publish_period_updates=128", "learner.learning_rate=2.3e-3",
            f"run.root={root}", "run.log_period_steps=1000", "run.tensorboard=false",
        ], sinks=[marks])
    return marks.rate(WARM_UP)


def stable_baselines3(steps: int) -> Rate:
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)
    marks = Marks()

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % 1024 == 0:
                marks.write({"step": self.num_timesteps})
            return True

    model = DQN("MlpPolicy", "CartPole-v1", learning_rate=2.3e-3, batch_size=64, buffer_size=100_000,
                learning_starts=1000, gamma=0.99, target_update_interval=10, train_freq=256, gradient_steps=128,
                exploration_fraction=0.16, exploration_final_eps=0.04, policy_kwargs={"net_arch": [256, 256]},
                device="cpu", verbose=0)
    model.learn(steps, callback=Watch())
    return marks.rate(WARM_UP)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"qfleet_1_lane": lambda steps: ours(steps, 1),
                            "qfleet_8_lanes": lambda steps: ours(steps, 8),
                            "stable_baselines3": stable_baselines3}, default_steps=20_000))
