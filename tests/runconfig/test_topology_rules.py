"""Numbers of actors and learners, how they are combined and started, and what the keys of 0.1 are called now."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfleet.config import inactive_keys
from qfleet.core.errors import UserError
from qfleet.runconfig.build import cores_per_learner
from qfleet.runconfig.launcher_traits import LauncherTraits
from qfleet.runconfig.resolution import resolve
from qfleet.runconfig.resumable import changed_on_resume
from qfleet.runconfig.run_config import RunConfig

ALLREDUCE, SERVER = ["sync=allreduce", "learners=2"], ["sync=server", "learners=2"]
EXACT = ["run.exact_resume=true", "checkpoint.period_steps=100000"]


def config(*overrides: str) -> RunConfig:
    return resolve("cartpole", overrides).config


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config(*overrides)
    return str(caught.value)


def test_a_run_of_one_process_needs_no_settings() -> None:
    plain = config()
    assert (plain.actors, plain.learners, plain.sync, plain.launcher, plain.env.groups) == (0, 1, "none", "local", 1)
    assert plain.learners_act and not plain.evaluator_process and plain.eval.process == "auto"
    for name in ("placement", "gradients", "cells", "server"):
        assert not hasattr(plain, name)


@pytest.mark.parametrize(("overrides", "lanes", "total"), [
    ([], 4, 4),
    (["env.groups=3"], 12, 12),
    (["actors=5"], 20, 20),
    (["actors=5", "env.groups=2"], 40, 40),
    (ALLREDUCE, 4, 8),
    ([*ALLREDUCE, "env.groups=3"], 12, 24),
    ([*SERVER, "env.groups=2"], 8, 16),
])
def test_lanes_of_a_learner_and_of_the_run(overrides: list[str], lanes: int, total: int) -> None:
    found = config("env.lanes=4", *overrides)
    assert (found.lanes, found.total_lanes) == (lanes, total)


@pytest.mark.parametrize("rule", ["allreduce", "server"])
def test_every_learner_acts_or_has_an_actor(rule: str) -> None:
    assert config(f"sync={rule}", "learners=3").learners_act
    assert not config(f"sync={rule}", "learners=3", "actors=3").learners_act
    told = refusal(f"sync={rule}", "learners=3", "actors=2")
    assert "actors=2 with learners=3" in told and "actors=0" in told


def test_negative_numbers_are_refused() -> None:
    assert "actors: must be at least 0" in refusal("actors=-1")
    assert "learners: must be at least 1" in refusal("learners=0")
    assert "env.groups: must be at least 1" in refusal("env.groups=0")


@pytest.mark.parametrize("overrides", [[], ["actors=4"], ["launcher=ray"]])
def test_several_learners_need_to_be_synchronised(overrides: list[str]) -> None:
    told = refusal("learners=2", *overrides)
    assert "learners=2" in told and "sync=allreduce" in told and "sync=server" in told


@pytest.mark.parametrize("rule", ["allreduce", "server"])
def test_one_learner_may_be_synchronised_with_nobody(rule: str) -> None:
    assert config(f"sync={rule}").learners == 1


def test_sections_of_another_kind_of_synchronisation_have_no_effect() -> None:
    assert "parameter_server.shards" in inactive_keys(config(*ALLREDUCE))
    assert "allreduce.batch" in inactive_keys(config(*SERVER))
    assert {"parameter_server.shards", "allreduce.batch", "ray.learner_cpus"} <= set(inactive_keys(config()))
    assert "unless sync=server" in refusal(*ALLREDUCE, "parameter_server.snapshot_period_updates=10")


@pytest.mark.parametrize("overrides", [["actors=1"], ["actors=4"], ALLREDUCE, SERVER, ["sync=server"],
                                       ["launcher=ray", "actors=1"]])
def test_a_run_of_several_processes_evaluates_in_a_separate_one(overrides: list[str]) -> None:
    assert config(*overrides).evaluator_process
    assert config(*overrides, "eval.process=true").evaluator_process
    told = refusal(*overrides, "eval.process=false")
    assert "eval.process=false" in told and "actors=0" in told


def test_one_process_evaluates_as_it_is_told() -> None:
    assert not config("eval.process=false").evaluator_process
    assert config("eval.process=true").evaluator_process
    assert not config("eval.process=auto", "env.groups=3").evaluator_process
    assert "eval.process" in refusal("eval.process=maybe")


@pytest.mark.parametrize(("overrides", "given"), [
    (["actors=2"], "actors=2"), (["launcher=ray"], "launcher=ray"), (["sync=allreduce"], "sync=allreduce"),
    (["sync=server"], "sync=server"), (["eval.process=true"], "eval.process=true"), (["device=cuda"], "device=cuda"),
])
def test_only_one_process_on_the_cpu_resumes_exactly(overrides: list[str], given: str) -> None:
    told = refusal(*EXACT, *overrides)
    assert "run.exact_resume=true" in told and given in told


def test_groups_do_not_prevent_an_exact_resume() -> None:
    assert config(*EXACT, "env.groups=2", "eval.process=auto").run.exact_resume
    assert config(*EXACT, "eval.process=false").run.exact_resume


def test_only_a_cluster_says_how_many_actors_fit() -> None:
    assert "launcher=ray" in refusal("actors=auto")
    found = config("launcher=ray", "actors=auto")
    assert found.actors >= 1 and found.ray.elastic
    assert "learners=2" in refusal("launcher=ray", *ALLREDUCE, "actors=auto")


def test_the_topology_may_change_on_resume_and_the_synchronisation_may_not() -> None:
    old = config()
    changes = changed_on_resume(old, config("actors=4", "env.groups=2", "eval.process=true"))
    assert {change.key for change in changes} == {"actors", "env.groups", "eval.process"}
    assert [change.key for change in changed_on_resume(old, config("launcher=ray"))] == ["launcher"]
    changes = changed_on_resume(config(*ALLREDUCE), config("sync=allreduce", "learners=4", "env.groups=2"))
    assert {change.key for change in changes} == {"env.groups", "learners"}
    with pytest.raises(UserError, match="sync: is allreduce"):
        changed_on_resume(old, config("sync=allreduce"))


OLD = [
    ("placement=inline", "actors"), ("placement=processes", "actors"), ("placement=ray", "launcher"),
    ("gradients=solo", "sync"), ("gradients=allreduce", "sync"), ("gradients=server", "sync"),
    ("cells=2", "learners"), ("eval.beside=true", "eval.process"),
    ("server.shards=2", "parameter_server"), ("server.max_staleness=4", "parameter_server"),
    ("server.copy_period_updates=10", "snapshot_period_updates"),
    ("fleet.restarts=2", "fleet.learner_restarts"), ("fleet.max_restarts=2", "fleet.actor_restarts"),
    ("fleet.patience_s=5", "fleet.reconnect_timeout_s"),
    ("ray.cell_cpus=2", "ray.learner_cpus"), ("ray.cell_gpus=1", "ray.learner_gpus"),
    ("ray.cell_memory_mb=100", "ray.learner_memory_mb"), ("ray.cell_resources={a: 1}", "ray.learner_resources"),
    ("ray.cell_anywhere=true", "ray.learner_any_node"),
]


@pytest.mark.parametrize(("old", "new"), OLD, ids=[old for old, _ in OLD])
def test_a_key_of_0_1_is_refused_and_the_new_one_named(old: str, new: str) -> None:
    told, key = refusal(old), old.partition("=")[0].removesuffix(".shards").removesuffix(".max_staleness")
    key = key.removesuffix(".copy_period_updates")
    assert any(f" {key}: " in line and new in line.partition(": was ")[2] for line in told.splitlines()), told
    assert "unknown key; there are" not in told, "a list of all keys is no answer"


@pytest.mark.parametrize(("old", "new"), [("explore.base=0.5", "explore.epsilon"),
                                          ("explore.alpha=3", "explore.steepness")])
def test_the_old_keys_of_the_ladder_are_refused_and_the_new_ones_named(old: str, new: str) -> None:
    told = refusal("explore.kind=ladder", old)
    assert new in told and "unknown key; there are" not in told


def test_all_old_keys_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("extends: cartpole\nplacement: processes\nactors: 2\ngradients: solo\n"
                                       "eval: {beside: true}\nserver: {shards: 2}\nfleet: {restarts: 1}\n")
    with pytest.raises(UserError) as caught:
        resolve(str(tmp_path / "old.yaml"))
    told = str(caught.value)
    for new in ("launcher", "sync", "eval.process", "parameter_server", "fleet.learner_restarts"):
        assert new in told
    assert str(tmp_path / "old.yaml") in told


def test_a_launcher_of_a_cluster_reserves_cores_and_one_of_this_host_none() -> None:
    assert config().launcher_traits == LauncherTraits()
    ray = ["launcher=ray", "ray.learner_cpus=3.5", "ray.learner_any_node=true"]
    assert config(*ray).launcher_traits == LauncherTraits("ray", 3, learner_elsewhere=True)
    assert config("launcher=ray", "actors=auto").launcher_traits == LauncherTraits("ray", 1, elastic=True)
    assert cores_per_learner(config(*ray)) == 3
