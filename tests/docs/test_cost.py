"""How cost grows on a GPU: a cell is measured, here on a CPU, and its cells become tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TINY = ["device=cpu", "env.id=toy/Catch-v0", "env.kwargs={pixels: true, rows: 6, columns: 5, side: 8}"]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("played", [True, False])
def test_a_cell_of_a_gpu_is_filled_and_measured(played):
    import cost

    found = cost.gpu_cell({"lanes": 4, "batch": 8, "replay": 640}, 0.01, TINY, played)
    assert found["stored"] == 640 and found["updates_per_s"] > 0 and found["replay_mb"] > 0
    assert ("steps_per_s" in found) == played
    assert ("gpu_mb" in found) == torch.cuda.is_available()


def test_cells_vary_one_axis_from_the_base_and_the_largest_comes_last():
    import cost

    cells = cost.gpu_cells(["lanes", "batch", "replay"])
    wishes = [wish for wish, _ in cells]
    assert all(sum(wish[axis] != value for axis, value in cost.GPU_BASE.items()) <= 1 for wish in wishes)
    assert len(wishes) == len({tuple(wish.items()) for wish in wishes}) == 10
    assert wishes[-1]["replay"] == 10_000_000
    assert [(wish["batch"], wish["replay"]) for wish, played in cells if not played] == [
        (32, 100_000), (512, 100_000), (4096, 100_000), (256, 10_000), (256, 1_000_000)]
    assert [wish["lanes"] for wish, played in cells if played] == [1, 8, 64, 256, 64]
