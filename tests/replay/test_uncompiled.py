"""Replay gives the same results with and without numba."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from replay_twin import Twin, layout_for, play, replay_for

from qfleet.core.jit import HAS_NUMBA
from qfleet.core.replay import Window
from qfleet.replay.chunker import Chunker
from qfleet.replay.decode import plan_blocks, undo_deltas

NO_NUMBA = """
import sys
sys.modules["numba"] = None
import test_uncompiled
assert not test_uncompiled.HAS_NUMBA
print(test_uncompiled.fingerprint())
"""


def fingerprint() -> str:
    """Hash of all samples in a fixed sequence of adds, samples and updates."""
    twin, layout = Twin(2, seed=8), layout_for(Window(future=2), 20)
    chunker, replay, digest = Chunker(layout, 2), replay_for(layout, alpha=0.6), hashlib.sha256()
    for _ in range(10):
        play(twin, chunker, replay, 15)
        if (sample := replay.sample(16)) is None:
            continue
        digest.update(sample.keys.tobytes() + sample.weight.numpy().tobytes())
        for name in sorted(sample.rows):
            digest.update(sample.rows[name].numpy().tobytes())
        replay.update(sample.keys, twin.rng.random(16))
    return digest.hexdigest()


@pytest.mark.slow
def test_samples_are_the_same_without_numba():
    assert HAS_NUMBA
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    command = [sys.executable, "-c", NO_NUMBA]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == fingerprint()
    assert done.stderr.count("numba cannot be imported") == 1


@pytest.mark.parametrize("word", [np.uint8, np.uint64])
def test_decoding_kernels_agree_compiled_and_uncompiled(word):
    rng = np.random.default_rng(0)
    for _ in range(20):
        size, depth, length, count = (int(rng.integers(1, most)) for most in (9, 4, 12, 6))
        rows, total = length + depth - 1, int(rng.integers(length + depth, 40))
        ends = np.cumsum(rng.integers(1, 50, (3, -(-total // size))), axis=1).astype(np.uint32)
        slots, oldest = np.sort(rng.integers(0, 3, count)), rng.integers(0, total - rows + 1, count)
        places = [np.full((count, (rows + size - 2) // size + 1), -1) for _ in range(2)]
        given = slots, oldest, rows, size, total, ends
        chosen = [kernel(*given, at) for kernel, at in zip((plan_blocks, plan_blocks.py_func), places, strict=True)]
        np.testing.assert_array_equal(*places)
        np.testing.assert_array_equal(chosen[0][0], chosen[1][0])
        assert chosen[0][1] == chosen[1][1]
        deltas = rng.integers(0, 200, (chosen[0][1], 6)).astype(word)
        alive = rng.random((count, length, depth)) < 0.7
        stacks = [np.full((count, length, depth, 6), 7, word) for _ in range(2)]
        for kernel, out in zip((undo_deltas, undo_deltas.py_func), stacks, strict=True):
            kernel(deltas, places[0], oldest % size, size, alive, out)
        np.testing.assert_array_equal(*stacks)
