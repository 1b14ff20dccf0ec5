"""The parameter server in one process: alone it is Solo to the bit; what is old, broken or strange is not applied."""

import copy
import math
import threading
from functools import partial

import numpy as np
import pytest
import torch
from fakes import TOY, ListMetrics, sample_of
from shards import make_shards
from test_learner import learner_with

from qfleet.algos.dqn import Config, build
from qfleet.core.agent import ROW_MOMENTS
from qfleet.core.compute import seeded_network
from qfleet.maths.delay_compensation import compensate
from qfleet.optim.flat_params import Flat, is_finite
from qfleet.optim.optimizer import OptimizerConfig
from qfleet.optim.row_moments import RowMoments
from qfleet.sync.gradient_sync import Solo
from qfleet.sync.ps_client import ParameterServerSync
from qfleet.sync.ps_shard import (
    ParameterServerConfig,
    Push,
    PushRejected,
    Shard,
    merge_states,
    split_state,
)

NET = seeded_network(build(Config(hidden=(24, 24), n_step=1), TOY), 1)


def gradient(flat, seed):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=rng) for p in flat.parameters]


def served(shards, optimizer=None, precision=torch.float32, **cfg):
    """A network, the shards of its weights, and a rule between both."""
    flat, cfg = Flat(copy.deepcopy(NET), precision), ParameterServerConfig(shards=shards, **cfg)
    shard_clients = make_shards(flat.master, optimizer or OptimizerConfig(), cfg)
    rule = ParameterServerSync("one", shard_clients, cfg, ListMetrics())
    rule.attach(flat)
    return flat, shard_clients, rule


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("compensation", ["none", "constant", "adaptive"])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_one_worker_is_solo(shards, compensation, optimizer, precision):
    cfg = OptimizerConfig(optimizer=optimizer, learning_rate=0.01, clip_norm=3.0)
    flat, _, rule = served(shards, cfg, precision, compensation=compensation)
    alone = Flat(copy.deepcopy(NET), precision)
    solo = Solo(cfg)
    solo.attach(alone)
    for step in range(12):
        assert rule.apply(gradient(flat, step)) == solo.apply(gradient(alone, step))
    assert torch.equal(flat.master, alone.master) and torch.equal(flat.data, alone.data)
    assert rule.updates == 12


def test_a_learner_does_not_notice():
    batches = [sample_of([i + 1.0, i - 2.0]) for i in range(6)]
    solo, _, _, _ = learner_with(list(batches))
    cfg = ParameterServerConfig()
    sync = ParameterServerSync("one", make_shards(solo.flat.master, solo.cfg, cfg), cfg, ListMetrics())
    other, _, _, _ = learner_with(list(batches), context={"gradient_sync": sync})
    for learner in (solo, other):
        learner.step()
    assert torch.equal(solo.flat.master, other.flat.master) and other.updates == 6


