"""The benchmark of memory over a long run: it looks at it, and leaves the replay's own size out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_memory_is_looked_at_from_when_the_replay_is_full(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import steady_memory

    monkeypatch.setattr(steady_memory, "LOOKS", 20)
    out = tmp_path / "memory.json"
    monkeypatch.setattr(sys, "argv", ["steady_memory.py", "--recipe", "cartpole", "--steps", "4000", "--out", str(out),
                                      "replay.min_steps=200", "replay.samples_per_insert=0.5", "eval.episodes=1"])
    steady_memory.main()
    assert "cartpole: " in capsys.readouterr().out
    row = json.loads(out.read_text())["rows"]["cartpole"]
    beside = [process - replay for step, process, replay in row["seen"] if step > row["capacity"] == 400]
    assert len(beside) >= 10 and row["seen"][-1][0] >= 4000
    assert abs(row["last_mb"] - beside[-1]) < 0.2 and abs(row["most_mb"] - max(beside)) < 0.2
