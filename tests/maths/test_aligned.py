"""Where an array lies in memory decides nothing."""

import numpy as np
import pytest
import torch

from qfleet.maths.aligned import aligned_tensor


def at(offset, values):
    """The same values, beginning `offset` bytes after a multiple of 64."""
    room = np.empty(values.nbytes + 128, np.uint8)
    first = -room.ctypes.data % 64 + offset
    placed = room[first:first + values.nbytes].view(values.dtype).reshape(values.shape)
    placed[:] = values
    assert placed.ctypes.data % 64 == offset
    return placed


@pytest.mark.parametrize("offset", range(0, 64, 4))
def test_floats_begin_at_a_multiple_of_64_bytes(offset):
    values = np.arange(30, dtype=np.float32).reshape(5, 6)
    tensor = aligned_tensor(at(offset, values))
    assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
    np.testing.assert_array_equal(tensor.numpy(), values)
    columns = aligned_tensor(at(offset, values)[:, 1:3])
    assert columns.data_ptr() % 64 == 0
    np.testing.assert_array_equal(columns.numpy(), values[:, 1:3])


def test_what_is_converted_anyway_is_not_copied():
    pictures = at(8, np.arange(64, dtype=np.uint8))
    assert aligned_tensor(pictures).data_ptr() == pictures.ctypes.data
    assert aligned_tensor(at(0, np.ones(3, np.float32))).data_ptr() % 64 == 0


@pytest.mark.parametrize(("rows", "columns", "wide"), [(1, 50, 16), (2, 50, 16), (8, 16, 3), (32, 64, 2)])
def test_a_layer_gives_the_same_bits_wherever_its_input_lies(rows, columns, wide):
    """Without the copy, these shapes differ in the last bits on processors seen: by where x begins, modulo 16 bytes."""
    rng = np.random.default_rng(0)
    layer = torch.nn.Linear(columns, wide)
    values = rng.normal(size=(rows, columns)).astype(np.float32)
    with torch.inference_mode():
        found = {layer(aligned_tensor(at(offset, values))).numpy().tobytes() for offset in range(0, 64, 4)}
    assert len(found) == 1
