"""A foreign process that keeps a core busy does not bring a run to its knees.

Both rates come from one run, in turns, so that what else a machine does meets both. The aim is a factor of 2; a quarter
more is left to the noise of a few short windows.
"""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(230)]


@pytest.mark.parametrize("name", ["cartpole", "catch-pixels"])
def test_a_busy_core_costs_no_more_than_half_the_speed(monkeypatch, name):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    foreign_load = pytest.importorskip("foreign_load")
    found = foreign_load.measure(name, windows=4, seconds=3.0)
    assert len(found["windows"]["busy"]) == 4 and found["busy"] > 0
    assert found["slowdown"] <= 2.5, found
