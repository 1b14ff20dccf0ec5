"""Boards, planes and symbols are images; texts are left out."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from qfleet.config import validate
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig, make, make_space_adapter
from qfleet.envs.images import ImageFormat, channels_first
from qfleet.envs.lanes import _warn_texts
from qfleet.envs.leaf_reader import SpaceMismatch
from qfleet.envs.spaces import ObservationEncoder
from qfleet.networks.encoder import Encoder
from qfleet.runconfig.auto import with_image_symbols

BYTES = spaces.Box(0, 255, (7, 7, 3), np.uint8)


def see(space, value, image_format=ImageFormat(symbols="auto")):  # noqa: B008 (it is frozen)
    encoder = ObservationEncoder(space, image_format)
    out = encoder.allocate(1)
    encoder.write(out, 0, value)
    return encoder.leaves["obs"], out["obs"][0]


@pytest.mark.parametrize(("space", "leaf"), [
    (spaces.Box(0, 1, (10, 10, 4), np.bool_), Leaf((4, 10, 10), "uint8", "image", largest=1.0)),
    (spaces.MultiBinary((4, 10, 10)), Leaf((4, 10, 10), "uint8", "image", largest=1.0)),
    (spaces.Box(0, 1, (10, 12), np.int64), Leaf((1, 10, 12), "uint8", "image", largest=1.0)),
    (spaces.Box(-1, 1, (9, 9), np.int8), Leaf((1, 9, 9), "uint8", "image", largest=2.0, symbols=3)),
    (spaces.Box(0, 10, (7, 7, 3), np.uint8), Leaf((3, 7, 7), "uint8", "image", largest=10.0, symbols=11)),
    (spaces.Box(0, 10, (40, 40), np.uint8), Leaf((1, 40, 40), "uint8", "image", largest=10.0)),
    (spaces.Box(0, 100, (7, 7), np.int32), Leaf((1, 7, 7), "uint8", "image", largest=100.0)),
    (spaces.Box(0, 1, (10, 10, 4), np.float32), Leaf((4, 10, 10), "float32", "image")),
    (spaces.Box(-8, 8, (4, 10, 10), np.float64), Leaf((4, 10, 10), "float32", "image", largest=8.0)),
    (spaces.Box(-np.inf, np.inf, (4, 10, 10)), Leaf((4, 10, 10), "float32", "image")),
    (BYTES, Leaf((3, 7, 7), "uint8", "image")),
    (spaces.Box(0, 1, (10, 10), np.float32), Leaf((10, 10), "float32", "vector")),
    (spaces.Box(0, 1, (4, 13), np.int8), Leaf((4, 13), "float32", "vector")),
    (spaces.Box(0, 1, (10, 4, 10), np.float32), Leaf((10, 4, 10), "float32", "vector")),
    (spaces.Box(0, 300, (7, 7), np.int32), Leaf((7, 7), "float32", "vector"))], ids=str)
def test_what_an_array_of_numbers_is(space, leaf):
    value = space.sample()
    found, out = see(space, value)
    assert found == leaf
    low = int(space.low.min()) if leaf.kind == "image" and leaf.dtype == "uint8" and leaf.largest == 2 else 0
    expected = np.asarray(value, np.float64) - low
    if leaf.kind == "image":
        expected = expected[None] if expected.ndim == 2 else (
            expected if value.shape == leaf.shape else expected.transpose(2, 0, 1))
    np.testing.assert_allclose(out, expected.astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize(("shape", "first"), [
    ((10, 10, 10), False), ((10, 10, 12), False), ((12, 10, 10), True), ((210, 160, 3), False), ((3, 210, 160), True),
    ((8, 9, 8), False), ((84, 84, 1), False)])
def test_channels_are_the_odd_or_the_shortest_axis(shape, first):
    assert channels_first(shape) == first


@pytest.mark.parametrize("value", [np.full((9, 9), 3), np.zeros((9, 8), int), np.zeros((9, 9))])
def test_a_board_that_leaves_its_space_is_refused(value):
    with pytest.raises(SpaceMismatch, match="the environment gave"):
        see(spaces.Box(0, 2, (9, 9), np.int64), value)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64, np.bool_])
def test_a_board_is_counted_from_its_lowest_value_in_any_dtype(dtype):
    _, out = see(spaces.Box(-1, 1, (9, 9), np.int8), np.ones((9, 9), dtype))
    assert (out == 2).all()


def test_stacked_boards_keep_their_largest_value_and_symbols():
    stacked = ImageFormat(stack=4, symbols="auto")
    assert ObservationEncoder(spaces.MultiBinary((10, 10)), stacked).leaves["obs"].divisor == 1
    assert ObservationEncoder(spaces.Box(0, 10, (7, 7, 3), np.uint8), stacked).leaves["obs"] == Leaf(
        (12, 7, 7), "uint8", "image", stack=4, largest=10.0, symbols=11)


def test_symbols_become_planes_and_higher_ones_count_as_the_last():
    encoder = Encoder({"obs": Leaf((2, 5, 6), "uint8", "image", symbols=4)}, "mlp", "none")
    x = torch.randint(6, (3, 2, 5, 6), dtype=torch.uint8)
    planes = encoder({"obs": x}, torch.float32).unflatten(1, (2, 4, 5, 6))
    assert torch.equal(planes.argmax(2), x.clamp(max=3).long()) and (planes.sum(2) == 1).all()


@pytest.mark.parametrize(("leaf", "x", "seen"), [
    (Leaf((1, 5, 5), "uint8", "image"), 51, 0.2), (Leaf((1, 5, 5), "uint8", "image", largest=1.0), 1, 1.0),
    (Leaf((1, 5, 5), "uint8", "image", largest=10.0), 5, 0.5),
    (Leaf((1, 5, 5), "float32", "image", largest=8.0), -4.0, -0.5), (Leaf((1, 5, 5), "float32", "image"), 3.0, 3.0)])
def test_images_are_divided_by_the_largest_value_of_their_space(leaf, x, seen):
    given = torch.full((2, *leaf.shape), x, dtype=getattr(torch, leaf.dtype))
    before = given.clone()
    out = Encoder({"obs": leaf}, "mlp", "none")({"obs": given}, torch.float32)
    assert torch.allclose(out, torch.tensor(seen)) and torch.equal(given, before), "the batch itself is unchanged"


@pytest.mark.parametrize("side", [3, 7, 10, 20, 21, 36, 64])
def test_the_torso_for_boards_takes_images_of_any_size(side):
    encoder = Encoder({"obs": Leaf((2, side, side + 1), "uint8", "image", largest=1.0)}, "minatar", "none")
    assert encoder.features <= 8000


class Grid(gymnasium.Env):
    """Bytes up to `largest` after five steps; fails after `faulty` resets."""

    observation_space = spaces.Dict({"image": BYTES, "mission": spaces.Text(9)})
    action_space = spaces.Discrete(2)

    def __init__(self, largest=8, faulty=False):
        self.largest, self.faulty = largest, faulty

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        if self.faulty:
            raise RuntimeError("not today")
        return self._see(), {}

    def step(self, action):
        self.steps += 1
        return self._see(), 0.0, self.steps == 9, False, {}

    def _see(self):
        return {"image": np.full((7, 7, 3), self.largest if self.steps > 4 else 1, np.uint8), "mission": "go"}


def grid(**kwargs):
    env_kwargs = {name: kwargs.pop(name) for name in ("largest", "faulty") if name in kwargs}
    return EnvConfig(id=f"{__name__}:Grid", kwargs=env_kwargs, **kwargs)


@pytest.mark.parametrize(("largest", "symbols"), [(0, 16), (10, 16), (15, 16), (16, 32), (31, 32), (32, 0), (255, 0)])
def test_a_trial_tells_symbols_from_colours(largest, symbols):
    assert make(grid(largest=largest), 1).spec.observation["image"].symbols == symbols


def test_an_environment_that_fails_in_its_trial_is_left_to_the_run():
    assert make(grid(faulty=True), 1).spec.observation["image"].symbols == 0


def test_symbols_are_found_once_and_kept_in_the_config():
    cfg = grid()
    spec = make(cfg, 1).spec
    resolved = with_image_symbols(cfg, spec)
    assert resolved.image_symbols == {"image": 16} and with_image_symbols(resolved, spec) is resolved
    adapter = make_space_adapter(resolved, spec.spaces)
    assert adapter.encoder.leaves == spec.observation, "a stored policy reads images as it was trained to"
    assert EnvSpec.from_json(spec.to_json()) == spec
    assert with_image_symbols(grid(largest=99), make(grid(largest=99), 1).spec).image_symbols is None


@pytest.mark.parametrize(("given", "symbols"), [(None, 0), ({}, 0), ({"image": 9}, 9)])
def test_the_user_decides_what_symbols_are(given, symbols):
    assert make(grid(image_symbols=given), 1).spec.observation["image"].symbols == symbols


@pytest.mark.parametrize(("cfg", "words"), [
    ({"image_symbols": {"mission": 3}}, "names mission"),
    ({"image_symbols": {"image": 3}, "frame_size": 8}, "resizes")])
def test_symbols_of_what_is_no_image_or_resized_are_refused(cfg, words):
    with pytest.raises(UserError, match=words):
        make(grid(**cfg), 1)


def test_symbols_of_planes_of_floats_are_refused():
    with pytest.raises(UserError, match="images of whole numbers are none"):
        ObservationEncoder(spaces.Box(0, 1, (7, 7, 3), np.float32), ImageFormat(symbols={"obs": 3}))


def test_the_number_of_symbols_is_limited():
    with pytest.raises(UserError, match="image_symbols"):
        validate(EnvConfig, {"id": "x", "image_symbols": {"image": 1}}, "command line")


def test_fewer_symbols_than_a_board_has_are_warned_of():
    encoder = ObservationEncoder(spaces.Box(0, 10, (7, 7), np.uint8), ImageFormat(symbols={"obs": 8}))
    assert encoder.bounds_violation({"obs": np.full((1, 1, 7, 7), 7, np.uint8)}) is None
    assert "8 on count as 7" in encoder.bounds_violation({"obs": np.full((1, 1, 7, 7), 9, np.uint8)})


def test_a_value_beyond_the_symbols_is_warned_of_once(caplog):
    env = make(grid(largest=20, image_symbols={"image": 16}), 1)
    env.reset([1])
    for _ in range(30):
        env.send(np.zeros(1, np.int64))
        env.recv()
    assert sum("values from 16 on count as 15" in record.message for record in caplog.records) == 1


def test_texts_are_left_out_with_one_message_that_names_them(caplog):
    _warn_texts.cache_clear()
    for _ in range(2):
        assert set(make(grid(), 2).spec.observation) == {"image"}
    assert sum("mission" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Dict({"a": spaces.Text(5)})])
def test_an_observation_of_text_alone_is_refused(space):
    with pytest.raises(UserError, match="supported"):
        ObservationEncoder(space, ImageFormat())
