"""Encoder, torsos and heads: shapes, scaling, dueling per item, one-hot, user torsos."""

import copy
import sys

import pytest
import torch
from torch import nn

from qfleet.accel.kernels.images import channels_last_layer_norm
from qfleet.core.env import Leaf
from qfleet.core.errors import UserError
from qfleet.networks.encoder import Encoder
from qfleet.networks.heads import DuelingHead, Head
from qfleet.networks.norms import ImageLayerNorm
from qfleet.networks.torsos import find_torso

IMAGE = Leaf((4, 84, 84), "uint8", "image", stack=4)


def test_nature_features_are_the_papers():
    assert Encoder({"obs": IMAGE}, "auto", "none").features == 64 * 7 * 7


def test_bytes_become_zero_to_one():
    encoder = Encoder({"obs": Leaf((1, 4, 4), "uint8", "image")}, "mlp", "none")
    out = encoder({"obs": torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)}, torch.float32)
    assert torch.allclose(out, torch.ones(2, 16))


def test_leaves_are_joined_and_categories_one_hot():
    leaves = {"grid": Leaf((1, 8, 8), "uint8", "image"), "speed": Leaf((2,), "float32", "vector"),
              "room": Leaf((2,), "int32", "category", sizes=(3, 2))}
    encoder = Encoder(leaves, "mlp", "none")
    obs = {"grid": torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "speed": torch.tensor([[0.5, -1.0]]),
           "room": torch.tensor([[2, 1]], dtype=torch.int32)}
    assert encoder(obs, torch.float32)[0, 64:].tolist() == [0.5, -1.0, 0, 0, 1, 0, 1]
    assert encoder.features == 64 + 2 + 5


def test_a_picture_normalised_as_a_row_is_normalised_as_one_group():
    norm = ImageLayerNorm(8).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    pictures = torch.randn(3, 8, 5, 6).double().to(memory_format=torch.channels_last).requires_grad_()
    rows = channels_last_layer_norm(pictures, norm.weight, norm.bias, norm.eps)
    assert rows.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(rows, norm(pictures))
    pull, inputs = torch.randn_like(rows), (pictures, norm.weight, norm.bias)
    for ours, groups in zip(torch.autograd.grad(rows, inputs, pull), torch.autograd.grad(norm(pictures), inputs, pull),
                            strict=True):
        torch.testing.assert_close(ours, groups)


@pytest.mark.parametrize("norm,count", [("none", 0), ("group", 3), ("layer", 3)])
def test_norms_follow_every_convolution_before_its_relu(norm, count):
    layers = list(find_torso("nature")((4, 84, 84), norm))
    norms = [i for i, layer in enumerate(layers) if isinstance(layer, nn.GroupNorm)]
    assert len(norms) == count
    for i in norms:
        assert isinstance(layers[i - 1], nn.Conv2d) and isinstance(layers[i + 1], nn.ReLU)
        assert layers[i].num_groups == (16 if norm == "group" else 1)


def test_dueling_is_combined_per_item_not_over_the_batch():
    torch.manual_seed(0)
    head = DuelingHead(5, (8,), (3,), "none")
    x = torch.randn(4, 5)
    together, alone = head(x), torch.cat([head(row[None]) for row in x])
    assert torch.allclose(together, alone, atol=1e-6)
    assert torch.allclose(together.mean(1, keepdim=True), head.value(head.hidden(x)), atol=1e-6)


@pytest.mark.parametrize(("shape", "lead", "axis"), [
    ((3,), (4,), 1), ((3, 6), (4,), 1), ((3,), (4, 7), 2), ((3, 6), (4, 7), 2), ((2, 2), (2,), 1)])
@pytest.mark.parametrize("hidden", [(), (8,), (8, 6)])
def test_the_mean_over_actions_is_the_value_whatever_lies_beside_them(shape, lead, axis, hidden):
    """Atoms after the actions, as c51 and qr have them, and levels before, as iqn: advantages sum to 0 over actions."""
    torch.manual_seed(0)
    head = DuelingHead(5, hidden, shape, "none")
    x = torch.randn(*lead, 5)
    q, value, advantage = head(x), head.value(head.hidden(x)), head.advantage(head.hidden(x))
    assert q.shape == (*lead, *shape)
    assert torch.allclose(q.mean(axis, keepdim=True), value, atol=1e-6)
    assert torch.allclose(q - value, advantage - advantage.mean(axis, keepdim=True), atol=1e-6)


def test_values_are_added_up_in_float32():
    torch.manual_seed(0)
    exact = DuelingHead(64, (32,), (3,), "none")
    coarse = copy.deepcopy(exact).bfloat16()
    x = torch.randn(512, 64)
    q = coarse(x.bfloat16())
    assert q.dtype == torch.float32
    assert len(q.unique()) > 1500, "bfloat16 values would coincide"
    assert torch.allclose(q, exact(x), atol=0.02)