@pytest.mark.parametrize("numbers, finite", [
    ([1.0, -2.0], True), ([3e38, 3e38, 1.0], True), ([], True), ([1.0, math.nan], False), ([math.inf, 1.0], False),
    ([math.inf, -math.inf], False), ([3e38, 3e38, -math.inf], False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_seen_and_large_numbers_are_finite(numbers, finite, dtype):
    assert is_finite(torch.tensor(numbers, dtype=dtype)) is finite


def test_nothing_that_is_not_finite_is_pushed():
    flat, shard_clients, rule = served(2)
    assert math.isnan(rule.apply(None)) and not math.isfinite(rule.apply([p * math.inf for p in gradient(flat, 0)]))
    assert [shelf.version for shelf in shard_clients] == [0, 0]


def push(shard, value=1.0, version=0, sequence=1, worker="w", norm=1.0, size=None):
    gradient = torch.full((size or len(shard.weights),), value)
    return shard.push(Push(worker, sequence, shard.epoch, version, norm, gradient))


def shard(**cfg):
    return Shard("shard 0", torch.zeros(8), OptimizerConfig(learning_rate=0.1), ParameterServerConfig(**cfg))


@pytest.mark.parametrize("wrong,message", [
    ({"value": math.nan}, "shard 0 rejects a gradient from w: it is not finite"),
    ({"norm": math.inf}, "not finite"),
    ({"size": 7}, r"its shape is \(7,\), not \(8,\)"),
    ({"version": 1}, "computed at version 1, but the newest is 0"),
])
def test_what_makes_no_sense_is_refused_by_name(wrong, message):
    one = shard()
    with pytest.raises(PushRejected, match=message):
        push(one, **wrong)
    assert one.version == 0 and one.refused == 1 and not one.weights.any() and push(one).verdict == "applied"


def test_stale_gradients_are_dropped_and_counted():
    one = shard(max_staleness=2)
    verdicts = [push(one, version=0, sequence=number).verdict for number in range(1, 6)]
    assert verdicts == ["applied"] * 3 + ["stale"] * 2
    assert one.version == 3 and one.stale == 2 and one.staleness == {0: 1, 1: 1, 2: 1, 3: 2}


def test_a_push_that_is_repeated_counts_once():
    one = shard()
    assert push(one, sequence=1).verdict == "applied" and push(one, sequence=1).verdict == "repeated"
    before = one.weights.clone()
    assert push(one, sequence=1).version == 1 and torch.equal(one.weights, before)
    assert push(one, sequence=1, worker="other").verdict == "applied"


@pytest.mark.parametrize("compensation", ["constant", "adaptive"])
def test_delay_is_compensated_with_the_weights_that_the_worker_had(compensation):
    one = shard(compensation=compensation, compensation_lambda=0.5)
    plain = shard()
    for each in (one, plain):
        each.pull("slow")
        each.pull("fast")
        for number in range(1, 4):
            push(each, sequence=number, version=each.pull("fast").version, worker="fast")
    moved = one.weights.clone()
    square = None if compensation == "constant" else one._square.clone()
    expected = compensate(torch.full((8,), 2.0), moved, torch.zeros(8), 0.5, square).gradient
    late = Push("slow", 1, one.epoch, 0, 1.0, torch.full((8,), 2.0))
    seen = []
    one.optimizer.step = lambda gradient, norm: seen.append(gradient)
    assert one.push(late).staleness == 3
    assert torch.equal(seen[0], expected) and not torch.equal(expected, torch.full((8,), 2.0))


def test_a_snapshot_is_never_torn():
    """All numbers of the shard are equal at every version, whoever reads while others write."""
    one = Shard(
        "shard 0", torch.zeros(200_000), OptimizerConfig(learning_rate=0.1, clip_norm=0), ParameterServerConfig()
    )
    torn, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            shown = one.pull("reader")
            if shown.weights.min() != shown.weights.max():
                torn.append(shown.version)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    kept = one.pull("kept")
    for number in range(1, 60):
        push(one, sequence=number, version=one.version)
    stop.set()
    for reader in readers:
        reader.join()
    assert not torn and not kept.weights.any(), "what was pulled does not change afterwards"


def test_a_restored_shard_goes_on_and_refuses_what_it_does_not_know():
    cfg = OptimizerConfig(learning_rate=0.01)
    flat, shard_clients, rule = served(2, cfg, compensation="adaptive")
    for step in range(3):
        rule.apply(gradient(flat, step))
    states = [shelf.state_dict() for shelf in shard_clients]
    for step in range(3, 6):
        rule.apply(gradient(flat, step))
    again, anew, other = served(2, cfg, compensation="adaptive")
    for shelf, state in zip(anew, states, strict=True):
        before = shelf.epoch
        shelf.load_state_dict(state)
        assert shelf.push(Push("two", 1, before, 3, 1.0, torch.ones_like(shelf.weights))).verdict == "anew"
        assert shelf.version == 3 and shelf.refused == 1
    other.load_state_dict({})
    other._sequence = 3
    for step in range(3, 6):
        other.apply(gradient(again, step))
    assert torch.equal(again.master, flat.master) and other.updates == 6


def test_a_learner_pulls_when_its_shard_was_restored_and_the_other_shards_go_on():
    flat, shard_clients, rule = served(2, pull_period_updates=1000)
    rule.apply(gradient(flat, 0))
    shard_clients[0].load_state_dict(shard_clients[0].state_dict())
    known = flat.master.clone()
    rule.apply(gradient(flat, 1))
    assert [shelf.version for shelf in shard_clients] == [1, 2] and shard_clients[0].refused == 1
    first, second = rule.shard_slices
    assert torch.equal(flat.master[first], shard_clients[0].weights) and not torch.equal(
        flat.master[first], known[first]
    )
    assert torch.equal(flat.master[second], known[second]), "nothing was pulled where nothing was lost"
    rule.apply(gradient(flat, 2))
    assert [shelf.version for shelf in shard_clients] == [2, 3] and rule.updates == 2 and rule.update_count(7, 1) == 7


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("compensation", ["none", "adaptive"])
def test_states_are_joined_and_cut_for_another_number_of_shards(shards, compensation):
    flat, shard_clients, rule = served(2, compensation=compensation)
    for step in range(4):
        rule.apply(gradient(flat, step))
    whole = merge_states([shelf.state_dict() for shelf in shard_clients])
    assert torch.equal(whole["weights"], flat.master) and whole["staleness"] == {0: 8}
    again, others, other = served(shards, compensation=compensation)
    for shelf, state in zip(others, split_state(whole, 4, shards), strict=True):
        shelf.load_state_dict(state)
    assert sum(shelf.staleness[0] for shelf in others) == 8, "counted once"
    other.load_state_dict({})
    assert torch.equal(again.master, flat.master)
    for step in range(4, 7):
        rule.apply(gradient(flat, step))
        other.apply(gradient(again, step))
    assert torch.equal(again.master, flat.master) and other.updates == 7


def test_running_figures_go_to_the_first_shard_for_those_who_begin_or_look():
    def made():
        net = copy.deepcopy(NET)
        net.register_buffer("count", torch.zeros((), dtype=torch.int64))
        return Flat(net)

    flat, cfg = made(), ParameterServerConfig(shards=2)
    shard_clients = make_shards(flat.master, OptimizerConfig(), cfg)
    rules = []
    for index, each in enumerate((flat, made())):
        rules.append(ParameterServerSync(str(index), shard_clients, cfg, ListMetrics(), first=index == 0))
        rules[index].attach(each)
    first, second = rules
    flat.set_buffers({"count": torch.tensor(7)})
    first.apply(gradient(flat, 0))
    second.apply(gradient(second.flat, 1))
    assert shard_clients[0].pull("x").buffers["count"] == 7 and not shard_clients[1].pull("x").buffers
    assert second.flat.net.count == 0, "whoever learns has its own"
    again = split_state(merge_states([shelf.state_dict() for shelf in shard_clients]), 2, 3)
    assert again[0]["buffers"]["count"] == 7 and not again[1]["buffers"]
    late = made()
    ParameterServerSync("late", shard_clients, cfg, ListMetrics(), first=False).attach(late)
    assert late.net.count == 7 and late.net.count.dtype == torch.int64


def test_running_statistics_of_rows_are_those_of_all_learners():
    """Each learner pushes what is new, and has besides what all have pushed that which it has not yet."""
    def made():
        net = copy.deepcopy(NET)
        for name, shape in zip(ROW_MOMENTS, ((), (2,), (2,)), strict=True):
            net.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        flat = Flat(net)
        return flat, RowMoments(lambda columns: columns["x"], flat, exchanged=True)

    (flat, own), (other_flat, other), cfg = made(), made(), ParameterServerConfig(shards=2)
    shards = make_shards(flat.master, OptimizerConfig(), cfg)
    shards[0].load_state_dict(shards[0].state_dict() | {"buffers": {name: flat.buffer(name).clone()
                                                                    for name in ROW_MOMENTS}})
    rules = [ParameterServerSync(str(i), shards, cfg, ListMetrics(), i == 0, partial(lambda each: each, moments))
             for i, moments in enumerate((own, other))]
    rng, rows = np.random.default_rng(0), [[], []]
    for step in range(6):
        for i, (rule, each, moments) in enumerate(zip(rules, (flat, other_flat), (own, other), strict=True)):
            if not step:
                rule.attach(each)
            new = rng.normal(50, 3, (i + 2, 2))
            moments.add({"x": new})
            rows[i].append(new)
            moments.write()
            assert float(each.buffer("row_count")) >= sum(map(len, rows[i])), "its own rows count at once"
            rule.apply(gradient(each, step))
    everything = np.concatenate([*rows[0], *rows[1]])
    buffers = shards[0].pull("x").buffers
    assert float(buffers["row_count"]) == len(everything) and not shards[1].pull("x").buffers
    np.testing.assert_allclose(buffers["row_mean"], everything.mean(0))
    np.testing.assert_allclose(buffers["row_square"] / len(everything), everything.var(0))
    other.write()
    assert all(torch.equal(other_flat.buffer(name), buffers[name]) for name in ROW_MOMENTS)


@pytest.mark.parametrize("rows", [torch.zeros(1, 4), torch.full((1, 5), math.nan), torch.zeros(5)])
def test_moments_that_make_no_sense_are_refused(rows):
    one = shard()
    one.load_state_dict(one.state_dict() | {"buffers": {"row_count": torch.zeros(()), "row_mean": torch.zeros(2),
                                                        "row_square": torch.zeros(2)}})
    with pytest.raises(PushRejected, match="moments of new rows"):
        one.push(Push("w", 1, one.epoch, 0, 1.0, torch.zeros(8), rows=rows))
    assert one.version == 0 and not one.buffers["row_mean"].any()


def test_rows_of_a_gradient_that_is_too_old_count():
    one = shard(max_staleness=0)
    one.load_state_dict(one.state_dict() | {"buffers": {"row_count": torch.zeros(()), "row_mean": torch.zeros(1),
                                                        "row_square": torch.zeros(1)}})
    row = torch.tensor([[4.0, 2.5, 1.0]], dtype=torch.float64)
    for sequence, verdict in ((1, "applied"), (2, "stale"), (2, "repeated")):
        assert one.push(Push("w", sequence, one.epoch, 0, 1.0, torch.zeros(8), rows=row)).verdict == verdict
    assert float(one.pull("w").buffers["row_count"]) == 8


@pytest.mark.parametrize("cfg", [{}, {"compress": "bf16"}, {"push_period_updates": 2, "pull_period_updates": 4}])
def test_volume_is_as_the_formula_says(cfg):
    flat, _, rule = served(3, **cfg)
    for step in range(8):
        rule.apply(gradient(flat, step))
    figures, element_bytes = rule.gauges(), 2 if rule.cfg.compress == "bf16" else 4
    assert figures["comm/bytes_per_update"] == len(flat.master) * (
        element_bytes / rule.cfg.push_period_updates + 4 / rule.cfg.pull_period_updates)
    assert figures["server/push_pull_ms"] > 0 and rule.gauges() == {}


def test_periods_average_pushes_and_space_out_pulls():
    flat, shard_clients, rule = served(2, push_period_updates=3, pull_period_updates=2)
    start = flat.master.clone()
    for step in range(3):
        rule.apply(gradient(flat, step))
        assert torch.equal(flat.master, start)
    assert [shelf.version for shelf in shard_clients] == [1, 1]
    rule.apply(gradient(flat, 3))
    assert not torch.equal(flat.master, start) and rule.updates == 1
    alone = Flat(copy.deepcopy(NET))
    solo = Solo(OptimizerConfig())
    solo.attach(alone)
    solo.apply([sum(parts) / 3 for parts in zip(*(gradient(alone, step) for step in range(3)), strict=True)])
    assert torch.allclose(flat.master, alone.master, atol=1e-7)


def test_compressed_gradients_are_off_by_a_rounding():
    flat, shard_clients, rule = served(2, compress="bf16")
    seen = []
    for shelf in shard_clients:
        shelf.optimizer.step = lambda given, norm: seen.append(given)
    rule.apply(gradient(flat, 0))
    arrived = torch.cat(seen)
    assert arrived.dtype == torch.float32
    assert ((arrived - flat.grad).abs() <= flat.grad.abs() * 2**-8).all() and not torch.equal(arrived, flat.grad)


def test_two_workers_share_the_weights_and_know_how_old_theirs_are():
    flat, shard_clients, rule = served(2)
    two = Flat(copy.deepcopy(NET))
    metrics = ListMetrics()
    other = ParameterServerSync("two", shard_clients, rule.cfg, metrics)
    other.attach(two)
    for step in range(4):
        rule.apply(gradient(flat, step))
    other.apply(gradient(two, 9))
    assert metrics.values[-1] == {"server/staleness": 4.0} and other.updates == 5
    rule.load_state_dict({})
    assert torch.equal(flat.master, two.master)
