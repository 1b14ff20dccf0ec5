"""Continuous actions of any shape pass unchanged through chunker, codec and replay."""

import numpy as np
import pytest
import torch
from replay_twin import replay_for

from qfleet.core.env import Box, EnvSpec, Leaf
from qfleet.core.replay import Window
from qfleet.replay.chunker import Chunker
from qfleet.replay.codec import Codec, PackedChunk
from qfleet.replay.layout import Layout


@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (10, 8)], ids=str)
def test_actions_are_stored_without_loss(shape):
    """The last shape is large enough to be compressed."""
    size = int(np.prod(shape))
    spec = EnvSpec("x", {"obs": Leaf((1,), "float32", "vector")}, 0, box=Box(shape, (-1.0,) * size, (1.0,) * size))
    layout = Layout(spec, Window(future=2), 8)
    chunker, replay = Chunker(layout, 2), replay_for(layout)
    rng, actions = np.random.default_rng(0), []
    for t in range(60):
        action = rng.uniform(-1, 1, (2, *shape)).astype(np.float32)
        actions.append(action)
        last = np.full(2, t % 13 == 12)
        obs = {"obs": np.array([[t], [1000 + t]], np.float32)}
        zero = np.zeros(2, np.float32)
        for _, chunk in chunker.append(obs, action, zero, zero, last):
            data = Codec(layout).pack(chunk).to_bytes()
            for name, values in Codec(layout).unpack(PackedChunk.from_bytes(data, layout)).columns.items():
                np.testing.assert_array_equal(values, chunk.columns[name])
            replay.add(chunk)
        replay.clock.count_steps(2)
    sample = replay.sample(64)
    assert sample.rows["action"].shape == (64, 3, *shape) and sample.rows["action"].dtype == torch.float32
    for name, row in zip(sample.rows["obs.obs"], sample.rows["action"], strict=True):
        for seen, found in zip(name, row, strict=True):
            lane, t = divmod(int(seen), 1000)
            np.testing.assert_array_equal(found.numpy(), actions[t][lane])
