"""docs/results.md is what the committed results say."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    assert "(rainbow) | 950,022 | 1 |" in text and "(td3, worst 5,419) | 100,000 | 3 |" in text
    assert writer.ours(None) == writer.ours(["gone.json", "x"]) == ["not run yet", "-", "-"]
    assert writer.runs_of("precision.json", "fp32")[0][1] <= 600_022
    for line in text.splitlines():
        if line.startswith("| [") and "made by" not in line:
            assert "`python benchmarks/" in line and "cores" in line and "torch" in line
