"""The config of a run: recipes, files, environment ids, contradictions, and what may change on resume."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from qfleet.config import flatten, parse_mapping, plugin_names, to_yaml, validate
from qfleet.core.env import Box, EnvSpec, Leaf
from qfleet.core.errors import EnvFault, UserError
from qfleet.envs import isolated
from qfleet.networks.torsos import nature
from qfleet.runconfig import describe, resolution, resumable
from qfleet.runconfig.resolution import resolve
from qfleet.runconfig.resumable import RESUMABLE
from qfleet.runconfig.run_config import RunConfig

GENERIC = {"vector": "CartPole-v1", "pixels": "ALE/Pong-v5", "atari": "ALE/Pong-v5", "control": "Pendulum-v1",
           "control-pixels": "x:Y", "small-images": "x:Y", "recurrent": "CartPole-v1",
           "discrete": "Taxi-v4"}


def lines(name: str, *overrides: str, file: Path | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolve(name, overrides, file)
    return str(caught.value).splitlines()


def with_id(name: str) -> list[str]:
    return [f"env.id={GENERIC[name]}"] if name in GENERIC else []


@pytest.mark.parametrize("name", resolution.recipe_names())
def test_every_recipe_resolves_and_survives_the_round_trip(name: str) -> None:
    resolved = resolve(name, with_id(name))
    assert validate(RunConfig, parse_mapping(to_yaml(resolved.config), "f")) == resolved.config
    assert set(resolved.provenance) == set(flatten(resolved.config))
    assert resolved.config.eval.period_steps and resolved.config.checkpoint.period_steps


def test_recipes_are_listed_with_one_line_each() -> None:
    listed = dict(resolution.list_recipes())
    assert {"cartpole", "pong", "atari", "apex", "catch", "vector", "pixels"} <= set(listed)
    assert all(text and "\n" not in text and len(text) < 120 for text in listed.values())


def test_every_key_has_its_line_of_documentation() -> None:
    rows = describe.explain(resolve("apex")) + describe.explain(resolve("cartpole"))
    assert [row.key for row in rows if not row.description] == []


def test_layers_and_where_values_come_from(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("learner: {learning_rate: 1e-3}\nseed: 7\n")
    got = resolve("pong", ["seed=9"], tmp_path / "mine.yaml")
    source = got.provenance
    assert (got.config.seed, got.config.learner.learning_rate, got.config.replay.min_steps) == (9, 1e-3, 10_000)
    assert source["seed"] == "command line" and source["learner.learning_rate"] == str(tmp_path / "mine.yaml")
    assert source["replay.min_steps"] == "recipe pong" and source["learner.optimizer_eps"] == "recipe pixels"
    assert source["replay.chunk_steps"] == "default"


def test_names_that_users_type() -> None:
    typed = ("seed=3 device=cpu total_steps=1e5 total_updates=5e3 stop_at=400 run.root=out run.name=x init_from=runs/a "
             "env.id=CartPole-v1 env.lanes=4 agent.gamma=0.98 agent.n_step=3 agent.double=false agent.dueling=true "
             "replay.capacity=5e4 replay.max_bytes=1e9 replay.min_steps=500 replay.samples_per_insert=8 "
             "learner.batch_size=32 learner.learning_rate=3e-4 learner.target_period_updates=100 "
             "learner.publish_period_updates=2 "
             "eval.period_updates=500 eval.episodes=5 checkpoint.period_updates=1000 launcher=local "
             "run.exact_resume=false env.protocol=null")
    config = resolve("cartpole", typed.split()).config
    assert (config.total_steps, config.eval.period_updates, config.eval.period_steps) == (100_000, 500, None)
    assert config.checkpoint.period_steps is None and config.agent.model_dump()["n_step"] == 3


BAD = [
    (["learner.lerning_rate=0.1"],
     "command line: learner.lerning_rate: unknown key; did you mean learner.learning_rate?"),
    (["agent.learning_rate=0.1"],
     "command line: agent.learning_rate: unknown key; did you mean learner.learning_rate?"),
    (["lr=0.1"], "command line: lr: unknown key; did you mean learner.learning_rate?"),
    (["buffer_size=10"], "command line: buffer_size: unknown key; did you mean replay.capacity?"),
    (["total_timesteps=10"], "command line: total_timesteps: unknown key; did you mean total_steps?"),
    (["learner.batch_size=many"],
     "command line: learner.batch_size: must be a whole number (got 'many'); in recipe vector it is 64"),
    (["learner.target_period_updates=-1"],
     "command line: learner.target_period_updates: must be at least 0 (got -1); in recipe cartpole it is 0"),
    (["explore.end=1.5"], "command line: explore.end: must be at most 1 (got 1.5); in recipe cartpole it is 0.04"),
    (["learner.learning_rate=.nan"], "command line: learner.learning_rate: must be a finite number (got nan); "
                                     "in recipe cartpole it is 0.001"),
    (["agent.double=yes"], "command line: agent.double: true or false is needed (got 'yes'); the default is true"),
    (["device=gpu"], "command line: device: must be auto, cpu, cuda or cuda:N (got 'gpu'); the default is 'auto'"),
    (["seed=1e12"], "command line: seed: must be at most 2147483647 (got 1000000000000); the default is 1"),
    (["env=CartPole-v1"], "command line: env: must be a section (a mapping of keys) (got 'CartPole-v1')"),
    (["agent.algo=dqnn"], f"command line: agent.algo: 'dqnn' is not one of {', '.join(plugin_names('qfleet.algos'))}, "
                          "or module:attribute; did you mean dqn?"),
    (["agent.algo=TD3"], f"command line: agent.algo: 'TD3' is not one of {', '.join(plugin_names('qfleet.algos'))}, "
                         "or module:attribute; use agent.algo=ddpg with agent.twin, agent.smoothing and "
                         "agent.policy_delay, as in the recipe control"),
    (["launcher=cluster"],
     "command line: launcher: 'cluster' is not one of local, ray, or module:attribute"),
    (["agent.n_step=100"], "command line and recipe vector: a look-ahead of 100 steps (agent.n_step) is longer "
                           "than replay.chunk_steps=16: lower agent.n_step or raise replay.chunk_steps"),
    (["learner.batch_size=600", "replay.capacity=512", "replay.min_steps=600"],
     "command line: learner.batch_size=600 exceeds replay.capacity=512: raise the capacity or lower the batch size"),
    (["replay.min_steps=32"], "command line and recipe vector: replay.min_steps=32 is below learner.batch_size=64: "
                              "raise min_steps, so that there is enough data for the first batch"),
    (["total_steps=1000"], "command line and recipe vector: total_steps=1000 ends before learning begins, "
                           "replay.min_steps=1000: raise total_steps or lower min_steps"),
    (["eval.period_steps=10", "eval.period_updates=10"],
     "command line: eval.period_steps=10 and eval.period_updates=10 are both set: set one of them to null"),
    (["eval.period_steps=null"],
     "recipe cartpole and command line: stop_at=475 is checked against evaluations, and there are none: "
     "set eval.period_steps, or stop_at=null"),
    (["callbacks=5"],
     "command line: callbacks: must be a list, such as [my_module:Success] (got 5); the default is ()"),
    (["env.info_metrics=3"], "command line: env.info_metrics: must be a list, such as [success] (got 3)"),
    (["learner.learning_rate=object:dae6fc-3:lambda"], "command line: learner.learning_rate: must be a number (got "
     "'lambda'); use learner.schedule for a rate that changes"),
    (["learner.target_period_updates=9", "learner.target_tau=0.01"],
     "command line: learner.target_tau: has no effect unless learner.target_period_updates=0; remove it, or "
     "change that"),
    (["run.exact_resume=true", "checkpoint.period_steps=4000"],
     "command line and recipe vector: run.exact_resume=true truncates every episode at a checkpoint, here after 500 "
     "steps per lane, which is short for an episode: set checkpoint.period_steps to at least 8000 (1000 per "
     "lane, env.lanes=8)"),
    (["run.exact_resume=true", "checkpoint.period_steps=0"],
     "command line: run.exact_resume=true needs scheduled checkpoints: set checkpoint.period_steps"),
    (["run.exact_resume=true", "checkpoint.replay=false"],
     "command line: run.exact_resume=true with checkpoint.replay=false: the replay must be saved, too; "
     "set checkpoint.replay=true"),
    (["run.exact_resume=true", "device=cuda"],
     "command line: run.exact_resume=true with device=cuda: only the CPU is exact; set device=cpu"),
    (["run.exact_resume=true", "checkpoint.period_steps=100000", "eval.process=true"],
     "command line: run.exact_resume=true with eval.process=true: the time at which its results arrive is not "
     "deterministic, nor is the end of the run; set eval.process=false"),
    (["actors=2", "eval.process=false"],
     "command line: eval.process=false needs a run with one learner that also acts: leave it out, or set actors=0 "
     "learners=1, without sync=server"),
    (["eval.process=true", "fleet.learner_restarts=3"],
     "command line: fleet.learner_restarts: has no effect with actors=0 and one learner: this process trains; remove "
     "it, or change that"),
    (["device=cpu", "learner.capture=true"],
     "command line: learner.capture: has no effect with device=cpu: it captures updates as CUDA graphs; remove "
     "it, or change that"),
    (["explore.kind=linear", "explore.start=0", "explore.end=0"],
     "command line: explore.kind=linear takes no random actions, and agent.noisy=false adds no noise: there would "
     "be no exploration; raise explore.start, or set agent.noisy=true"),
    (["learner.parts=2"],
     "command line: learner.parts: was removed in 0.2.0: batches are no longer split; delete it, and set "
     "run.threads=1 where other processes keep cores busy"),
    (["run.share_cores=false"],
     "command line: run.share_cores: was removed in 0.2.0; delete it, and set run.threads=1 where other processes keep "
     "cores busy"),
]


def test_checkpoints_of_older_versions_are_read_without_what_was_removed() -> None:
    old = parse_mapping(to_yaml(resolve("cartpole", ["device=cpu"]).config), "config.yaml")
    old["learner"] |= {"capture": True, "parts": 1}
    old["run"] |= {"share_cores": False}
    with pytest.raises(UserError) as caught:
        validate(RunConfig, old)
    assert {line.split(": ")[1] for line in str(caught.value).splitlines()} == {
        "learner.capture", "learner.parts", "run.share_cores"}
    assert validate(RunConfig, resolution.playable(old)).env.id == "CartPole-v1"


def test_an_agent_of_0_1_is_played_whatever_its_topology_was() -> None:
    saved = parse_mapping(to_yaml(resolve("cartpole", ["device=cpu"]).config), "config.yaml")
    old = {key: value for key, value in saved.items() if key not in ("actors", "learners", "sync", "launcher")}
    old |= {"placement": "ray", "gradients": "server", "cells": 3, "actors": 4, "server": {"copy_period_updates": 10},
            "fleet": {"patience_s": 5.0}, "ray": {"cell_cpus": 2.0},
            "explore": {"kind": "ladder", "base": 0.4, "alpha": 7.0}, "eval": old["eval"] | {"beside": False}}
    played = validate(RunConfig, resolution.playable(old))
    assert (played.env.id, played.actors, played.sync, played.explore.kind) == ("CartPole-v1", 0, "none", "ladder")


@pytest.mark.parametrize(("overrides", "line"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_bad_input_is_refused_in_plain_words(overrides: list[str], line: str) -> None:
    assert line in lines("cartpole", *overrides)


def test_bad_input_is_told_all_at_once() -> None:
    told = lines("cartpole", "lr=3", "agent.gamma=2", "agent.n_step=100", "eval.period_steps=null",
                 "replay.beta_start=0.5", "explore.stop=3")
    assert [line.removeprefix("command line: ").split(":")[0] for line in told] == [
        "agent.gamma", "explore.stop", "lr", "command line and recipe vector",
        "recipe cartpole and command line", "replay.beta_start"]


def test_exact_resume_with_short_episodes_may_save_often() -> None:
    overrides = ["run.exact_resume=true", "env.lanes=2", "env.max_episode_steps=50"]
    assert resolve("cartpole", [*overrides, "checkpoint.period_steps=200"]).config.run.exact_resume
    assert "at least 200 (100 per lane" in lines("cartpole", *overrides, "checkpoint.period_steps=199")[0]
    # 32 samples per step and batches of 64: two steps per update
    assert resolve("cartpole", [*overrides, "checkpoint.period_updates=100"]).config.checkpoint.period_updates == 100
    assert "here after 99 steps" in lines("cartpole", *overrides, "checkpoint.period_updates=99")[0]


def test_turning_prioritisation_off_needs_one_word_only() -> None:
    resolved = resolve("apex", ["replay.alpha=0"])
    row = next(row for row in describe.explain(resolved) if row.key == "replay.beta_end")
    assert (row.value, row.source, row.active) == (1.0, "default", False) and "replay.alpha=0" in row.idle
    assert "replay.beta_start" in lines("apex", "replay.alpha=0", "replay.beta_start=0.3")[0]


def test_changing_the_kind_of_exploration_drops_the_settings_of_the_other() -> None:
    assert resolve("cartpole", ["explore.kind=ladder"]).config.explore.model_dump()["epsilon"] == 0.4


@pytest.mark.parametrize(("env_id", "name"), [
    ("ALE/Pong-v5", "atari"), ("PongNoFrameskip-v4", "atari"), ("BreakoutNoFrameskip-v0", "atari"),
    ("CartPole-v1", "cartpole"), ("toy/Catch-v0", "catch"), ("Acrobot-v1", None), ("my_env:Thing", None)])
def test_the_recipe_that_an_id_suggests(env_id: str, name: str | None) -> None:
    assert resolution.recipe_for(env_id) == name


def test_the_recipe_that_observations_suggest() -> None:
    image = Leaf((3, 40, 40), "uint8", "image")
    vector = Leaf((4,), "float32", "vector")
    assert resolution.recipe_for("x:Y", EnvSpec("x:Y", {"a": vector, "b": image}, 2)) == "pixels"
    box = Box((1,), (0.0,), (1.0,))
    assert resolution.recipe_for("x:Y", EnvSpec("x:Y", {"a": vector}, 0, box=box)) == "control"
    assert resolution.recipe_for("x:Y", EnvSpec("x:Y", {"a": vector, "b": image}, 0, box=box)) == "control-pixels"
    assert resolution.recipe_for("x:Y", EnvSpec("x:Y", {"a": vector}, 2)) == "vector"


@pytest.mark.parametrize(("leaf", "recipe"), [
    (Leaf((4, 10, 10), "uint8", "image", largest=1.0), "small-images"),
    (Leaf((3, 7, 7), "uint8", "image", symbols=16), "small-images"),
    (Leaf((3, 35, 35), "uint8", "image"), "small-images"), (Leaf((3, 36, 36), "uint8", "image"), "pixels"),
    (Leaf((4, 64, 64), "float32", "image"), "small-images"), (Leaf((4, 65, 65), "float32", "image"), "pixels")])
def test_boards_planes_and_small_pictures_have_a_recipe_of_their_own(leaf, recipe) -> None:
    assert resolution.recipe_for("x:Y", EnvSpec("x:Y", {"a": leaf}, 2)) == recipe
    spec = EnvSpec("x:Y", {"a": leaf, "b": Leaf((3, 84, 84), "uint8", "image")}, 2)
    assert resolution.recipe_for("x:Y", spec) == "pixels", "one large picture decides"
    assert nature.SMALLEST == resolution.LARGE_PICTURE


def test_another_environment_under_the_recipe_of_one_is_pointed_to_its_own() -> None:
    assert not resolve("cartpole", ["env.id=CartPole-v0"]).note
    assert not resolve("vector", ["env.id=Acrobot-v1"]).note
    resolved = resolve("cartpole", ["env.id=Acrobot-v1"])
    assert resolved.config.env.id == "Acrobot-v1" and "qfleet train Acrobot-v1" in resolved.note


ENV = """
import gymnasium as gym, numpy as np
class Dark(gym.Env):
    action_space = gym.spaces.Discrete(2)
    def __init__(self, pixels=False, render_mode=None):
        picture, vector = gym.spaces.Box(0, 255, (40, 40, 3), np.uint8), gym.spaces.Box(-1, 1, (3,))
        self.observation_space = picture if pixels else vector
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample() * 0, {}
    def step(self, action):
        return self.observation_space.sample() * 0, 0.0, False, False, {}
