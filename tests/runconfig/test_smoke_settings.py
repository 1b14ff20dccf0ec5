"""A smoke test shortens every recipe, and changes nothing of what it is made of."""

from __future__ import annotations

import pytest

from qfleet.config import flatten
from qfleet.core.env import EnvSpec, Leaf
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.resolution import recipe_names, resolve
from qfleet.runconfig.smoke import EPISODE_STEPS, UPDATES, smoke_overrides

GENERAL = {"vector": "CartPole-v1", "pixels": "toy/Catch-v0", "atari": "ALE/Breakout-v5", "control": "Pendulum-v1",
           "control-pixels": "Pendulum-v1", "small-images": "toy/Catch-v0", "recurrent": "CartPole-v1",
           "discrete": "FrozenLake-v1"}
SIZES = ("total_", "stop_at", "actors", "env.lanes", "env.max_episode_steps", "agent.burn_in", "agent.unroll",
         "agent.stride", "replay.capacity", "replay.min_steps", "replay.chunk_steps", "replay.samples_per_insert",
         "learner.batch_size", "learner.schedule_updates",
         "learner.metrics_period_updates", "eval.", "checkpoint.period", "run.")


def shortened(name, *overrides):
    config = resolve(name, overrides).config
    return config, resolve(name, [*overrides, *smoke_overrides(config)]).config


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_shortened_and_stays_what_it_is(name):
    old, new = shortened(name, *([f"env.id={GENERAL[name]}"] if name in GENERAL else []))
    before, after = flatten(old), flatten(new)
    assert {key for key in before if before[key] != after[key] and not key.startswith(SIZES)} == set()
    updates = (new.total_steps - new.replay.min_steps) * new.replay.samples_per_insert / new.learner.batch_size
    assert new.total_steps <= 1500 and UPDATES / 2 < updates <= UPDATES + 1
    assert new.env.max_episode_steps <= EPISODE_STEPS and new.eval.episodes == 1
    assert new.eval.period_steps == new.checkpoint.period_steps == new.total_steps // 2


@pytest.mark.parametrize("overrides", [
    ["actors=8"], ["learners=4", "sync=allreduce"], ["learners=3", "sync=server", "actors=9"],
    ["agent.n_step=20", "replay.chunk_steps=32"],
    ["run.exact_resume=true", "checkpoint.period_steps=50000"], ["eval.period_updates=100"], ["eval.from_return=10"],
    ["run.log_period_updates=50"], ["total_updates=10"], ["env.groups=2", "env.lanes=32"]])
def test_topologies_and_schedules_of_every_kind_can_be_shortened(overrides):
    old, new = shortened("cartpole", *overrides)
    assert (new.learners, new.sync, bool(new.actors)) == (old.learners, old.sync, bool(old.actors))
    assert new.total_steps <= 3000


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 2, 200])
def test_a_schedule_with_warm_up_is_shortened(schedule, warmup):
    _, new = shortened("cartpole", f"learner.schedule={schedule}", f"learner.warmup_updates={warmup}")
    resolved = resolve_auto(new, EnvSpec("CartPole-v1", {"obs": Leaf((4,), "float32", "vector")}, 2))
    assert resolved.learner.schedule == schedule and resolved.learner.warmup_updates == min(warmup, UPDATES // 4)
    assert resolved.learner.schedule_updates == (UPDATES if schedule == "cosine" else None)


def test_a_smoke_test_is_not_logged_elsewhere():
    _, new = shortened("cartpole", "run.mlflow=true", "run.wandb=true")
    assert not (new.run.mlflow or new.run.wandb)


def test_sizes_of_the_planned_run_are_replaced_too():
    _, new = shortened("cartpole", "total_steps=50_000_000", "eval.period_updates=7", "env.lanes=64", "agent.n_step=5")
    assert new.total_steps < 1000 and new.env.lanes == 4 and new.agent.n_step == 5
    assert new.eval.period_updates is None and new.eval.period_steps == new.total_steps // 2
