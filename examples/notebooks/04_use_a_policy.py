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
# # Use a trained policy
#
# Load a policy, act with it, look at its action values, and export it for programs without qfleet.
#
# Needs `pip install '.[onnx]'` in a clone of the repository for the ONNX file; without it, TorchScript is used.

# %%
from importlib.util import find_spec

import gymnasium
import numpy as np
import torch

import qfleet

STEPS = 15_000
result = qfleet.train("CartPole-v1", total_steps=STEPS, seed=1)

# %% [markdown]
# ## Act
#
# `load` returns the best policy of a run. `act` takes an observation as the environment returns it.

# %%
agent = qfleet.load(result.directory)
env = gymnasium.make("CartPole-v1")
obs, info = env.reset(seed=0)
total, over = 0.0, False
while not over:
    obs, reward, terminated, truncated, info = env.step(agent.act(obs))
    total, over = total + float(reward), terminated or truncated
print(agent, "return", total)

# %% [markdown]
# ## Batches and action values
#
# A batch of observations gives an array of actions. `q_values` estimates the return of every action.

# %%
batch = np.stack([env.observation_space.sample() for _ in range(4)]).clip(-1, 1)
print(agent.act(batch))
print(agent.q_values(batch).round(1))

# %% [markdown]
# ## Export
#
# The file contains the network and its preprocessing, and is compared with the policy when it is written. A program
# that uses it needs only onnxruntime, neither torch nor qfleet: see `examples/serve_onnx.py`.

# %%
form = "onnx" if find_spec("onnx") and find_spec("onnxscript") and find_spec("onnxruntime") else "torchscript"
exported = agent.export(f"policy.{'onnx' if form == 'onnx' else 'pt'}")
print(exported.path, [port.name for port in exported.inputs], [port.name for port in exported.outputs])

# %%
if form == "onnx":
    import onnxruntime

    session = onnxruntime.InferenceSession(str(exported.path))
    actions, q = session.run(["action", "q"], {"obs": batch})
else:
    actions, q = (output.numpy() for output in torch.jit.load(str(exported.path))(torch.from_numpy(batch)))
print(actions, q.round(1), sep="\n")
assert (actions == agent.act(batch)).all()
