"""The layout of a GPU's copy of the weights holds the same numbers in other places."""

import torch

from qfleet.accel.kernels.aligned import PARAM_ALIGNMENT, aligned_views, gather_index, scatter_index

SHAPES = [torch.Size(shape) for shape in [(5, 3, 4, 2), (5,), (1,), (7, 9), (2, 2, 1, 1)]]


def test_every_number_is_where_its_parameter_has_it():
    size = sum(shape.numel() for shape in SHAPES)
    master = torch.randn(size, generator=torch.Generator().manual_seed(0))
    order = gather_index(SHAPES)
    rooms = aligned_views(master.index_select(0, order), SHAPES)
    for room, plain, shape in zip(rooms, master.split([shape.numel() for shape in SHAPES]), SHAPES, strict=True):
        assert room.shape == shape and torch.equal(room, plain.view(shape))
        assert room.storage_offset() % PARAM_ALIGNMENT == 0
    assert torch.equal(order[scatter_index(SHAPES).long()], torch.arange(size))
    assert rooms[0].is_contiguous(memory_format=torch.channels_last)
    assert len(order) % PARAM_ALIGNMENT == 0 and sorted(set(order.tolist())) == list(range(size))
