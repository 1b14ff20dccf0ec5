"""Outputs of a head by one kernel are those of torch's linear layers, dueling or not, and so are all gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from kernel_emulator import together

from qfleet.accel.kernels import bf16, value_head
from qfleet.accel.kernels.value_head_source import HEAD_SOURCE, ITEMS_PER_PARTIAL_SUM, MAX_ACTIONS
from qfleet.networks import heads
from qfleet.networks.heads import DuelingHead, Float32Linear, Head

SHORTS = "unsigned short"
SIZES = "int items, int width, int actions, int dueling, int relu"
SIGNATURES = {
    "rate": f"{SHORTS}* h, {SHORTS}* h2, {SHORTS}* wa, {SHORTS}* ba, {SHORTS}* wv, {SHORTS}* bv, float* q, {SIZES}",
    "unrate": f"float* dq, {SHORTS}* h, {SHORTS}* h2, {SHORTS}* wa, {SHORTS}* wv, {SHORTS}* dh, {SHORTS}* dh2, "
              f"float* moved, {SIZES}",
    "weigh": f"float* moved, {SHORTS}* h, {SHORTS}* h2, float* parts, {SIZES}, int share"}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return together(tmp_path_factory.mktemp("rating"), HEAD_SOURCE, SIGNATURES)


@pytest.fixture
def swift(kernels, monkeypatch):
    """What a GPU has, here."""
    monkeypatch.setattr(bf16, "compile_kernel", lambda name, source: kernels[name])
    monkeypatch.setattr(value_head, "kernels_available", lambda weight, source, *names: True)


def both(head, x, monkeypatch):
    """Values and gradients of a head at once, and of the same one in float32, by torch."""
    exact = copy.deepcopy(head).float()
    results = []
    for net, seen in ((head, x.clone()), (exact, x.float())):
        seen.requires_grad_()
        q = net(seen)
        slope = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
        results.append((q, torch.autograd.grad(q, [seen, *net.parameters()], slope)))
        monkeypatch.setattr(heads, "can_fuse_head", lambda x, output: False)
    return results


@pytest.mark.parametrize("kind", [Head, DuelingHead])
@pytest.mark.parametrize(("items", "actions", "hidden"), [
    (1, 2, ()), (ITEMS_PER_PARTIAL_SUM + 5, 6, ()), (9, 18, (16,)), (3, MAX_ACTIONS, (8,))])
def test_values_and_gradients_are_torchs(swift, monkeypatch, kind, items, actions, hidden):
    torch.manual_seed(0)
    head, x = kind(24, hidden, (actions,), "none").bfloat16(), torch.randn(items, 24).bfloat16()
    (q, grads), (q_exact, grads_exact) = both(head, x, monkeypatch)
    assert q.dtype == torch.float32
    torch.testing.assert_close(q, q_exact, rtol=1e-5 if not hidden else 0.03, atol=1e-5 if not hidden else 0.01)
    for mine, its in zip(grads, grads_exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == its.shape
        torch.testing.assert_close(mine.float(), its, rtol=2**-7 if not hidden else 0.1,
                                   atol=4e-3 if not hidden else 0.02 * float(its.abs().max()) + 0.02)


def test_what_is_not_a_number_goes_through(swift):
    head = DuelingHead(16, (8,), (3,), "none").bfloat16()
    x = torch.zeros(2, 16).bfloat16()
    x[1, 3] = torch.nan
    q = head(x)
    assert q[0].isfinite().all() and q[1].isnan().all()


def test_a_kernel_is_used_where_it_may_be(swift, monkeypatch):
    monkeypatch.setattr(heads, "fused_head", lambda *args, **kwargs: "at once")
    x = torch.zeros(4, 16).bfloat16()
    assert Head(16, (), (3,), "none").bfloat16()(x) == "at once"
    assert DuelingHead(16, (), (3,), "none").bfloat16()(x) == "at once"
    for head, seen in (
        (Float32Linear(16, MAX_ACTIONS + 1), x), (Float32Linear(12, 3), x[:, :12]),
        (Float32Linear(16, 3), x[None]), (Float32Linear(16, 3), x.float())):
        assert isinstance(head.bfloat16()(seen), torch.Tensor)
    laws = DuelingHead(16, (), (3, 5), "none").bfloat16()
    monkeypatch.setattr(heads, "can_fuse_head", lambda x, output: False)
    assert laws(x).shape == (4, 3, 5)
