"""Flat parameters: same numbers as the plain network and a plain optimizer."""

import copy

import pytest
import torch
from torch import nn

from qfleet.core.errors import UserError
from qfleet.optim.flat_params import Flat
from qfleet.sync.gradient_sync import OptimizerConfig, Solo


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


class CentredRMSProp(torch.optim.Optimizer):
    """Mnih et al. 2015, parameter by parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self):
        for p, (mean, square) in zip(self.param_groups[0]["params"], self.moments, strict=True):
            mean.mul_(0.95).add_(p.grad, alpha=0.05)
            square.mul_(0.95).add_(p.grad**2, alpha=0.05)
            p -= 1e-2 * p.grad / (square - mean**2 + 1e-2).sqrt()


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_solo_equals_the_plain_optimizer(optimizer):
    plain = network()
    flat = Flat(copy.deepcopy(plain))
    solo = Solo(OptimizerConfig(optimizer=optimizer, learning_rate=1e-2, clip_norm=0.5, optimizer_eps=1e-2))
    solo.attach(flat)
    if optimizer == "adam":
        reference = torch.optim.Adam(plain.parameters(), 1e-2, eps=1e-2)
    else:
        reference = CentredRMSProp(plain.parameters())
    for seed in range(10):
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(seed))
        reference.zero_grad()
        (plain(x) - 5).square().mean().backward()
        expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        reference.step()
        grads = torch.autograd.grad((flat.net(x) - 5).square().mean(), flat.parameters)
        assert solo.apply(grads) == pytest.approx(expected, rel=1e-4)
    for name, value in plain.state_dict().items():
        assert torch.allclose(flat.net.state_dict()[name].float(), value.float(), atol=1e-5), name


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_gradient_that_never_changes_gives_no_nan(optimizer):
    flat = Flat(nn.Linear(30, 30))
    solo = Solo(OptimizerConfig(optimizer=optimizer, learning_rate=1e-5, clip_norm=0))
    solo.attach(flat)
    grads = [torch.rand(p.shape, generator=torch.Generator().manual_seed(1)) for p in flat.parameters]
    for _ in range(2000):
        solo.apply(grads)
    assert torch.isfinite(flat.master).all()


def test_frozen_layers_stay_and_a_network_without_parameters_is_refused():
    net = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))
    flat = Flat(net)
    solo = Solo(OptimizerConfig(learning_rate=0.1))
    solo.attach(flat)
    before = flat.state()
    solo.apply([None, None, *torch.autograd.grad(flat.net(torch.ones(2, 3)).sum(), flat.parameters[2:])])
    assert torch.equal(before["0.weight"], flat.state()["0.weight"])
    assert not torch.equal(before["1.weight"], flat.state()["1.weight"])
    with pytest.raises(UserError, match="no parameters"):
        Flat(nn.Flatten())


def test_running_statistics_keep_their_precision():
    flat = Flat(network(), torch.bfloat16)
    assert flat.state()["2.running_mean"].dtype == torch.float32


def test_a_gradient_that_is_not_finite_changes_nothing():
    flat = Flat(network())
    solo = Solo(OptimizerConfig())
    solo.attach(flat)
    before = flat.master.clone()
    norm = solo.apply([torch.full_like(parameter, float("nan")) for parameter in flat.parameters])
    assert norm != norm
    assert torch.equal(flat.master, before)


def test_a_parameter_that_took_no_part_stays():
    flat = Flat(network())
    solo = Solo(OptimizerConfig())
    solo.attach(flat)
    before = flat.state()
    solo.apply([torch.ones(8, 3)] + [None] * 5)
    after = flat.state()
    assert torch.equal(before["3.weight"], after["3.weight"])
    assert not torch.equal(before["0.weight"], after["0.weight"])


def test_bfloat16_computes_beside_float32_masters():
    flat = Flat(network(), torch.bfloat16)
    assert next(flat.net.parameters()).dtype == torch.bfloat16 and flat.master.dtype == torch.float32
    flat.master += 1e-4
    flat.copy_to_network()
    assert torch.equal(flat.data, flat.master.bfloat16())
    assert all(value.dtype == torch.float32 for name, value in flat.state().items() if "weight" in name)


def test_state_round_trip_and_refusals():
    one, other = Flat(network()), Flat(network())
    one.master.normal_()
    other.load(one.state())
    assert torch.equal(one.master, other.master)
    state = one.state()
    state["0.weight"] = torch.zeros(8, 4)
    with pytest.raises(ValueError, match=r"0.weight are \(8, 4\), not \(8, 3\)"):
        other.load(state)
    with pytest.raises(ValueError, match="extra"):
        other.load(one.state() | {"extra": torch.zeros(1)})


def test_optional_buffers_may_be_missing_and_stay_as_they_are():
    one, other = Flat(network()), Flat(network())
    one.master.normal_()
    other.set_buffers({"2.running_mean": torch.full((8,), 5.0)})
    state = one.state()
    del state["2.running_mean"]
    with pytest.raises(ValueError, match="running_mean"):
        other.load(state)
    other.load(state, ("2.running_mean",))
    assert torch.equal(one.master, other.master) and (other.buffer("2.running_mean") == 5).all()
    other.load(one.state(), ("2.running_mean",))
    assert (other.buffer("2.running_mean") == 0).all()


def test_a_state_is_a_copy():
    flat = Flat(network())
    state = flat.state()
    flat.master.fill_(7)
    assert not (state["0.weight"] == 7).any()


def test_follow_copies_or_moves_part_of_the_way():
    online, target = Flat(network()), Flat(network())
    online.master.fill_(1.0)
    target.master.fill_(0.0)
    target.polyak_update(online, 0.25)
    assert torch.allclose(target.master, torch.tensor(0.25))
    target.polyak_update(online)
    assert torch.equal(target.master, online.master)
