"""State trees survive JSON and safetensors bit by bit; what cannot be saved is refused by name."""

from __future__ import annotations

import json
import math
import random
import struct

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.runs import state_tree


def same(a, b) -> bool:
    """Equal in type, dtype, shape and bits, all the way down; order of keys included."""
    if isinstance(a, torch.Tensor):
        return type(b) is type(a) and a.dtype == b.dtype and same_bits(as_numpy(a), as_numpy(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and list(map(type, a)) == list(map(type, b)) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and same_bits(np.asarray(a), np.asarray(b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    return a == b


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def through_files(value):
    document, arrays = state_tree.pack(value)
    text, data = json.dumps(document, allow_nan=False), safetensors.torch.save(arrays)
    return state_tree.unpack(json.loads(text), safetensors.torch.load(data))


DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
          "float16", "float32", "float64"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(min_value=2**63, max_value=2**200), st.floats(), st.text(),
    ARRAYS, ARRAYS.map(lambda array: torch.from_numpy(array.copy())),
    hnp.arrays("float32", 3).map(lambda array: torch.from_numpy(array).to(torch.bfloat16)),
    st.sampled_from(DTYPES).map(lambda dtype: np.dtype(dtype).type(1)))
KEYS = st.one_of(st.text(), st.integers(), st.sampled_from(["$tensor", "$items", "$", "0", 0]))
TREES = st.recursive(LEAVES, lambda children: st.one_of(
    st.lists(children, max_size=3), st.lists(children, max_size=3).map(tuple),
    st.dictionaries(KEYS, children, max_size=3)), max_leaves=8)


@settings(deadline=None)
@given(TREES)
def test_a_tree_survives(value):
    assert same(through_files(value), value)


@pytest.mark.parametrize("make", [
    lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
])
def test_an_optimizer_continues_bitwise(make):
    torch.manual_seed(0)
    nets = [torch.nn.Linear(3, 2) for _ in range(2)]
    optimizers = [make(net.parameters()) for net in nets]
    inputs = torch.randn(5, 4, 3)

    def update(net, optimizer, x):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()

    for x in inputs[:3]:
        update(nets[0], optimizers[0], x)
    saved = through_files({"net": dict(nets[0].state_dict()), "optimizer": optimizers[0].state_dict()})
    assert same(saved["optimizer"], optimizers[0].state_dict())
    nets[1].load_state_dict(saved["net"])
    optimizers[1].load_state_dict(saved["optimizer"])
    for x in inputs[3:]:
        for net, optimizer in zip(nets, optimizers, strict=True):
            update(net, optimizer, x)
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_a_numpy_generator_continues(kind):
    generator, other = np.random.Generator(kind(7)), np.random.Generator(kind(8))
    generator.integers(0, 100, 7, dtype=np.uint8)
    other.bit_generator.state = through_files(generator.bit_generator.state)
    assert np.array_equal(generator.normal(size=50), other.normal(size=50))


def test_python_and_torch_generators_continue():
    generator, torch_generator = random.Random(3), torch.Generator().manual_seed(3)
    saved = through_files({"python": generator.getstate(), "torch": torch_generator.get_state()})
    other, torch_other = random.Random(4), torch.Generator()
    other.setstate(saved["python"])
    torch_other.set_state(saved["torch"])
    assert [generator.random() for _ in range(9)] == [other.random() for _ in range(9)]
    assert torch.equal(torch.rand(9, generator=torch_generator), torch.rand(9, generator=torch_other))


def test_what_is_read_can_be_written_to():
    out = through_files({"array": np.zeros(3), "tensor": torch.zeros(3)})
    out["array"][0] = 1
    out["tensor"][0] = 1
    assert out["array"][0] == out["tensor"][0] == 1


def test_only_what_is_equal_in_every_bit_is_kept_once():
    zeros = {"a": torch.zeros(2), "b": np.zeros(2, np.float32), "scalar": np.float32(0), "negative": -torch.zeros(2),
             "shape": torch.zeros(2, 1), "dtype": torch.zeros(2, dtype=torch.int32), "none": torch.zeros(0),
             "nan": [torch.tensor([math.nan])] * 2, "half": torch.zeros(2, dtype=torch.bfloat16)}
    document, arrays = state_tree.pack(zeros)
    assert document["b"] == {"$array": document["a"]["$tensor"]} and document["nan"][0] == document["nan"][1]
    assert len(arrays) == 8 and same(state_tree.unpack(document, arrays), zeros)


def test_what_is_known_elsewhere_is_named_and_not_kept():
    document, arrays = state_tree.pack({"mine": torch.ones(2), "yours": torch.ones(3)}, {"policy:w": torch.ones(3)})
    assert document["yours"] == {"$tensor": "policy:w"} and len(arrays) == 1
    assert state_tree.unpack(document, arrays | {"policy:w": torch.ones(3)})["yours"].tolist() == [1, 1, 1]


def test_packing_copies_and_takes_views_and_shared_memory():
    base = torch.arange(6.0).reshape(2, 3)
    document, arrays = state_tree.pack({"whole": base, "view": base.T, "again": base, "strided": np.arange(9)[::-2]})
    base.zero_()
    out = state_tree.unpack(document, safetensors.torch.load(safetensors.torch.save(arrays)))
    assert torch.equal(out["view"], torch.arange(6.0).reshape(2, 3).T)
    assert torch.equal(out["again"], out["whole"])
    assert out["strided"].tolist() == [8, 6, 4, 2, 0]


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j, np.array([object()]), np.array(["text"]),
                                   np.array([1.0], dtype=">f4"), {1.5: 0}, {True: 0}, {None: 0}])
def test_what_cannot_be_saved_is_named(value):
    with pytest.raises(TypeError, match="state/learner/x"):
        state_tree.pack({"learner": {"x": value}})


@pytest.mark.parametrize("document", [
    {"$float": "0.5"}, {"$float": []}, {"$tensor": "absent"}, {"$array": 3}, {"$tensor": ["a"]}, {"$tuple": {"a": 1}},
    {"$items": [[1]]}, {"$items": [[[], 1]]}, {"$items": [3]}, {"$items": "ab"}, {"$eval": "print"},
    {"$tensor": "a", "b": 1}, [{"deep": {"$unknown": 0}}],
])
def test_a_forged_document_is_refused(document):
    with pytest.raises(ValueError):
        state_tree.unpack(document, {"a": torch.zeros(1)})
