"""Another algorithm than the recipe's: which settings come from a recipe for it, and which stay."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from qfleet import api
from qfleet.cli.commands import main
from qfleet.core.errors import UserError
from qfleet.runconfig import resolution
from qfleet.runconfig.algorithm_settings import CONTINUOUS, SEQUENCES, TABLE, TRANSITIONS, learns_from
from qfleet.runconfig.resolution import recipe_names, resolve
from qfleet.runconfig.smoke import smoke_overrides

IDS = {"pixels": "ALE/Pong-v5", "atari": "ALE/Pong-v5", "control": "Pendulum-v1", "control-pixels": "Pendulum-v1"}


def words_for(name: str) -> list[str]:
    """An environment for a recipe that has none."""
    try:
        resolve(name)
        return []
    except UserError:
        return [f"env.id={IDS.get(name, 'CartPole-v1')}"]


DISCRETE = [name for name in recipe_names()
            if learns_from(resolve(name, words_for(name)).config.agent.model_dump()) != CONTINUOUS]


@pytest.mark.parametrize("algo", ["r2d2", "ngu", "agent57"])
@pytest.mark.parametrize("name", DISCRETE)
def test_a_recurrent_algorithm_over_any_recipe_has_settings_for_sequences(name: str, algo: str) -> None:
    config = resolve(name, [*words_for(name), f"agent.algo={algo}"]).config
    assert config.agent.algo == algo
    if config.agent.window.within_episode:  # deep-sea with ngu stays what it is
        assert config.replay.samples_per_insert <= 4, "sequences, not transitions, per step"
    if algo != "r2d2":
        assert config.explore.arms == config.agent.arms
    plain = resolve(name, words_for(name)).config
    for section in ("env", "eval", "checkpoint"):
        assert getattr(config, section) == getattr(plain, section)
    assert (config.total_steps, config.stop_at) == (plain.total_steps, plain.stop_at)
    assert (config.replay.capacity, config.replay.min_steps) == (plain.replay.capacity, plain.replay.min_steps)


@pytest.mark.parametrize("name", ["hidden-cartpole", "memory-cue", "tmaze", "recurrent", "r2d2", "agent57"])
def test_a_value_algorithm_over_a_recurrent_recipe_has_settings_for_transitions(name: str) -> None:
    config = resolve(name, [*words_for(name), "agent.algo=dqn"]).config
    assert config.replay.samples_per_insert >= 8 and config.env.id == resolve(name, words_for(name)).config.env.id


@pytest.mark.parametrize("algo", ["dqn", "c51", "r2d2"])
def test_a_network_over_the_recipe_for_tables_is_not_trained_with_the_settings_of_a_table(algo: str) -> None:
    table, resolved = resolve("FrozenLake-v1").config, resolve("FrozenLake-v1", [f"agent.algo={algo}"])
    assert table.agent.algo == "tabular" and table.learner.optimizer == "torch.optim:SGD"
    learner = resolved.config.learner
    assert (learner.optimizer, learner.schedule) == ("adam", "constant") and learner.learning_rate <= 1e-3
    assert resolved.config.total_steps == table.total_steps and "recipe discrete is for tabular" in resolved.note


def test_a_table_over_a_recipe_for_networks_has_the_settings_of_a_table() -> None:
    config = resolve("vector", ["env.id=FrozenLake-v1", "agent.algo=tabular"]).config
    assert config.learner == resolve("FrozenLake-v1").config.learner
    own = resolve("FrozenLake-v1", ["agent.algo=dqn", "learner.learning_rate=0.01"]).config.learner
    assert own.learning_rate == 0.01, "a value of the user is never replaced"


def test_what_algorithms_learn_from() -> None:
    assert {learns_from({"algo": algo}) for algo in ("r2d2", "ngu", "agent57")} == {SEQUENCES}
    assert {learns_from({"algo": algo}) for algo in ("dqn", "c51", "qr", "iqn", "hlgauss")} == {TRANSITIONS}
    assert {learns_from({"algo": algo}) for algo in ("ddpg", "d4pg")} == {CONTINUOUS}
    assert learns_from({"algo": "tabular"}) == TABLE
    assert learns_from({"algo": "ngu", "memory": "none"}) == TRANSITIONS and learns_from({}) == TRANSITIONS
    assert learns_from({"algo": "r2d2", "unroll": 4}) == SEQUENCES, "also where its options contradict each other"
    assert learns_from({"algo": "nope"}) is None and learns_from({"algo": "mine:algo"}) is None


def test_the_note_names_both_recipes_and_what_was_replaced() -> None:
    assert resolve("cartpole", ["agent.algo=r2d2"]).note == (
        "agent.algo=r2d2: recipe cartpole is for dqn; settings of recipe recurrent replace its agent.*, "
        "replay.samples_per_insert, replay.chunk_steps, learner.batch_size, explore.end, explore.steps")
    assert "settings of recipes recurrent and ngu replace its agent.*, explore.*, " in resolve(
        "cartpole", ["agent.algo=ngu"]).note
    assert "settings of recipe r2d2 replace" in resolve("pong", ["agent.algo=r2d2"]).note


@pytest.mark.parametrize("words", [["agent.algo=c51"], ["agent.algo=dqn"], ["agent.n_step=1"], []])
def test_nothing_is_replaced_if_the_recipe_suits_the_algorithm(words: list[str]) -> None:
    resolved = resolve("cartpole", words)
    assert resolved.note == "" and resolved.provenance["learner.learning_rate"] == "recipe cartpole"
    assert resolve("deep-sea", ["agent.algo=dqn"]).note == "" == resolve("tmaze", ["agent.algo=r2d2"]).note


def test_the_sources_of_replaced_values_are_their_recipes() -> None:
    source = resolve("cartpole", ["agent.algo=r2d2"]).provenance
    assert source["agent.unroll"] == source["learner.batch_size"] == "recipe recurrent"
    assert source["total_steps"] == "recipe cartpole" and source["replay.capacity"] == "recipe vector"


def test_values_of_the_user_are_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: cartpole\nlearner: {learning_rate: 2e-4}\nreplay: {samples_per_insert: 3}\n"
                    "explore: {end: 0.2}\nagent: {hidden: [16], noisy_sigma: 0.1}\n")
    resolved = resolve(str(file), ["agent.algo=r2d2", "agent.burn_in=2", "learner.batch_size=16"])
    config = resolved.config
    assert (config.learner.learning_rate, config.replay.samples_per_insert, config.explore.end) == (2e-4, 3, 0.2)
    assert (config.agent.burn_in, config.learner.batch_size, config.agent.unroll) == (2, 16, 64)
    assert config.agent.hidden == (64,), "the agent section starts anew with another algorithm"
    assert not any(key in resolved.note for key in ("learning_rate", "samples_per_insert", "explore.end", "batch_size"))


def test_a_file_may_choose_the_algorithm_as_may_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: cartpole\nagent: {algo: r2d2, unroll: 48, stride: 16}\n")
    for source in (str(file), {"extends": "cartpole", "agent": {"algo": "r2d2", "unroll": 48, "stride": 16}}):
        config = resolve(source).config
        assert (config.agent.unroll, config.agent.stride, config.replay.samples_per_insert) == (48, 16, 2)


def test_exploration_that_the_user_has_set_keeps_its_kind() -> None:
    kept = resolve("pong", ["agent.algo=r2d2", "explore.end=0.1"])
    assert (kept.config.explore.kind, kept.config.explore.end) == ("linear", 0.1) and "explore" not in kept.note
    assert resolve("pong", ["agent.algo=r2d2", "explore.epsilon=0.3"]).config.explore.kind == "ladder"
    assert resolve("cartpole", ["agent.algo=r2d2", "explore.kind=constant"]).config.explore.kind == "constant"


def test_a_recipe_for_images_gives_way_where_there_are_none() -> None:
    for name, algo in (("r2d2", "r2d2"), ("r2d2-short", "r2d2"), ("ngu", "ngu"), ("agent57", "agent57")):
        resolved = resolve(name, ["env.id=CartPole-v1"])
        assert resolved.note == (f"recipe {name} is for images, and CartPole-v1 has none: recipe recurrent replaces "
                                 f"it, with agent.algo={algo}")
        assert (resolved.config.agent.algo, resolved.config.env.stack) == (algo, None)
        assert resolved.config.total_steps == resolve("recurrent", ["env.id=CartPole-v1"]).config.total_steps
    images = resolve("r2d2", ["env.id=toy/Catch-v0", "env.kwargs={pixels: true, side: 12}"])
    assert images.note == "" and images.config.agent.units == 512
    assert resolve("r2d2", ["env.id=CartPole-v1", "agent.units=16"]).config.agent.units == 16


def test_an_algorithm_for_other_actions_takes_settings_for_the_environment_that_is_given() -> None:
    assert resolve("vector", ["env.id=Pendulum-v1", "agent.algo=ddpg"]).config.explore.kind == "pink"
    assert resolve("pendulum", ["env.id=CartPole-v1", "agent.algo=dqn"]).config.explore.kind == "ez_greedy"
    assert resolve("pendulum", ["env.id=CartPole-v1", "agent.algo=r2d2"]).config.replay.chunk_steps == 64


def test_an_algorithm_of_the_user_keeps_the_settings_of_the_recipe(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "own_algo.py").write_text("from qfleet.algos import dqn\n\nclass algo:\n"
                                          "    class Config(dqn.Config):\n        algo: str\n\n    build = dqn.build\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    resolved = resolve("tmaze", ["agent.algo=own_algo:algo"])
    assert resolved.note == "" and resolved.provenance["replay.samples_per_insert"] == "recipe recurrent"


@pytest.mark.parametrize(("words", "line"), [
    (["agent.unroll=16"], "agent.stride=32 exceeds agent.unroll=16"),
    (["agent.stride=15"], "replay.chunk_steps=64 is not a multiple of 15, the distance between window starts: set it "
                          "to 75"),
    (["agent.noisy=true"], "agent.noisy: unknown key"),
    (["agent.n_step=100"], "a look-ahead of 100 steps (agent.n_step) is longer than replay.chunk_steps=64")])
def test_a_mistake_is_answered_by_one_message_before_anything_is_built(words: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve("cartpole", ["agent.algo=r2d2", *words])
    [message] = str(caught.value).splitlines()
    assert line in message


def test_the_note_is_printed_once_and_never_to_stdout(capsys, caplog) -> None:
    words = ["train", "cartpole", "agent.algo=r2d2", "--dry-run", "--seeds", "2"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err.count("recipe cartpole is for dqn") == 1 and "is for dqn" not in out
    assert main([*words, "--quiet"]) == 0 and capsys.readouterr().err == ""
    assert main(["config", "explain", "cartpole", "agent.algo=r2d2"]) == 0
    assert "recipe cartpole is for dqn" in capsys.readouterr().err
    with caplog.at_level(logging.WARNING):
        api.Run("cartpole", agent="r2d2", device="cpu")
    assert caplog.text.count("recipe cartpole is for dqn") == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "words"), [
    ("CartPole-v1", ["agent.algo=r2d2"]), ("r2d2", ["env.id=toy/HiddenCartPole-v0"]),
    ("catch", ["agent.algo=ngu", "agent.episodic_capacity=64"]),
    ("tmaze", ["agent.algo=agent57", "agent.episodic_capacity=64"]), ("memory-cue", ["agent.algo=dqn"]),
    ("recurrent", ["env.id=toy/Catch-v0", "env.kwargs={pixels: true, side: 12}", "agent.burn_in=2"])])
def test_such_a_run_learns_from_its_data(name: str, words: list[str], tmp_path: Path) -> None:
    short = smoke_overrides(resolution.resolve(name, words).config)
    result = api.train(name, [*words, *short, f"run.root={tmp_path}", "run.tensorboard=false", "run.threads=1",
                              "device=cpu"])
    assert result.updates > 0 and result.best is not None
