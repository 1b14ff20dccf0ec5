"""Metrics of your own from `info`, averaged over episodes and logged: `python custom_metric.py`."""

import sys

import gymnasium

import qfleet
from qfleet.runs.metric_writers import read_metrics


class Judge(gymnasium.Wrapper):
    """CartPole that tells how far from the middle the cart is, and whether the episode has lasted long enough."""

    def __init__(self, env, enough):
        super().__init__(env)
        self.enough, self.steps = enough, 0

    def reset(self, **options):
        self.steps = 0
        return self.env.reset(**options)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        judged = {"success": self.steps >= self.enough, "distance": abs(float(obs[0]))}
        return obs, reward, terminated, truncated, info | judged


result = qfleet.train("cartpole", total_steps=int((*sys.argv, 20_000)[1]), env={
    "wrappers": [(Judge, {"enough": 100})], "info_metrics": ["success", "mean(distance)"]})
for record in read_metrics(result.directory / "metrics.jsonl"):
    if "rollout/info/success" in record:  # the value at the end of the episode
        print(f"{record['step']:7,}  success {record['rollout/info/success']:.2f}  "
              f"distance {record['rollout/info/distance_mean']:.2f}")
print("evaluation", qfleet.evaluate(result.directory, episodes=10).info)
