"""Step a run by hand and look inside, cell by cell as in a notebook.

    python step_by_hand.py                # 4 to 8 seconds
"""

import qfleet

# %% Create a run. Nothing is trained yet.
run = qfleet.Run("catch", seed=3, total_steps=20_000)
print(run)

# %% Train for 2,000 environment steps. Looking at a run between two steps has no effect on it.
run.step(2_000)
print(f"{run.episodes} episodes, {run.updates} updates, loss {run.metrics['train/loss']:.3f}")

# %% Sample from the replay buffer as the learner does: 4 windows of n + 1 rows.
batch = run.replay.sample(4)
print("actions", batch.rows["action"][:, 0].tolist(), "rewards", batch.rows["reward"][:, 0].tolist())

# %% Values of the three actions (left, stay, right) at the first row of each window.
agent = run.agent  # a copy of the current weights
for values in agent.q_values(batch.obs(0)["obs"].numpy()):
    print("Q", values.round(2), "-> action", values.argmax())

# %% Train until a condition holds, here the mean return of the last 100 episodes (-1 to 1).
run.until(lambda run: run.metrics["rollout/ep_rew_mean"] > 0.6)
print(f"after {run.steps:,} steps: {run.evaluate(episodes=20).mean_reward:+.2f} without exploration")

# %% The learning curve, and the end of the run: it is saved and can be resumed.
for record in run.records:
    print(f"{record['step']:7,}  {'#' * round(20 * (1 + record['rollout/ep_rew_mean']))}")
run.close()
