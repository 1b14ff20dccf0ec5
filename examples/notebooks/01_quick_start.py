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
# # Quick start
#
# Train DQN on CartPole, plot the learning curve, evaluate the policy and watch it play.
#
# Needs `pip install '.[video,plot]'` in a clone of the repository.

# %%
import matplotlib.pyplot as plt
from IPython.display import Image as Picture
from IPython.display import display
from PIL import Image

import qfleet
from qfleet.runs.metric_writers import read_metrics

STEPS = 20_000

# %% [markdown]
# ## Train
#
# The environment id selects a recipe, `cartpole`. Keyword arguments override its settings. Everything about the run is
# saved in `result.directory`.

# %%
result = qfleet.train("CartPole-v1", total_steps=STEPS, seed=1, progress=True)
print(result.directory, result.reason)

# %% [markdown]
# ## Plot the learning curve
#
# `metrics.jsonl` has one record per log period and per evaluation. `rollout/ep_rew_mean` is the mean return of the last
# training episodes, with exploration; `eval/mean_reward` is that of evaluations without.

# %%
records = read_metrics(result.directory / "metrics.jsonl")


def curve(tag):
    """Steps and values of a metric."""
    return zip(*[(record["step"], record[tag]) for record in records if record.get(tag) is not None], strict=True)


plt.plot(*curve("rollout/ep_rew_mean"), label="training")
plt.plot(*curve("eval/mean_reward"), "o-", label="evaluation")
plt.xlabel("environment steps")
plt.ylabel("return")
plt.legend()
plt.show()

# %% [markdown]
# ## Evaluate
#
# `result.score` is the mean return of the best policy over fresh episodes. `evaluate` plays more of them.

# %%
evaluation = qfleet.evaluate(result.directory, episodes=50)
print(f"score {result.score.mean:.1f}, 50 episodes: {evaluation.mean_reward:.1f} ± {evaluation.standard_error:.1f}")

# %% [markdown]
# ## Watch
#
# `rollout` yields every step with its rendered frame. The command `qfleet record` writes MP4 and GIF files, too.

# %%
frames = [Image.fromarray(step.frame) for step in qfleet.rollout(result.directory, seed=7)][::4]
frames[0].save("cartpole.gif", save_all=True, append_images=frames[1:], duration=80, loop=0)
display(Picture("cartpole.gif"))
