"""Every kind of space becomes the leaves it should, and what does not fit its space is found."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from qfleet.core.env import Leaf
from qfleet.core.errors import UserError
from qfleet.envs.images import ImageFormat
from qfleet.envs.leaf_reader import SpaceMismatch
from qfleet.envs.spaces import FrameStack, ObservationEncoder, make_action_decoder

PLAIN = ImageFormat()


def see(space, value, view=PLAIN):
    eyes = ObservationEncoder(space, view)
    out = eyes.allocate(2)
    eyes.write(out, 1, value)
    return eyes.leaves, {name: array[1] for name, array in out.items()}


def test_vector():
    leaves, out = see(spaces.Box(-1, 1, (2, 3), np.float64), np.arange(6.0).reshape(2, 3) / 10)
    assert leaves == {"obs": Leaf((2, 3), "float32", "vector")}
    assert out["obs"].dtype == np.float32
    np.testing.assert_allclose(out["obs"], np.arange(6).reshape(2, 3) / 10, rtol=1e-6)


def test_scalar_box_is_a_vector_of_one():
    leaves, out = see(spaces.Box(0, 5, (), np.float32), 3.0)
    assert leaves["obs"].shape == (1,) and out["obs"].tolist() == [3.0]


@pytest.mark.parametrize("shape, leaf", [
    ((8, 9), (1, 8, 9)), ((8, 9, 3), (3, 8, 9)), ((3, 8, 9), (3, 8, 9)), ((8, 9, 1), (1, 8, 9)),
    ((4, 84, 84), (4, 84, 84)),
])
def test_images_are_channel_first(shape, leaf):
    raw = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    leaves, out = see(spaces.Box(0, 255, shape, np.uint8), raw)
    assert leaves == {"obs": Leaf(leaf, "uint8", "image")}
    channel = np.argmin(shape) if len(shape) == 3 else None
    expected = raw[None] if channel is None else np.moveaxis(raw, channel, 0)
    np.testing.assert_array_equal(out["obs"], expected)


def test_bytes_that_are_no_image_are_a_vector():
    assert see(spaces.Box(0, 255, (128,), np.uint8), np.full(128, 7, np.uint8))[0]["obs"].kind == "vector"
    assert see(spaces.Box(0, 3, (8, 4), np.uint8), np.ones((8, 4), np.uint8))[0]["obs"].kind == "vector"


def test_several_images_at_once_are_refused_with_the_remedy():
    with pytest.raises(UserError, match=r"env\.stack"):
        ObservationEncoder(spaces.Box(0, 255, (4, 84, 84, 3), np.uint8), ImageFormat())


def test_categories_count_from_zero():
    leaves, out = see(spaces.Discrete(5, start=3), 7)
    assert leaves == {"obs": Leaf((1,), "int32", "category", (5,))} and out["obs"].tolist() == [4]
    leaves, out = see(spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]), np.array([[1, 3], [2, 7]]))
    assert leaves["obs"].sizes == (2, 3, 4, 5) and out["obs"].tolist() == [1, 2, 0, 4]


def test_multi_binary_is_a_vector():
    leaves, out = see(spaces.MultiBinary(3), np.array([1, 0, 1], np.int8))
    assert leaves["obs"].kind == "vector" and out["obs"].tolist() == [1, 0, 1]


def test_nested_parts_are_named_by_their_path():
    space = spaces.Dict({
        "a": spaces.Dict({"b": spaces.Discrete(2)}),
        "c": spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.Box(0, 255, (5, 6), np.uint8))),
    })
    raw = {"a": {"b": 1}, "c": (np.array([0.5, 1], np.float32), np.full((5, 6), 9, np.uint8))}
    leaves, out = see(space, raw)
    assert {name: leaf.kind for name, leaf in leaves.items()} == {"a.b": "category", "c.0": "vector", "c.1": "image"}
    assert out["a.b"].tolist() == [1] and out["c.0"].tolist() == [0.5, 1] and (out["c.1"] == 9).all()


@pytest.mark.parametrize("space", [
    spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), spaces.Graph(spaces.Box(0, 1, (1,)), None), spaces.Dict({}),
    spaces.Dict({"a.b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}),
    spaces.Dict({"x": spaces.Text(5)}),
])
def test_other_spaces_are_refused_with_what_is_supported(space):
    with pytest.raises(UserError, match="supported: Box"):
        ObservationEncoder(space, ImageFormat())


@pytest.mark.parametrize("space, raw, words", [
    (spaces.Box(0, 1, (3,)), np.zeros(4), r"\(3,\).*\(4,\)"),
    (spaces.Box(0, 1, (3,)), None, "cannot be read|gave object"),
    (spaces.Box(0, 1, (3,)), np.array(["a", "b", "c"]), "gave <U1"),
    (spaces.Box(0, 255, (8, 8), np.uint8), np.zeros((8, 8)), "float64"),
    (spaces.Discrete(3), 3, "outside the space"),
    (spaces.Discrete(3), 0.5, "float64"),
    (spaces.MultiDiscrete([2, 2]), np.array([0, -1]), "outside the space"),
    (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}, "'a' cannot be read"),
])
def test_misfits(space, raw, words):
    eyes = ObservationEncoder(space, ImageFormat())
    with pytest.raises(SpaceMismatch, match=words):
        eyes.write(eyes.allocate(1), 0, raw)


def test_read_only_and_strided_arrays_are_taken():
    raw = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    raw.flags.writeable = False
    assert see(spaces.Box(0, 20, (3, 2)), raw)[1]["obs"].tolist() == raw.tolist()


@given(st.lists(st.sampled_from([0.0, 1.5, 3e38, -3e38, np.nan, np.inf, -np.inf]), min_size=6, max_size=6))
def test_finite_agrees_with_the_naive_test(values):
    eyes = ObservationEncoder(spaces.Box(-np.inf, np.inf, (2,)), ImageFormat())
    obs = {"obs": np.array(values, np.float32).reshape(3, 2)}
    naive = [i for i, row in enumerate(obs["obs"]) if not np.isfinite(row).all()]
    assert eyes.all_finite(obs) == (not naive) and eyes.nonfinite_lanes(obs).tolist() == naive


def test_bounds_are_watched():
    eyes = ObservationEncoder(
        spaces.Box(np.array([0, -np.inf], np.float32), np.array([1, np.inf], np.float32)), ImageFormat()
    )
    assert eyes.bounds_violation({"obs": np.array([[0.5, 1e9]], np.float32)}) is None
    assert "'obs'" in eyes.bounds_violation({"obs": np.array([[1.5, 0]], np.float32)})


def test_shrunk_images_are_grey_squares():
    pytest.importorskip("cv2")
    raw = np.zeros((20, 10, 3), np.uint8)
    raw[:, :, 1] = 200
    leaves, out = see(spaces.Box(0, 255, raw.shape, np.uint8), raw, ImageFormat(size=5))
    assert leaves["obs"].shape == (1, 5, 5) and abs(int(out["obs"][0, 2, 2]) - 117) <= 1  # 0.587 of green
    leaves, out = see(spaces.Box(0, 255, raw.shape, np.uint8), raw, ImageFormat(size=5, grey=False))
    assert leaves["obs"].shape == (3, 5, 5) and out["obs"][:, 2, 2].tolist() == [0, 200, 0]
    first = raw.transpose(2, 0, 1)
    _, same = see(spaces.Box(0, 255, first.shape, np.uint8), first, ImageFormat(size=5, grey=False))
    assert (same["obs"] == out["obs"]).all()


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=1, max_size=12), st.integers(2, 4))
def test_stack_equals_a_naive_twin(fresh_rows, depth):
    leaf = Leaf((2 * depth, 1, 1), "uint8", "image", stack=depth)
    stack = FrameStack({"obs": leaf, "other": Leaf((1,), "float32", "vector")}, 2)
    episodes = [[], []]
    for t, fresh in enumerate([[True, True], *fresh_rows]):
        frames = np.array([[10 * t + 1, 10 * t + 2], [10 * t + 3, 10 * t + 4]], np.uint8).reshape(2, 2, 1, 1)
        out = stack.push({"obs": frames, "other": np.zeros((2, 1), np.float32)}, np.array(fresh))
        for lane in range(2):
            episodes[lane] = [] if fresh[lane] else episodes[lane]
            episodes[lane].append(frames[lane].ravel().tolist())
            padded = [[0, 0]] * depth + episodes[lane]
            assert out["obs"][lane].ravel().tolist() == [byte for frame in padded[-depth:] for byte in frame]
        assert set(out) == {"obs", "other"}


def test_stack_needs_an_image():
    with pytest.raises(UserError, match=r"env\.stack=4"):
        ObservationEncoder(spaces.Box(0, 1, (3,)), ImageFormat(stack=4))


def test_discrete_actions_keep_their_start():
    actions = make_action_decoder(spaces.Discrete(4, start=-2), 10)
    assert actions.n == 4 and [actions.decode(a) for a in range(4)] == [-2, -1, 0, 1]


def test_multi_discrete_actions_are_flattened_to_every_combination():
    space = spaces.MultiDiscrete([2, 3], start=[5, 0])
    actions = make_action_decoder(space, 6)
    decoded = [actions.decode(a) for a in range(actions.n)]
    assert [tuple(action) for action in decoded] == [(5, 0), (5, 1), (5, 2), (6, 0), (6, 1), (6, 2)]
    assert all(space.contains(action) for action in decoded)
    decoded[0][:] = 99  # an environment that scribbles on its action changes nothing
    assert actions.decode(0).tolist() == [5, 0]
    with pytest.raises(UserError, match=r"6 combinations.*max_action_combinations=5"):
        make_action_decoder(space, 5)


@pytest.mark.parametrize(("shape", "dtype"), [((), np.float32), ((3,), np.float64), ((2, 2), np.float32)])
def test_a_box_is_scaled_from_plus_minus_one(shape, dtype):
    space = spaces.Box(-0.1, 0.7, shape, dtype)
    actions = make_action_decoder(space, 100)
    assert actions.box.shape == shape and actions.box.size == max(1, int(np.prod(shape))) and actions.n == 0
    for unit, expected in ((-1, -0.1), (0, 0.3), (1, 0.7)):
        decoded = actions.decode(np.full(shape, unit, np.float32))
        assert space.contains(decoded), "in the space's own numbers, bounds included"
        np.testing.assert_allclose(decoded, np.full(shape, expected), atol=1e-6)


@pytest.mark.parametrize("high", [np.inf, np.array([1, np.inf], np.float32)])
def test_a_box_without_bounds_is_refused(high):
    space = spaces.Box(np.full(2, -1, np.float32), np.broadcast_to(np.float32(high), 2).astype(np.float32))
    with pytest.raises(UserError, match=r"has no bounds.*env\.wrappers"):
        make_action_decoder(space, 100)


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,), np.int32), spaces.Tuple((spaces.Discrete(2),)),
                                   spaces.MultiBinary(2)])
def test_other_actions_are_refused(space):
    with pytest.raises(UserError, match="supported: Discrete"):
        make_action_decoder(space, 100)
