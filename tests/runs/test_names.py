"""A run is found by path, name, unique prefix, or as `last`."""

from __future__ import annotations

import json
import os

import pytest

from qfleet.core.errors import UserError
from qfleet.runs.names import find_run, match_run, newest_run, settled_name


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    for name, started in {"cartpole-1": "2026-01-03T10:00:00+00:00", "cartpole-2": "2026-01-01T10:00:00+00:00",
                          "pong": "2026-01-02T10:00:00+00:00"}.items():
        make(root / name, started)
    return root


def make(path, *started):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("seed: 1\n")
    (path / "run.json").write_text(json.dumps({"id": "x", "attempts": [{"started": time} for time in started]}))


def test_a_unique_prefix_is_enough(runs):
    assert find_run("po", "runs").name == "pong" and find_run("cartpole-2").name == "cartpole-2"
    assert match_run("x") is None and match_run("") is None and match_run("other/po") is None


def test_an_ambiguous_prefix_lists_the_candidates(runs):
    with pytest.raises(UserError, match=r"2 runs under runs begin with 'cart': cartpole-1, cartpole-2;"):
        find_run("cart")
    for number in range(20):
        make(runs / f"many-{number:02}", "2025-01-01T10:00:00+00:00")
    with pytest.raises(UserError, match="many-07 and 12 more; type more of the name"):
        find_run("many")


@pytest.mark.parametrize(("name", "told"), [("model.zip", True), ("mod.py", False)])
def test_a_file_is_no_run_and_only_one_that_may_be_a_model_is_called_so(runs, name, told):
    (runs / name).touch()
    with pytest.raises(UserError, match="is a file, not a qfleet run") as caught:
        find_run(runs / name)
    assert ("models of other libraries" in str(caught.value)) is told


def test_exact_names_win_over_longer_ones_and_over_last(runs):
    make(runs / "cartpole", "2020-01-01T10:00:00+00:00")
    assert find_run("cartpole").name == "cartpole"
    make(runs / "last", "2020-01-01T10:00:00+00:00")
    assert find_run("last").name == "last"


def test_last_is_the_run_that_was_started_or_resumed_last_whatever_was_modified_last(runs):
    os.utime(runs / "pong")
    assert find_run("last", runs).name == "cartpole-1"
    make(runs / "resumed", "2025-01-01T10:00:00+00:00", "2026-01-03T10:00:01+00:00")
    assert newest_run(runs).name == "resumed"
    make(runs / "zone", "2026-01-03T10:00:02+09:00")
    assert newest_run(runs).name == "resumed", "times of other zones are compared as times"


def test_of_runs_started_in_the_same_second_the_later_one_is_last(runs):
    for number, name in enumerate(("b", "a")):
        make(runs / name, "2026-01-04T10:00:00+00:00")
        os.utime(runs / name / "config.yaml", ns=(number, number))
    assert newest_run(runs).name == "a"


@pytest.mark.parametrize("record", ["", "[1]", '{"attempts": 3}', '{"attempts": []}', '{"attempts": [{"started": 7}]}'])
def test_a_broken_record_hides_no_other_run(runs, record):
    make(runs / "broken")
    (runs / "broken" / "run.json").write_text(record)
    os.utime(runs / "broken", (1, 1))
    assert newest_run(runs).name == "cartpole-1" and find_run("broken").name == "broken"


def test_a_config_stores_the_path_of_what_last_and_a_prefix_mean(runs):
    assert settled_name("last", "runs") == "runs/cartpole-1" and settled_name("po", "runs") == "runs/pong"
    for unchanged in ("pong", "runs/pong", "nothing", str(runs / "pong")):
        assert settled_name(unchanged, "runs") == unchanged
    (runs.parent / "po").mkdir()
    assert settled_name("po", "runs") == "po", "an exported policy, for example"


def test_without_runs_there_is_no_last_one(tmp_path):
    with pytest.raises(UserError, match=f"there is no last run: {tmp_path} contains no runs"):
        find_run("last", tmp_path)