"""


def test_environments_without_a_recipe_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dark_room.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    quiet = "env.max_episode_steps=10"
    plain = resolve("dark_room:Dark", [quiet])
    assert plain.config.agent.model_dump()["hidden"] == (256, 256) and plain.provenance["env.id"] == "command line"
    assert resolve("dark_room:Dark", [quiet, "env.kwargs.pixels=true"]).provenance["env.stack"] == "recipe pixels"
    assert resolve("Acrobot-v1").provenance["learner.learning_rate"] == "recipe vector"
    assert "env.lans: unknown key; did you mean env.lanes?" in lines("dark_room:Dark", quiet, "env.lans=3")[0]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_isolated_environment_is_looked_at_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far_room.py").write_text(f"{ENV}\nimport os\nopen('builder', 'w').write(str(os.getpid()))\n")
    (tmp_path / "stuck_room.py").write_text(f"{ENV}\nDark.__init__ = lambda self: __import__('time').sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    isolate_it = ["env.isolate=true", "env.max_episode_steps=10"]
    assert resolve("far_room:Dark", [*isolate_it, "env.kwargs.pixels=true"]).provenance["env.stack"] == "recipe pixels"
    assert int((tmp_path / "builder").read_text()) != os.getpid() and "far_room" not in sys.modules
    monkeypatch.setattr(isolated, "START_TIMEOUT_S", 3.0)
    with pytest.raises(EnvFault, match="did not answer within 3 s"):
        resolve("stuck_room:Dark", isolate_it)


def test_names_that_mean_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    told = lines("carpole")[0]
    assert "'carpole' is not a recipe, YAML file or environment id; did you mean cartpole or hidden-cartpole? " in told
    assert lines("none.yaml") == ["none.yaml: there is no such file"]
    assert lines("folder.yaml", file=tmp_path / "x.yaml") == ["folder.yaml: there is no such file"]
    assert "'folder' is a directory; name a recipe" in lines("folder")[0]
    assert "'folder/inner' is a directory; name a recipe" in lines("folder/inner")[0]
    assert "is not a recipe" in lines("")[0]
    assert "Acrobot-v1" in lines("Acrobt-v1")[0]
    assert lines("vector") == ["recipe vector: env.id: is required; set env.id=… "
                               "(environment: a Gymnasium id, module:Id or module:callable)"]


def test_recipe_names_are_forgiving_and_win_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cartpole").write_text("not yaml at all")
    assert resolve("cartpole").config == resolve("CartPole").config


def test_user_files_extend_recipes_and_each_other(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: cartpole\nseed: 5\nreplay: {min_steps: 2e3}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text("description: mine\nextends: ../base.yaml\nseed: 6\n")
    got = resolve(str(tmp_path / "sub" / "mine.yaml"))
    assert (got.config.seed, got.config.replay.min_steps, got.config.env.id) == (6, 2000, "CartPole-v1")
    assert got.provenance["replay.min_steps"] == "../base.yaml" and got.provenance["env.id"] == "recipe cartpole"


def test_nested_settings_are_as_good_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("extends: cartpole\nseed: 5\n")
    settings = {"description": "mine", "extends": "base.yaml", "agent": {"hidden": [32]}}
    Path("mine.yaml").write_text("description: mine\nextends: base.yaml\nagent: {hidden: [32]}\n")
    for overrides in ([], ["seed=7", "agent.n_step=3"]):
        got, file = resolve(settings, overrides), resolve("mine.yaml", overrides)
        assert got.config == file.config and got.config.env.id == "CartPole-v1"
        assert got.provenance == {key: source.replace("mine.yaml", "config") for key, source in file.provenance.items()}
    assert settings == {"description": "mine", "extends": "base.yaml", "agent": {"hidden": [32]}}, "left as it was"
    with pytest.raises(UserError, match=r"config: agent.hiden: unknown key; did you mean agent.hidden"):
        resolve({"extends": "cartpole", "agent": {"hiden": [3]}})
    with pytest.raises(UserError, match=r"config: env.id: is required"):
        resolve({"seed": 1})


@pytest.mark.parametrize(("text", "message"), [
    ("extends: me.yaml\n", "me.yaml: extends itself"),
    ("extends: carpole\n", "me.yaml: extends: 'carpole' is not a recipe"),
    ("extends: [a]\n", "extends: must name one recipe or file (got ['a'])"),
    ("description: 3\n", "description: must be text (got 3)"),
    ("suits: x\n", "suits: must be a list of patterns"),
    ("", "me.yaml: is empty"),
    ("seed: 1\nseed: 2\n", "me.yaml:2: 'seed' is given twice"),
    ("seed: 1\n", "env.id: is required"),
    ("env: {id: CartPole-v1}\nlearner:\n", "learner: must be a section (a mapping of keys) (got null)"),
])
def test_user_files_that_cannot_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me.yaml").write_text(text)
    assert message in lines("me.yaml")[0]


def test_a_saved_config_can_be_resolved_again_under_new_overrides(tmp_path: Path) -> None:
    first = resolve("pong", ["seed=4"])
    (tmp_path / "config.yaml").write_text(to_yaml(first.config))
    again = resolve(str(tmp_path / "config.yaml"), ["eval.period_updates=100"]).config
    assert [change.key for change in describe.diff(first.config, again)] == ["eval.period_steps", "eval.period_updates"]


def test_diff_names_both_values() -> None:
    assert describe.diff(resolve("pong").config, resolve("pong", ["seed=2"]).config) == [
        describe.Difference("seed", 1, 2)
    ]
    kinds = describe.diff(resolve("pong").config, resolve("pong", ["explore.kind=ladder"]).config)
    assert describe.Difference("explore.epsilon", None, 0.4) in kinds


def test_the_json_schema_knows_every_kind() -> None:
    schema = json.loads(json.dumps(describe.schema()))
    assert "dqn" in [kind["title"] for kind in schema["properties"]["agent"]["anyOf"]]
    assert {"ladder", "linear"} <= {kind["title"] for kind in schema["properties"]["explore"]["anyOf"]}
    assert schema["additionalProperties"] is False and schema["required"] == ["env"]


def test_the_json_schema_knows_torsos_and_leaves_room_for_ones_own() -> None:
    properties = describe.schema()["properties"]
    torso = properties["agent"]["anyOf"][0]["properties"]["torso"]
    assert torso["anyOf"][0]["enum"] == ["auto", "efficient", "impala", "minatar", "mlp", "nature", "small"]
    assert torso["default"] == "auto"
    for section, key in (("agent", "algo"), ("explore", "kind")):
        mine = properties[section]["anyOf"][-1]
        assert mine["title"] == "module:attribute" and mine["required"] == [key]
        for pattern in (mine["properties"][key]["pattern"], torso["anyOf"][1]["pattern"]):
            assert re.match(pattern, "my_module:Nest.thing") and not re.match(pattern, "dqn")


def test_a_torso_is_found_by_name_before_anything_is_built() -> None:
    assert lines("pong", "agent.torso=natur") == [
        "command line: agent.torso: 'natur' is not one of auto, efficient, impala, minatar, mlp, nature, small, or "
        "module:attribute; did you mean nature?"]
    assert "or module:attribute" in lines("pong", "agent.torso=resnet")[0]
    assert "write module:attribute" in lines("pong", "agent.torso='my_nets:'")[0]
    assert "must be text" in lines("pong", "agent.torso=3")[0]
    for name in ("auto", "small", "my_nets:residual"):
        assert resolve("pong", [f"agent.torso={name}"]).config.agent.torso == name


def test_what_may_change_on_resume() -> None:
    old = resolve("cartpole").config
    assert set(flatten(old)) >= RESUMABLE and not {"run.root", "run.name", "run.exact_resume", "seed"} & RESUMABLE
    longer = resolve("cartpole", ["total_steps=1e6", "eval.episodes=3", "device=cpu"]).config
    changes = resumable.changed_on_resume(old, longer)
    assert [change.key for change in changes] == ["device", "total_steps", "eval.episodes"]
    with pytest.raises(UserError) as caught:
        resumable.changed_on_resume(old, resolve("cartpole", ["seed=2", "agent.gamma=0.9", "total_steps=1e6"]).config)
    told = str(caught.value).splitlines()
    assert told[:2] == ["seed: is 2, but the run was started with 1",
                        "agent.gamma: is 0.9, but the run was started with 0.99"]
    assert "a resumed run may change actors, callbacks, device, launcher, learners, " in told[2]
    assert "init_from=RUN" in told[2]
    assert "run.* (except exact_resume, name, root)" in told[2] and "allreduce" not in told[2]


def test_a_run_of_0_1_is_not_resumed_and_the_message_says_what_works(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("learner: {parts: 1, batch_size: 32}\n")
    with pytest.raises(UserError, match=rf"started by qfleet 0.1 \(learner.parts in .*init_from={tmp_path}"):
        resumable.require_current(config)
    config.write_text("learner: {batch_size: 32}\n")
    resumable.require_current(config)


def test_an_exact_run_keeps_its_checkpoint_clock_on_resume() -> None:
    exact = ["run.exact_resume=true"]
    old = resolve("cartpole", exact).config
    resumable.changed_on_resume(old, resolve("cartpole", [*exact, "total_steps=1e6"]).config)
    refused = r"(?s)checkpoint.period_steps: is 20000, but the run was started with 10000.*may change.*checkpoint.keep,"
    with pytest.raises(UserError, match=refused):
        resumable.changed_on_resume(old, resolve("cartpole", [*exact, "checkpoint.period_steps=2e4"]).config)


def test_explain_says_which_symbols_auto_finds() -> None:
    rows = [{row.key: row for row in describe.explain(resolve(env_id))}["env.image_symbols"]
            for env_id in ("MiniGrid-Empty-5x5-v0", "MinAtar/Breakout-v1", "CartPole-v1")]
    assert rows[0].description.endswith("(here: {image: 16})") and rows[1].description.endswith("(here: null)")
    assert rows[0].value == "auto" and rows[2].description.endswith("null = none")


def test_a_checkpoint_without_the_key_reads_images_as_it_was_trained_to() -> None:
    assert resolution.playable({"env": {"id": "x:Y"}})["env"] == {"id": "x:Y", "image_symbols": None}
    assert resolution.playable({"env": {"id": "x:Y", "image_symbols": {"a": 3}}})["env"]["image_symbols"] == {"a": 3}


@pytest.mark.parametrize(("name", "unroll", "stride"), [("ngu", 80, 40), ("agent57", 160, 80)])
def test_curious_recipes_have_the_settings_of_their_papers(name, unroll, stride):
    """Adam's ε of 1e-4 belongs to half of the sum over a sequence; of a mean of squares it is 2/unroll of that."""
    config = resolution.resolve(name).config
    assert (config.agent.unroll, config.agent.stride, config.agent.target_epsilon) == (unroll, stride, 0.01)
    assert (config.env.stack, config.env.full_action_space, config.eval.epsilon) == (1, True, 0.01)
    assert config.learner.optimizer_eps == pytest.approx(1e-4 * 2 / unroll)
    assert config.replay.samples_per_insert * unroll == 4, "each step is trained on four times"
