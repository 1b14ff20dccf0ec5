"""The tables of docs/results.md and docs/benchmarks.md show wins and losses of the committed results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qfleet.runconfig.resolution import recipe_names

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables_results

    return tables_results


@pytest.fixture
def speed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables_speed

    return tables_speed


def rows_of(found):
    """Rows by their first cell, without the header."""
    _, *rows = found
    return {row[0]: tuple(row[1:]) for row in rows}


def test_a_row_shows_seeds_that_missed_the_threshold(results):
    found = [{"mean_reward": score, "steps": steps, "seconds": seconds}
             for score, steps, seconds in ((500.0, 1000, 30.0), (480.0, 3000, 40.0), (12.5, 50000, 600.0))]
    assert results.outcome("cartpole", found) == ("2/3", "2,000", "331 (12.5)", "40")
    assert results.outcome("cartpole", found[2:]) == ("0/1", "–", "12.5", "600")
    assert results.outcome("cartpole", found[:1]) == ("**1/1**", "1,000", "500", "30")


def test_every_row_of_the_matrix_is_in_a_table(results):
    matrix = results.read("learn.json")
    small = sum(name.startswith("catch ") and name.split()[1] in results.TORSOS for name in matrix["rows"])
    control = sum(name.startswith("pendulum") for name in matrix["rows"])
    toy, ways = rows_of(results.toy(matrix)), rows_of(results.topologies(matrix))
    assert len(toy.keys() | ways.keys()) - 1 + small + control == len(matrix["rows"]), "one row is in both tables"
    assert "2/5" in ways["the same, outlier filter"]
    heads = rows_of(results.pixels(matrix))
    assert sum(int(networks) for networks, *_ in heads.values()) == small


def test_runs_of_pong_are_listed_with_the_published_score_of_their_agent(results):
    document = results.read("pong_family.json")
    game = {"mean_reward": 19.0, "episodes": 30}
    run = {"steps": 10, "seconds": 60.0, "training": [[5, -20.5]], "curve": []}
    rows = rows_of(results.pong({"rows": {"c51": run | {"games": game}, "c51 (other)": run, "agent57 (slow)": run}}))
    assert rows["c51"] == ("**1/1**", "10", "1.0", "19", "20.9 (50M)")
    assert "c51 (other)" not in rows, "there is a run with the current settings"
    assert rows["agent57 (slow)"] == ("0/1", "10", "1.0", "−20.5 (training)", "–")
    assert rows["pong, bf16"][0] == "1/3" and len(rows_of(results.pong(document))) >= 14


def test_published_scores_are_those_of_rows_that_exist(results):
    import evidence

    for row in results.PUBLISHED:
        file, name = row["ours"]
        assert name in evidence.names_of(file), row
    assert results.published("hopper.json", "qfleet_td3") == "3,564 (1M)"
    assert results.published("hopper.json", "nothing") == "–"


def test_every_recipe_is_named_once(results):
    named = [name for _, names in list(results.recipes({}))[1:] for name in re.findall(r"`([\w-]+)`", names)]
    assert sorted(named) == sorted(recipe_names())
    assert 'parametrize("name", recipe_names())' in (ROOT / "tests/system/test_recipes_run.py").read_text()


def test_a_default_that_the_suite_trained_counts_as_trained(results):
    own, *_ = rows_of(results.recipes({}))["with their own settings"]
    assert {"`discrete`", "`small-images`", "`vector`"} <= set(own.split(", "))


def test_every_file_of_the_page_has_its_machine(results):
    shown = re.findall(r"results/([\w.]+)\)", "".join(files for *_, files in list(results.machines({}))[1:]))
    assert sorted(shown) == sorted(results.FILES)
    marked = set(re.findall(r"<!--=([\w.]+);", (ROOT / "docs/results.md").read_text()))
    assert marked <= set(results.FILES), "a table whose machine is not named"


def test_settings_of_the_recipe_do_not_count_as_changed():
    import evidence

    settings = ("cartpole", "agent.n_step=3", "env.lanes=4", "run.name=x", "checkpoint.keep=1", "eval.episodes=7")
    assert evidence.changed(settings) == ["env.lanes=4", "eval.episodes=7"] and not evidence.as_it_is(settings)
    assert evidence.as_it_is(("cartpole", "eval.episodes=7", "agent.n_step=3"))
    assert evidence.changed(("atari", "env.id=PongNoFrameskip-v4")) == ["env.id=PongNoFrameskip-v4"]


def test_settings_recorded_by_0_1_are_read_with_the_keys_of_this_version():
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
    run = {"settings": ["iqn", "agent.n_step=3", "actors=2"]}
    assert evidence.in_new_keys(run) == ("iqn", "agent.n_step=3", "env.groups=2")
    assert evidence.in_new_keys(run | {"version": "0.2.0"}) == ("iqn", "agent.n_step=3", "actors=2")


def test_commands_of_the_matrix_are_printed(capsys, monkeypatch):
    import learn

    monkeypatch.setattr("sys.argv", ["learn.py", "--commands", "--only", "cartpole", "catch pixels"])
    learn.main()
    assert capsys.readouterr().out.splitlines() == [
        "cartpole: qfleet train cartpole",
        "catch pixels: qfleet train catch 'env.kwargs={pixels: true, side: 12}' learner.precision=fp32"]


def test_peers_stand_beside_qfleet_with_the_ratio(speed):
    results = [{"who": who, "name": name, "median": {"per_cpu_s": rate}} for who, name, rate in (
        ("qfleet", "qfleet, 1 lane", 3000.0), ("sb3", "sb3, 1 lane", 1000.0), ("tianshou", "tianshou, 1 lane", 2000.0))]
    ratio = {f"qfleet, 1 lane / {peer}, 1 lane": {"per_cpu_s": value}
             for peer, value in (("sb3", 3.0), ("tianshou", 1.5))}
    rows = rows_of(speed.peers({"w": {"results": results, "ratio": {"w": ratio}}}))
    assert rows == {"`w`, 1 lane": ("3,000", "1,000", "3.00", "2,000", "1.50")}


def test_sections_of_an_update_are_summed_with_their_common_factor(speed):
    parts = [{"name": name, "cpu_ms": spent, "distance": distance} for name, spent, distance in (
        ("forward, loss", 6.0, 3.0), ("backward", 4.0, 2.0), ("sample", 1.0, None), ("publish", 0.5, 9.0))]
    rows = rows_of(speed.profile({"profile": {"w": {"parts": parts}}}))
    assert rows["forward, loss, backward"] == ("10.00 (2.5×)",), "ten milliseconds instead of four"
    assert rows["sample"] == ("1.00",) and rows["optimizer"] == ("–",) and rows["everything else"] == ("0.50",)


def test_the_ends_of_each_axis_stand_below_the_base(speed):
    import cost

    rows = rows_of(speed.gpu_costs({"results": [wish | {"updates_per_s": 100.0, "gpu_mb": 2000.0}
                                                for wish, _ in cost.gpu_cells(list(speed.AXES))]}))
    assert list(rows) == ["base", "lanes: 1", "lanes: 256", "batch: 32", "batch: 4,096", "replay: 10,000",
                          "replay: 10,000,000"]
    assert rows["base"] == ("–", "100", "2.0")
