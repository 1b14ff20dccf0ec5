# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A custom environment with its own metric
#
# Train on an environment that is defined in the notebook, and log a number that it reports in `info`.
#
# Needs `pip install '.[plot]'` in a clone of the repository.

# %%
import gymnasium
import matplotlib.pyplot as plt
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import qfleet
from qfleet.runs.metric_writers import read_metrics

STEPS = 10_000

# %% [markdown]
# ## The environment
#
# A heater keeps a room at its target temperature while the weather changes. The agent observes the deviation from the
# target and the weather, and sets the heater to off, low or high. `info["comfort"]` is true while the deviation is less
# than one degree.


# %%
class Heater(gymnasium.Env):
    """Room temperature under changing weather. Observation: deviation from the target and the weather, float32 [2]."""

    observation_space = spaces.Box(-20, 20, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.deviation, self.weather = self.np_random.uniform(-5, 5), self.np_random.uniform(-1, 0)
        return self.observe(), {}

    def step(self, action):
        self.weather = np.clip(self.weather + self.np_random.normal(0, 0.1), -1, 0)
        self.deviation += self.weather + 0.6 * int(action)
        comfort = abs(self.deviation) < 1
        return self.observe(), float(comfort), abs(self.deviation) > 10, False, {"comfort": comfort}

    def observe(self):
        return np.array([self.deviation, self.weather], np.float32)


check_env(Heater(), skip_render_check=True)

# %% [markdown]
# ## Train
#
# Pass the class itself. `info_metrics` names what to log, here the mean of `info["comfort"]` over the steps of an
# episode. To use several processes (`actors=4`), move the class to a module.

# %%
result = qfleet.train(env={"id": Heater, "max_episode_steps": 100, "info_metrics": ["mean(comfort)"]},
                      total_steps=STEPS, explore={"steps": STEPS // 4}, eval={"period_steps": STEPS // 5})
print(f"mean return {result.score.mean:.1f} of at most 100")

# %% [markdown]
# ## Plot the metric
#
# It is logged as `rollout/info/comfort_mean` during training and as `eval/info/comfort_mean` in evaluations, also for
# TensorBoard and `qfleet report`.

# %%
for kind in ("rollout", "eval"):
    tag = f"{kind}/info/comfort_mean"
    points = [(record["step"], record[tag]) for record in read_metrics(result.directory / "metrics.jsonl")
              if tag in record]
    plt.plot(*zip(*points, strict=True), label=kind)
plt.xlabel("environment steps")
plt.ylabel("share of time in comfort")
plt.legend()
plt.show()

# %% [markdown]
# ## Evaluate
#
# `info` of an evaluation has the same metrics. In another program, pass the class again:
# `qfleet.evaluate(run, env=Heater)`.

# %%
evaluation = qfleet.evaluate(result.directory, episodes=20)
print(evaluation.mean_reward, dict(evaluation.info))
