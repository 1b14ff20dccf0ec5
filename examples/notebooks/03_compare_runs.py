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
# # Compare runs
#
# Results of deep reinforcement learning differ between seeds, so a single run is not enough. This notebook compares
# one-step with three-step returns on CartPole, with three seeds each.
#
# Needs `pip install '.[plot]'` in a clone of the repository.

# %%
import matplotlib.pyplot as plt
import numpy as np

import qfleet
from qfleet.runs.metric_writers import read_metrics

STEPS = 15_000
SEEDS = (1, 2, 3)
VARIANTS = {"1 step": {"n_step": 1}, "3 steps": {"n_step": 3}}

# %% [markdown]
# ## Train
#
# All runs have the same length (`stop_at=None`) and are evaluated at the same steps.

# %%
runs = {name: [qfleet.train("CartPole-v1", seed=seed, total_steps=STEPS, stop_at=None, agent=agent,
                            eval={"period_steps": STEPS // 6, "episodes": 10})
               for seed in SEEDS] for name, agent in VARIANTS.items()}

# %% [markdown]
# ## Scores
#
# The score of a run is the mean return of its best policy over fresh episodes. The standard error over seeds shows how
# reliable the mean is.

# %%
for name, results in runs.items():
    scores = np.array([result.score.mean for result in results])
    print(f"{name:8} {scores.mean():6.1f} ± {scores.std(ddof=1) / np.sqrt(len(scores)):.1f}   {scores}")

# %% [markdown]
# ## Learning curves
#
# The line is the mean over seeds, the band the range from the worst to the best.


# %%
def evaluations(result):
    """Steps and mean returns of all evaluations of a run, [n, 2]."""
    records = read_metrics(result.directory / "metrics.jsonl")
    return np.array([(r["step"], r["eval/mean_reward"]) for r in records if "eval/mean_reward" in r])


for name, results in runs.items():
    curves = [evaluations(result) for result in results]
    steps = curves[0][:, 0]
    returns = [np.interp(steps, *curve.T) for curve in curves]
    plt.plot(steps, np.mean(returns, 0), label=name)
    plt.fill_between(steps, np.min(returns, 0), np.max(returns, 0), alpha=0.2)
plt.xlabel("environment steps")
plt.ylabel("return of evaluations")
plt.legend()
plt.show()

# %% [markdown]
# ## All runs
#
# `list_runs` finds the runs of a directory. On the command line, `qfleet plot runs/*` draws the same curves, and
# `qfleet report runs/*` writes a page with curves, scores with confidence intervals and configurations.

# %%
for run in qfleet.list_runs():
    print(run.name, run.state, run.steps, None if run.score is None else run.score.mean)
