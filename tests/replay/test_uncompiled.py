"""Without numba replay is slower, and otherwise the same."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from replay_twin import Twin, layout_for, play, replay_for

from qfleet.maths.compiled import COMPILED
from qfleet.replay.chunker import Chunker
from qfleet.replay.gather import unroll
from qfleet.types import Window

ALONE = """
import sys
sys.modules["numba"] = None
import test_uncompiled
assert not test_uncompiled.COMPILED
print(test_uncompiled.fingerprint())
"""


def fingerprint() -> str:
    """A hash of everything that a fixed history of adds, samples and updates brings out."""
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
    assert COMPILED
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == fingerprint()
    assert done.stderr.count("numba cannot be imported") == 1


@pytest.mark.parametrize("word", [np.uint8, np.uint64])
def test_blocks_unroll_the_same_compiled_and_not(word):
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, depth, length = 9, int(rng.integers(1, 4)), int(rng.integers(1, 5))
        deltas = rng.integers(0, 200, (rows, 6)).astype(word)
        alive = rng.random((length, depth)) < 0.7
        first = int(rng.integers(0, rows))
        stop = int(rng.integers(first + 1, rows + 1))
        offset = int(rng.integers(0, length + depth - 1)) - first
        stop = min(stop, length + depth - 1 - offset)
        one, two = (np.full((length, depth, 6), 7, word) for _ in range(2))
        unroll(deltas, first, stop, offset, alive, one)
        unroll.py_func(deltas, first, stop, offset, alive, two)
        np.testing.assert_array_equal(one, two)
        decoded = np.bitwise_xor.accumulate(deltas, axis=0)
        for t in range(length):
            for k in range(depth):
                row = t + k - offset
                wanted = 7 if not first <= row < stop else decoded[row] if alive[t, k] else 0
                assert (one[t, k] == wanted).all()