def test_heads_without_hidden_layers():
    assert Head(5, (), (3,), "none")(torch.zeros(2, 5)).shape == (2, 3)
    assert DuelingHead(5, (), (3,), "none")(torch.zeros(2, 5)).shape == (2, 3)


def test_hidden_layers_are_applied_in_turn():
    torch.manual_seed(0)
    head, x = Head(5, (8, 6), (3,), "none"), torch.randn(4, 5)
    first, second = (layer for layer in head.hidden if isinstance(layer, nn.Linear))
    assert (first.out_features, second.out_features) == (8, 6)
    assert torch.allclose(head(x), head.q(second(first(x).relu()).relu()), atol=1e-6)


def residual(block, x):
    first, second = (layer for layer in block.modules() if isinstance(layer, nn.Conv2d))
    return x + second(first(x.relu()).relu())


def stages(torso, x):
    """IMPALA: three times a convolution, a pooling by two and two residual blocks."""
    parts = list(torso)
    for i in range(0, 12, 4):
        x = nn.functional.max_pool2d(parts[i](x), 3, 2, 1)
        x = residual(parts[i + 3], residual(parts[i + 2], x))
    return x.relu()


def plain(torso, x):
    for layer in torso:
        x = layer(x).relu() if isinstance(layer, nn.Conv2d) else x
    return x


@pytest.mark.parametrize(("name", "convolutions", "by_hand"), [
    ("nature", [(32, 8, 4), (64, 4, 2), (64, 3, 1)], plain), ("efficient", [(32, 5, 5), (64, 5, 5)], plain),
    ("small", [(32, 3, 1), (32, 3, 1)], plain), ("minatar", [(16, 3, 2), (32, 3, 2)], plain), ("mlp", [], plain),
    ("impala", [(channels, 3, 1) for channels in (16, 32, 32) for _ in range(5)], stages)])
def test_every_torso_is_a_network_of_its_own(name, convolutions, by_hand):
    """Its convolutions (channels, kernel, stride), and what they make of a picture."""
    torch.manual_seed(0)
    torso, x = find_torso(name)((2, 40, 44), "none"), torch.rand(3, 2, 40, 44)
    found = [(layer.out_channels, layer.kernel_size[0], layer.stride[0]) for layer in torso.modules()
             if isinstance(layer, nn.Conv2d)]
    assert found == convolutions
    expected = by_hand(torso if isinstance(torso, nn.Sequential) else [], x).flatten(1)
    assert torch.allclose(torso(x), expected, atol=1e-5)


def test_a_users_torso_by_module_and_attribute(tmp_path, monkeypatch):
    (tmp_path / "my_torso.py").write_text(
        "from torch import nn\ndef build(shape, norm):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(7))\n")
    monkeypatch.chdir(tmp_path)
    assert Encoder({"obs": IMAGE}, "my_torso:build", "none").features == 7


@pytest.mark.parametrize(("body", "message"), [
    ("nn.Conv2d(shape[0], 4, 3)", r"torso=mine_bad:torso returned a tensor of shape \[2, 4, 6, 6\] .*flatten\(1\)"),
    ("3", "agent.torso=mine_bad:torso built a value of type int")])
def test_a_users_torso_without_rows_of_features_is_refused(body, message, tmp_path, monkeypatch):
    (tmp_path / "mine_bad.py").write_text(f"from torch import nn\ndef torso(shape, norm):\n    return {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_bad", raising=False)
    with pytest.raises(UserError, match=message):
        Encoder({"obs": Leaf((1, 8, 8), "uint8", "image")}, "mine_bad:torso", "none")


def test_unknown_and_unfit_torsos_are_refused():
    known = "efficient, impala, minatar, mlp, nature, small"
    with pytest.raises(UserError, match=rf"not one of {known}, .*did you mean nature\?"):
        find_torso("natur")
    with pytest.raises(UserError, match="at least 36"):
        find_torso("nature")((1, 10, 5), "none")


class _Positional(nn.Module):
    """An encoder that takes its leaves in order, as tracing wants them."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, *leaves):
        return self.encoder(dict(zip(self.encoder.leaves, leaves, strict=True)), torch.float32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_encoder_traced_with_one_item_takes_any_number_of_them():
    leaves = {"grid": Leaf((1, 8, 8), "uint8", "image"), "speed": Leaf((2, 3), "float32", "vector"),
              "height": Leaf((), "float32", "vector"), "room": Leaf((), "int32", "category", sizes=(3,)),
              "doors": Leaf((2,), "int32", "category", sizes=(3, 2))}
    encoder = _Positional(Encoder(leaves, "small", "none"))

    def batch(items):
        return (torch.randint(0, 255, (items, 1, 8, 8), dtype=torch.uint8), torch.randn(items, 2, 3),
                torch.randn(items), torch.randint(0, 3, (items,), dtype=torch.int32),
                torch.randint(0, 2, (items, 2), dtype=torch.int32))

    traced = torch.jit.trace(encoder, batch(1))
    for items in (1, 3):
        seen = batch(items)
        assert torch.equal(traced(*seen), encoder(*seen)), items
