"""The benchmark of more processes: its settings hold, and it measures what it says, without an emulator."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from qfleet.runconfig import resolution
from qfleet.runconfig.per_rank import per_rank

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("value", [1, 2, 3, 4])
@pytest.mark.parametrize(("way", "actors", "learners"), [("actors", True, False), ("cells", False, True),
                                                         ("ranks", False, True)])
def test_settings_are_taken(way, actors, learners, value):
    import spread

    cfg = resolution.resolve("pong", spread.words_for(way, value)).config
    assert (cfg.actors, cfg.learners) == (value if actors else 0, value if learners else 1)
    assert cfg.run.threads == 1 and cfg.stop_at is None
    if cfg.sync == "allreduce":
        assert per_rank(cfg, value).learner.batch_size == 32


def test_rounds_become_medians_and_gains():
    import spread

    rows = {"actors": {"4": [{"steps_per_s": 30.0, "updates_per_s": 5.0}],
                       "1": [{"steps_per_s": speed, "updates_per_s": 4.0} for speed in (9.0, 10.0, 90.0)]}}
    found = spread.medians(rows)["actors"]
    assert list(found) == [1, 4]
    assert found[1] == {"steps_per_s": 10.0, "updates_per_s": 4.0, "gain": 1.0} and found[4]["gain"] == 3.0
    import tables_running

    assert list(tables_running.actors({"rows": rows})) == [
        ("actors", "steps/s", "updates/s", "speed-up"), ("1", "10", "4", "1.0"), ("4", "30", "5", "3.0")]
    header, *_ = tables_running.learners({"rows": {"cells": rows["actors"]}})
    assert header[0] == "learners", "as they are called now"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_actors_are_measured_and_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import spread

    out = tmp_path / "deep" / "spread.json"
    words = ["env.id=toy/Catch-v0", "env.kwargs={pixels: true, rows: 6, columns: 5, side: 8}", "replay.min_steps=200",
             "run.log_period_steps=100"]
    monkeypatch.setitem(spread.WAYS, "actors", ("actors={}", [
        word for word in spread.WAYS["actors"][1] if not word.startswith(("env.threads", "replay.min", "run.log"))]))
    monkeypatch.setattr(sys, "argv", ["spread.py", "--only", "actors", "--values", "1", "2", "--seconds", "0.5",
                                      "--out", str(out), *words])
    spread.main()
    document = json.loads(out.read_text())
    assert list(document["rows"]["actors"]) == ["1", "2"] and document["overrides"] == words
    assert all(run["steps_per_s"] > 0 and run["updates_per_s"] > 0
               for runs in document["rows"]["actors"].values() for run in runs)
    spread.draw(document).savefig(tmp_path / "x.png")


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_run_that_never_learns_is_named(capfd, monkeypatch):
    import spread

    monkeypatch.setattr(spread, "WAIT_S", 30)
    with pytest.raises(SystemExit, match=r"no 1 s of learning; exit code 2"):
        spread.measure("actors", 1, 1.0, ["env.id=nowhere"])
    assert "nowhere" in capfd.readouterr().err


def test_runs_of_another_kind_are_not_mixed(tmp_path, monkeypatch):
    import spread

    out = tmp_path / "spread.json"
    out.write_text(json.dumps({"rows": {}, "seconds": 20.0, "overrides": [], "cores": os.cpu_count()}))
    monkeypatch.setattr(sys, "argv", ["spread.py", "--seconds", "5", "--out", str(out)])
    with pytest.raises(SystemExit, match="another kind"):
        spread.main()
