"""Names that other libraries or version 0.1 have for config keys, for messages about unknown keys."""

from __future__ import annotations

HINTS = {
    "lr": "learner.learning_rate", "batch": "learner.batch_size", "max_grad_norm": "learner.clip_norm",
    "lr_schedule": "learner.schedule", "lr_scheduler": "learner.schedule", "warmup_steps": "learner.warmup_updates",
    "target_update_interval": "learner.target_period_updates", "tau": "learner.target_tau",
    "target_network_frequency": "learner.target_period_updates",
    "n_envs": "env.lanes", "num_envs": "env.lanes", "env_id": "env.id",
    "buffer_size": "replay.capacity", "learning_starts": "replay.min_steps", "prioritized": "replay.alpha",
    "replay_ratio": "replay.samples_per_insert", "train_freq": "replay.samples_per_insert",
    "timesteps": "total_steps", "total_timesteps": "total_steps", "steps": "total_steps", "n_timesteps": "total_steps",
    "exploration_fraction": "explore.steps", "exploration_final_eps": "explore.end", "frame_stack": "env.stack",
    "eval_freq": "eval.period_steps", "n_eval_episodes": "eval.episodes", "save_freq": "checkpoint.period_steps",
}
"""Names in other libraries -> keys of this config, for the did-you-mean."""

REMOVED = {
    "agent.normalise": "was replaced in 0.2.0 by normalise.observations, for every agent",
    "learner.parts": "was removed in 0.2.0: batches are no longer split; delete it, and set run.threads=1 where "
                     "other processes keep cores busy",
    "run.share_cores": "was removed in 0.2.0; delete it, and set run.threads=1 where other processes keep cores busy",
    "placement": "was replaced in 0.2.0: placement=inline is the default (env.groups=N instead of actors=N), "
                 "placement=processes is actors=N, placement=ray is launcher=ray with actors=N",
    "gradients": "was renamed in 0.2.0: gradients=solo, allreduce or server is sync=none, allreduce or server",
    "cells": "was renamed in 0.2.0 to learners; actors=N per cell is env.groups=N",
    "server": "was renamed in 0.2.0: the section is parameter_server, and copy_period_updates in it is "
              "snapshot_period_updates",
} | {
    old: f"was renamed in 0.2.0 to {new}" for old, new in {
        "eval.beside": "eval.process", "explore.base": "explore.epsilon", "explore.alpha": "explore.steepness",
        "fleet.restarts": "fleet.learner_restarts", "fleet.max_restarts": "fleet.actor_restarts",
        "fleet.patience_s": "fleet.reconnect_timeout_s", "ray.cell_cpus": "ray.learner_cpus",
        "ray.cell_gpus": "ray.learner_gpus", "ray.cell_memory_mb": "ray.learner_memory_mb",
        "ray.cell_resources": "ray.learner_resources", "ray.cell_anywhere": "ray.learner_any_node",
    }.items()
}
"""Keys of version 0.1 -> what replaces them."""
