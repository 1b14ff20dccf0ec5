"""docs/results.md is what the committed results say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qfleet.runconfig.resolution import recipe_names

ROOT = Path(__file__).parents[2]


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results_page

    return results_page


def test_losses_are_told_as_well(writer):
    [goal, solved, steps, score, command] = writer.cells("cartpole", [
        {"mean_reward": 500.0, "steps": 1000}, {"mean_reward": 480.0, "steps": 3000},
        {"mean_reward": 12.5, "steps": 50000}])
    assert (goal, solved, steps, score) == ("475", "2 of 3", "2,000", "330.8 (12.5)")
    assert command == "`qfleet train cartpole`"
    assert writer.cells("cartpole", [{"mean_reward": 9.0, "steps": 1}])[1:3] == ["0 of 1", "-"]
    assert writer.cells("a row that is gone", [{"mean_reward": 1.0, "steps": 1}])[-1] == "a row of an earlier matrix"


def test_every_published_row_finds_ours_or_says_that_there_is_none(writer):
    text = "\n".join(writer.published())
    assert "| `rainbow` with other settings: C51, double, dueling, noisy, 3 steps, prioritised | 950,022 | 1 |" in text
    assert "(worst 5,419) | `halfcheetah`: TD3, 1 step, LayerNorm, bf16 | 100,000 | 3 |" in text
    assert "| `pong` with other settings: DQN, double, dueling, 3 steps, fp32 |" in text
    assert writer.ours(None) == writer.ours(["gone.json", "x"]) == ["not run yet", "-", "-", "-"]
    assert writer.runs_of("precision.json", "fp32")[0][1] <= 600_022


def test_every_file_says_how_it_was_made(writer):
    lines = [line for line in writer.made() if line.startswith("| [")]
    assert len(lines) >= 10 and all("`python benchmarks/" in line and "torch" in line for line in lines)
    assert all(re.search(r"\| (not recorded|[0-9a-f]{7,}\+?)(, (not recorded|[0-9a-f]{7,}\+?))* \|$", line)
               for line in lines)


def test_the_commit_of_a_row_is_not_guessed_from_that_of_another(writer, monkeypatch):
    import evidence

    def told(rows, **machine):
        monkeypatch.setattr(evidence, "read", lambda file: {"rows": rows, "machine": machine})
        return evidence.commits_of("x.json")

    assert told({"a": {}, "b": [{}, {}]}, commit="abc1234") == "abc1234"
    assert told({"a": {}}) == told({"a": {}}, commit=None) == "not recorded"
    assert told({"a": {}, "b": [{"commit": "abc1234+"}] * 2}, commit="abc1234+") == "not recorded, abc1234+"


def test_every_recipe_is_listed_with_its_evidence_or_its_lack(writer, monkeypatch):
    import evidence

    lines = {re.match(r"\| \[`([\w-]+)`\]", line)[1]: line for line in writer.recipes() if line.startswith("| [")}
    assert list(lines) == recipe_names()
    assert "5 of 5 runs reached 475" in lines["cartpole"] and "(40 + 80): -21 after" in lines["r2d2"]
    trained = {row.recipe for row in evidence.rows()}
    assert {name for name, line in lines.items() if writer.IDLE in line} == set(lines) - trained
    assert 'parametrize("name", recipe_names())' in (ROOT / "tests/system/test_recipes_run.py").read_text()


def test_a_new_row_of_pong_appears_by_itself(writer, monkeypatch):
    import evidence

    data = evidence.read("pong_family.json")
    new = {"steps": 10, "updates": 1, "curve": [], "training": [], "settings": ["c51", "agent.n_step=3", "run.name=x"],
           "commit": "abc1234", "version": "0.2.0"}
    changed = data | {"rows": data["rows"] | {"c51": new}}
    read = evidence.read
    for module in (evidence, writer):
        monkeypatch.setattr(module, "read", lambda file: changed if file == "pong_family.json" else read(file))
    lines = list(writer.pong())
    assert len([line for line in lines if line.startswith("| ")]) == 1 + len(changed["rows"])
    row = "| c51 | C51, 3 steps | 10 | 1 | never evaluated | 0.2.0 | abc1234 | `qfleet train c51 agent.n_step=3` |"
    assert row in lines
    assert any(line.startswith("| btr (cut off) | ") and "never evaluated; training returned" in line for line in lines)
    assert any("c51: was not evaluated" in line for line in writer.recipes())


def test_settings_that_say_what_the_recipe_says_are_left_out():
    import evidence

    settings = ("cartpole", "agent.n_step=3", "env.lanes=4", "run.name=x", "checkpoint.keep=1", "eval.episodes=7")
    assert evidence.changed(settings) == ["env.lanes=4", "eval.episodes=7"] and not evidence.as_it_is(settings)
    assert evidence.as_it_is(("cartpole", "eval.episodes=7", "agent.n_step=3"))
    assert evidence.changed(("atari", "env.id=PongNoFrameskip-v4")) == ["env.id=PongNoFrameskip-v4"]


def test_settings_that_0_1_recorded_are_read_with_the_keys_of_this_version(writer):
    import evidence
    import old_keys

    assert old_keys.renamed(["placement=processes", "actors=8", "explore.base=0.4", "explore.alpha=7"]) == [
        "launcher=local", "actors=8", "explore.epsilon=0.4", "explore.steepness=7"]
    assert old_keys.renamed(["gradients=server", "cells=3", "server.shards=1", "actors=2"]) == [
        "sync=server", "learners=3", "parameter_server.shards=1", "env.groups=2"]
    assert old_keys.renamed(["actors=2", "eval.beside=true", "replay.alpha=0.5", "env.id=a=b"]) == [
        "env.groups=2", "eval.process=true", "replay.alpha=0.5", "env.id=a=b"]
    configs = {name: evidence.configured(evidence.settings_of("sources_figures.json", name))
               for name in ("n=5, 8 actors", "Gorila, 3 clients")}
    assert [(each.actors, each.learners, each.sync) for each in configs.values()] == [
        (8, 1, "none"), (0, 3, "server")]


def test_a_row_that_was_trained_twice_says_so(writer):
    assert writer.page().count("| pendulum d4pg | ") == writer.page().count("| pendulum d4pg, an earlier time | ") == 1
