"""On a GPU, the device store samples the windows of the host store, with the same priorities, and is saved like it."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from gpu_learners import EVERY_AGENT, GPU, VALUE_BASED, WITH_STATE, named
from image_learners import CPU, agent_of, replay_of

from qfleet.core.env import OBS_PREFIX
from qfleet.core.replay import Chunk
from qfleet.replay.device_priorities import DevicePriorities
from qfleet.replay.device_store import DeviceReplay
from qfleet.replay.host_store import HostReplay
from qfleet.replay.priorities import importance_exponent

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def stores(case, **options):
    """The same chunks in main memory and on the device, both of which return tensors on the device."""
    module, switches, spec = case
    agent = agent_of(module, switches, spec)
    return [replay_of(agent, spec=spec, device=GPU, store=store, **options) for store in (HostReplay, DeviceReplay)]


@pytest.mark.parametrize("case", EVERY_AGENT, ids=lambda case: "-".join(named(part) for part in case))
def test_windows_are_those_of_the_host_store(case):
    host, device = stores(case)
    sample = device.sample(64)
    starts = device.layout.starts
    leaves = sample.keys % (device._slots * starts)
    rows = host._gatherer.windows(leaves // starts, leaves % starts)
    assert rows.keys() == sample.rows.keys()
    for name, values in rows.items():
        assert values.device.type == sample.rows[name].device.type == "cuda"
        assert torch.equal(sample.rows[name], values), name
    assert (host._priorities.get(leaves) > 0).all()


@pytest.mark.parametrize("case", [VALUE_BASED[0], WITH_STATE[0]], ids=lambda case: named(case[0]))
def test_rows_gathered_one_by_one_are_those_of_all(case):
    _, device = stores(case)
    leaves, sample, _ = device.draw(32)
    everything = sample.leaves["obs"]
    row = torch.arange(32, device=GPU) % everything.shape[1]
    assert torch.equal(sample.obs(0)["obs"], everything[:, 0])
    assert torch.equal(sample.obs(row)["obs"], everything[torch.arange(32, device=GPU), row])
    assert len(leaves) == 32


def test_a_host_sample_gathers_rows_on_the_device():
    host, _ = stores(VALUE_BASED[0])
    sample = host.sample(32)
    row = torch.arange(32, device=GPU) % 4
    assert torch.equal(sample.obs(row)["obs"], sample.rows[OBS_PREFIX + "obs"][torch.arange(32, device=GPU), row])


def test_leaves_are_drawn_in_proportion_to_their_priorities():
    """A chi-squared test over 100 leaves, with 100,000 draws: 200 is 7 standard deviations above the mean of 99."""
    rng = np.random.default_rng(0)
    priorities = DevicePriorities(100, 0.6, GPU)
    wanted = rng.random(100) ** 2
    priorities.write(np.arange(100), wanted, np.ones(100, bool))
    generator, counts = torch.Generator(GPU).manual_seed(1), torch.zeros(100, device=GPU)
    for _ in range(100):
        counts += torch.bincount(priorities.draw(1000, generator)[0], minlength=100)
    expected = 100_000 * torch.from_numpy(wanted**0.6 / (wanted**0.6).sum()).to(GPU)
    assert float(((counts - expected) ** 2 / expected).sum()) < 200


def test_weights_of_a_batch_are_those_of_the_host_store():
    """(N · p) ** -β over the maximum in the batch; the maximum itself compares batches of several learners."""
    host, device = stores(VALUE_BASED[0])
    rng = np.random.default_rng(2)
    for _ in range(3):
        keys = device.sample(32).keys
        priority = rng.random(32).astype(np.float32) + 0.1
        host.update(keys, priority)
        device.update(keys, priority)
    sample = device.sample(32)
    leaves = sample.keys % (device._slots * device.layout.starts)
    value = host._priorities.get(leaves)
    np.testing.assert_allclose(device.priorities.get(leaves), value, rtol=1e-12)
    beta = importance_exponent(device._cfg, device.clock.steps)
    np.testing.assert_allclose(sample.weight.cpu(), (value / value.min()) ** -beta, rtol=1e-5)
    probability = value.min() / host._priorities.total()
    assert sample.max_weight == pytest.approx((device._size * probability) ** -beta, rel=1e-6)


def test_priorities_updated_on_the_device_are_those_of_the_host():
    host, device = stores(VALUE_BASED[0])
    at, _, _ = device.priorities.draw(32, device.rng)
    keys = np.unique(at.cpu().numpy())
    new = np.linspace(0, 3, len(keys)).astype(np.float32)
    new[3], new[5] = np.nan, 1e30
    on_device, ok = torch.from_numpy(keys).to(GPU), torch.tensor(True, device=GPU)
    before = device.priorities.get(keys)
    device.priorities.update_async(on_device, torch.from_numpy(new).to(GPU), ~ok)
    np.testing.assert_array_equal(device.priorities.get(keys), before)
    device.priorities.update_async(on_device, torch.from_numpy(new).to(GPU), ok)
    host.update(keys, new)
    np.testing.assert_allclose(device.priorities.get(keys), host._priorities.get(keys), rtol=1e-6)
    one, other = host.state_dict()["priorities"], device.state_dict()["priorities"]
    assert one["clamped"] == other["clamped"] == 3 and one["largest"] == pytest.approx(other["largest"])
    device.check_valid()


@pytest.mark.parametrize("case", [VALUE_BASED[0], WITH_STATE[1]], ids=lambda case: named(case[0]))
@pytest.mark.parametrize("to", ["host", "device", "cpu"])
def test_a_checkpoint_of_the_device_store_restores_every_store(case, to):
    _, device = stores(case)
    device.update(device.sample(32).keys, np.linspace(0.1, 2, 32))
    state = device.state_dict()
    saved = [(segment.name, io.BytesIO(b"".join(segment.blocks()))) for segment in device.segments()]
    module, switches, spec = case
    kind, place = (HostReplay, GPU) if to == "host" else (DeviceReplay, GPU if to == "device" else CPU)
    restored = replay_of(agent_of(module, switches, spec), spec=spec, device=place, store=kind, reward=0.0)
    restored.load_state_dict(state)
    restored.load_segments(saved)
    restored.check_valid()
    np.testing.assert_allclose(restored.state_dict()["leaves"], state["leaves"], rtol=1e-12)
    sample = device.sample(32) if to == "device" else None
    if sample is not None:  # the generator was saved before this draw
        again = restored.sample(32)
        np.testing.assert_array_equal(again.keys, sample.keys)
        assert torch.equal(again.weight, sample.weight)
        assert all(torch.equal(again.rows[name], values) for name, values in sample.rows.items())
    host = restored if to == "host" else None
    if host is not None:
        leaves = device.sample(32).keys % (device._slots * device.layout.starts)
        rows = host._gatherer.windows(leaves // device.layout.starts, leaves % device.layout.starts)
        assert float(rows["reward"].abs().sum()) > 0


def test_chunks_are_overwritten_by_newer_ones_while_batches_are_drawn():
    """Copies to the device are asynchronous and ordered: what is drawn after them shows the new chunk."""
    _, device = stores(VALUE_BASED[0])
    rng = np.random.default_rng(3)
    template = device._codec.unpack(device._packed(device._next - 1)).columns
    valid = np.ones(device.layout.starts, bool)
    for value in range(1, 120):
        columns = {name: values.copy() for name, values in template.items()}
        columns["reward"][:] = 100 + value
        columns["last"][:] = False
        chunk = Chunk(columns, valid)
        device.clock.count_steps(8)
        device.add(chunk, np.full(device.layout.starts, 1e6 if value % 10 == 0 else 1e-3))
        if value % 10 == 0:
            rewards = device.sample(16).rows["reward"][:, 0]
            assert float((rewards == 100 + value).float().mean()) > 0.5
            device.update(device.sample(64).keys, np.full(64, 1e-3) + 1e-4 * rng.random(64))
    device.check_valid()
