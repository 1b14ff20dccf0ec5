"""Optimizers: torch.optim is the oracle; AdamW and the user's are the same alone, with ranks and with a server."""

import copy

import pytest
import torch
from fakes import TOY, ListMetrics, toy_batch
from shards import make_shards
from test_learner import learner_with
from thread_peers import Roundtable, ThreadRank

from qfleet.algos import ddpg, dqn
from qfleet.core.env import Box, EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.learner.learner import LearnerConfig
from qfleet.optim.flat_params import Flat
from qfleet.optim.optimizer import (
    Optimizer,
    ParamShape,
    ParamSlice,
    param_shapes_of,
    param_slices_of,
    shapes_within,
    split_evenly,
)
from qfleet.optim.torch_optimizer import TorchOptimizer, check_optimizer, make_optimizer, state_kinds
from qfleet.sync.allreduce import AllReduce, RankLink
from qfleet.sync.ps_client import ParameterServerSync
from qfleet.sync.ps_shard import ParameterServerConfig, merge_states, split_state
from qfleet.transport.shard_service import pack_shard, unpack_shard

DQN = dqn.build(dqn.Config(hidden=(24, 24), n_step=1, dueling=True), TOY)
CONTROL = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, 0, box=Box((1,), (-2.0,), (2.0,)))
TD3 = ddpg.build(ddpg.Config(hidden=(24, 24), twin=True, smoothing=0.2, policy_delay=2, policy_rate=0.3), CONTROL)
ELEMENTWISE = {
    "torch.optim:NAdam": {}, "torch.optim:RAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "torch.optim:SGD": {"momentum": 0.9, "nesterov": True}, "torch.optim:Adagrad": {}, "torch.optim:Rprop": {},
    "torch.optim:AdamW": {"betas": [0.8, 0.9], "amsgrad": True}, "torch.optim:ASGD": {},
    "test_optimizers:Numbers": {"factor": 0.3}}
WHOLE = {"torch.optim:Adafactor": {}, "test_optimizers:Shared": {}}
LATE = "test_optimizers:Late"


class Numbers(torch.optim.Optimizer):
    """State of Python numbers, and of one whole number as a tensor."""

    def __init__(self, params, lr, factor=0.5):
        super().__init__(params, {"lr": lr, "factor": factor})

    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                state.setdefault("made", 0)
                state.setdefault("drift", 1.0)
                state.setdefault("calls", torch.zeros((), dtype=torch.int64))
                state["made"] += 1
                state["drift"] *= 0.9
                state["calls"] += 1
                each.sub_(each.grad, alpha=group["lr"] * group["factor"] * state["drift"] / state["made"])


class Shared(torch.optim.SGD):
    """Keeps a number for all parameters of a group."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["seen"] = 0.0

    def step(self):
        for group in self.param_groups:
            group["seen"] += sum(float(each.grad.norm()) for each in group["params"])
            group["lr"] = group["lr"] / (1 + group["seen"])
        super().step()


class Late(torch.optim.SGD):
    """Keeps a copy of the weights from its third step on, and returns halfway to it."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["made"] = state.get("made", 0) + 1
                if state["made"] == 3:
                    state["copy"] = each.clone()
                elif "copy" in state:
                    each.lerp_(state["copy"], 0.5)


def config(optimizer, options=None, **more):
    return LearnerConfig(optimizer=optimizer, optimizer_options=options or {}, **{"learning_rate": 0.02, **more})


def trained_by_torch(net, make, steps=10):
    """Parameters of a copy of `net` after some steps with random gradients."""
    mine = copy.deepcopy(net)
    optimizer = make(mine)
    for step in range(steps):
        rng = torch.Generator().manual_seed(step)
        for each in mine.parameters():
            each.grad = torch.randn(each.shape, generator=rng)
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in mine.parameters()])


def flat_of(net, cfg, groups=None):
    flat = Flat(copy.deepcopy(net), groups=groups or {})
    return flat, make_optimizer(cfg, flat.master, flat.param_slices, flat.param_shapes)


def trained_flat(flat, optimizer, first=0, steps=10):
    for step in range(first, first + steps):
        rng = torch.Generator().manual_seed(step)
        optimizer.step(torch.cat([torch.randn(shape, generator=rng).flatten() for shape in flat.shapes.values()]), 0.0)
    return flat.master


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_is_torchs_and_decays_matrices_only(decay):
    net, cfg = DQN.network(), config("adamw", weight_decay=decay, optimizer_eps=1e-5)

    def make(mine):
        groups = [{"params": [p for p in mine.parameters() if (p.ndim > 1) == matrix],
                   "weight_decay": decay * matrix} for matrix in (True, False)]
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-5)

    found = trained_flat(*flat_of(net, cfg))
    torch.testing.assert_close(found, trained_by_torch(net, make), rtol=0, atol=1e-6)
    adam = trained_flat(*flat_of(net, config("adam", optimizer_eps=1e-5)))
    assert torch.equal(found, adam) == (decay == 0)


def test_frozen_parameters_and_resting_groups_do_not_decay():
    net = DQN.network()
    next(net.parameters()).requires_grad_(False)
    shapes = param_shapes_of(net)
    assert not shapes[0].decays and not shapes[0].trained
    flat = Flat(net)
    optimizer = make_optimizer(config("adamw", weight_decay=0.5), flat.master, (), flat.param_shapes)
    before = flat.master.clone()
    optimizer.step(torch.zeros_like(flat.master), 0.0)
    changed = {index for index, each in enumerate(shapes)
               if not torch.equal(flat.master[each.span], before[each.span])}
    assert changed == {index for index, each in enumerate(shapes) if each.decays} and len(changed) == 4
    flat, optimizer = flat_of(TD3.network(), config("adamw", weight_decay=0.5), TD3.param_groups)
    policy, before = flat.param_slices[0].span, flat.master.clone()
    moved = []
    for _ in range(2):
        optimizer.step(torch.zeros_like(flat.master), 0.0)
        moved.append(not torch.equal(flat.master[policy], before[policy]))
    assert moved == [False, True]
    expected = before[policy] * (1 - 0.02 * 0.5 * 0.3)
    torch.testing.assert_close(flat.master[policy], expected)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_an_optimizer_by_name_is_torchs_to_the_bit(name):
    options, net = (ELEMENTWISE | WHOLE)[name], DQN.network()
    flat, optimizer = flat_of(net, config(name, options))
    assert isinstance(optimizer, TorchOptimizer) and (optimizer.kinds is None) == (name in WHOLE)
    kind = getattr(torch.optim, name.partition(":")[2], None) or globals()[name.partition(":")[2]]
    if name == "test_optimizers:Shared":
        kind = type("Same", (Shared,), {})

    def make(mine):
        made = kind(list(mine.parameters()), lr=0.02, **options)

        class Fixed:
            def step(self):
                for group in made.param_groups:
                    group["lr"] = 0.02
                with torch.no_grad():
                    made.step()

        return Fixed()

    assert torch.equal(trained_flat(flat, optimizer), trained_by_torch(net, make))


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE, LATE])
def test_a_restored_optimizer_continues_to_the_bit(name):
    agent = TD3 if name in ELEMENTWISE else DQN
    cfg, net = config(name, (ELEMENTWISE | WHOLE).get(name)), agent.network()
    whole = trained_flat(*flat_of(net, cfg, agent.param_groups), steps=9)
    for cut in (0, 1, 4):
        flat, optimizer = flat_of(net, cfg, agent.param_groups)
        trained_flat(flat, optimizer, steps=cut)
        again, fresh = flat_of(net, cfg, agent.param_groups)
        again.load(flat.state())
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert torch.equal(trained_flat(again, fresh, cut, 9 - cut), whole)


@pytest.mark.parametrize("name", ["adamw", "torch.optim:NAdam", "test_optimizers:Numbers"])
def test_shards_are_saved_divided_anew_and_continue_as_the_whole(name):
    cfg = config(name, ELEMENTWISE.get(name, {}), **({"weight_decay": 0.3} if name == "adamw" else {}))
    flat, server = Flat(DQN.network()), ParameterServerConfig(shards=3)
    whole, one = Flat(copy.deepcopy(flat.net)), None
    one = make_optimizer(cfg, whole.master, (), whole.param_shapes)

    def push(shards, step):
        gradient = torch.randn(len(flat.master), generator=torch.Generator().manual_seed(step))
        for shard, piece in zip(shards, split_evenly(len(gradient), len(shards)), strict=True):
            shard.optimizer.step(gradient[piece].clone(), 0.0)
        one.step(gradient, 0.0)

    shards = make_shards(flat.master, cfg, server, (), flat.param_shapes)
    for step in range(3):
        push(shards, step)
    states = [unpack_shard(type(message).FromString(message.SerializeToString()))
              for message in (pack_shard(shard.state_dict()) for shard in shards)]
    others = make_shards(flat.master, cfg, ParameterServerConfig(shards=2), (), flat.param_shapes)
    for shard, state in zip(others, split_state(merge_states(states), 3, 2), strict=True):
        shard.load_state_dict(state)
    for step in range(3, 6):
        push(others, step)
    found = torch.cat([shard.weights for shard in others])
    torch.testing.assert_close(found, whole.master, rtol=0, atol=0 if name == "adamw" else 1e-6)


def fresh(cfg, sync=None):
    options = cfg.model_dump(exclude_unset=True) | {"target_period_updates": 3}
    return learner_with([toy_batch(seed) for seed in range(7)], DQN, {"gradient_sync": sync}, **options)[0]


def trained(learner):
    learner.step()
    assert learner.updates == 7
    return learner


RULES = [config("adamw", weight_decay=0.1, schedule="cosine", warmup_updates=2, schedule_updates=6),
         config("rmsprop", schedule="linear", schedule_updates=5),
         config("torch.optim:NAdam", schedule="linear", schedule_updates=5)]


@pytest.mark.parametrize("cfg", RULES, ids=["adamw", "rmsprop", "nadam"])
def test_one_rank_and_one_worker_are_solo_to_the_bit(cfg):
    solo, start = trained(fresh(cfg)), fresh(cfg).flat
    for sharded in (False, True):
        table = Roundtable(1)
        rank = fresh(cfg, AllReduce(cfg, RankLink(ThreadRank(table, 0)), sharded))
        assert torch.equal(table.run(lambda peers, rank=rank: trained(rank))[0].flat.master, solo.flat.master)
    for shards in (1, 3):
        server = ParameterServerConfig(shards=shards)
        clients = make_shards(start.master, cfg, server, start.param_slices, start.param_shapes)
        worker = trained(fresh(cfg, ParameterServerSync("one", clients, server, ListMetrics())))
        assert torch.equal(worker.flat.master, solo.flat.master) or (shards > 1 and cfg.has_own_optimizer)
        torch.testing.assert_close(worker.flat.master, solo.flat.master, rtol=0, atol=1e-6)
        assert torch.equal(torch.tensor(rates(worker)), torch.tensor(rates(solo)))


@pytest.mark.parametrize("cfg", RULES, ids=["adamw", "rmsprop", "nadam"])
def test_ranks_with_sharded_state_move_as_those_without_and_save_the_same(cfg):
    def ranks(sharded):
        table = Roundtable(2)
        learners = [fresh(cfg, AllReduce(cfg, RankLink(ThreadRank(table, rank)), sharded)) for rank in range(2)]
        return table.run(lambda peers: trained(learners[peers.rank]).state_dict())[0]

    whole, parts = ranks(False), ranks(True)
    exact = 0 if not cfg.has_own_optimizer else 1e-6
    assert whole["gradients"].keys() == parts["gradients"].keys()
    for name, value in whole["gradients"].items():
        torch.testing.assert_close(parts["gradients"][name], value, rtol=0, atol=exact)
    for name, value in whole["net"].items():
        torch.testing.assert_close(parts["net"][name], value, rtol=0, atol=exact)


@pytest.mark.parametrize("cfg", RULES, ids=["adamw", "rmsprop", "nadam"])
def test_a_learner_restored_in_mid_schedule_continues_to_the_bit(cfg):
    whole, first, then = trained(fresh(cfg)), fresh(cfg), fresh(cfg)
    first.max_updates_per_step = 3
    first.step()
    then.load_state_dict(copy.deepcopy(first.state_dict()))
    then.replay = first.replay
    trained(then)
    assert torch.equal(then.flat.master, whole.flat.master)
    assert rates(whole) == rates(first) + rates(then)


@pytest.mark.parametrize("cfg", [*RULES, config("adam"), config("torch.optim:NAdam")])
def test_the_position_in_a_schedule_is_saved_exactly(cfg):
    shards = make_shards(torch.zeros(8), cfg, ParameterServerConfig(shards=2))
    for shard in shards:
        shard.optimizer.count = 2**24 + 1
    states = [unpack_shard(pack_shard(shard.state_dict())) for shard in shards]
    merged = merge_states(states)
    assert ("count" in merged) == (not shards[0].optimizer.rate.is_constant), "checkpoints without one stay as they are"
    [state] = split_state(merged, 3, 1)
    again = make_optimizer(cfg, torch.zeros(8))
    again.load_state_dict(state)
    if "count" in merged:
        assert again.count == 2**24 + 1


def test_updates_that_were_not_finite_count_in_a_restored_schedule():
    cfg = config("adam", schedule="linear", schedule_updates=10)
    first, then = make_optimizer(cfg, torch.zeros(4)), make_optimizer(cfg, torch.zeros(4))
    for ok in (True, False, False):
        first.prepare()
        first.step_if(torch.tensor(ok), torch.ones(4), torch.tensor(1.0))
    then.load_state_dict(first.state_dict())
    assert first.count == then.count == 3 and float(then.steps) == 1
    del (old := first.state_dict())["count"]
    then.load_state_dict(old)
    assert then.count == 1, "a checkpoint of an earlier version has no position"


def test_whole_numbers_in_the_state_of_an_optimizer_are_saved_exactly():
    kinds = state_kinds(config("test_optimizers:Numbers"))
    assert {name: kind.saved_as for name, kind in kinds.items()} == dict.fromkeys(
        ("made", "drift", "calls"), torch.float64)


def rates(learner):
    return [values["train/learning_rate"] for values in learner.metrics.values if "train/learning_rate" in values]


def test_shapes_at_the_border_of_a_slice_become_vectors():
    shapes = (ParamShape(slice(0, 6), (2, 3)), ParamShape(slice(6, 8), (2,), True, False))
    assert shapes_within(shapes, slice(0, 6)) == shapes[:1]
    assert shapes_within(shapes, slice(4, 8)) == (
        ParamShape(slice(0, 2), (2,)), ParamShape(slice(2, 4), (2,), True, False))
    assert shapes_within(shapes, slice(8, 8)) == ()


def test_parameters_with_rates_of_their_own_keep_them():
    net = TD3.network()
    flat, cfg = Flat(net, groups=TD3.param_groups), config("torch.optim:SGD")
    before = flat.master.clone()
    optimizer = make_optimizer(cfg, flat.master, flat.param_slices, flat.param_shapes)
    for _ in range(2):
        optimizer.step(torch.ones_like(flat.master), 0.0)
    factor = torch.full_like(before, 2 * 0.02)
    for part in param_slices_of(net, TD3.param_groups):
        factor[part.span] = 0.3 * 0.02
    torch.testing.assert_close(before - flat.master, factor, rtol=1e-4, atol=1e-6)


def test_a_slice_without_elements_has_nothing_to_update():
    empty = make_optimizer(config("torch.optim:NAdam"), torch.zeros(0), [ParamSlice(slice(0, 0), None)], ())
    empty.step(torch.zeros(0), 1.0)
    state = empty.state_dict()
    assert float(state["steps"]) == 1 and state["optimizer.exp_avg"].shape == (0,)
    empty.load_state_dict(state)
    assert isinstance(make_optimizer(config("adam"), torch.zeros(0)), Optimizer)


def test_state_that_appears_later_is_saved_by_torch_or_refused():
    for divided in (False, True):
        weights = torch.ones(4)
        optimizer = make_optimizer(config(LATE), weights, divided=divided)
        for step in range(4):
            state = optimizer.state_dict() if not divided or step < 3 else {}
            assert ("optimizer.state" in state) == (step == 3 and not divided)
            optimizer.step(torch.ones(4), 0.0)
    with pytest.raises(UserError, match="cannot be divided"):
        optimizer.state_dict()


class Closure(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure):
        closure()


@pytest.mark.parametrize(("cfg", "divided", "message"), [
    (config("torch.optim:NAdamm"), False, "has no attribute 'NAdamm'; did you mean NAdam"),
    (config("torch.optim:lr_scheduler"), False, "must be a class derived from torch.optim.Optimizer"),
    (config("torch.optim:SGD", {"momentun": 1}), False, "cannot be made .* TypeError: .*momentun"),
    (config("torch.optim:SGD", {"lr": 1}), False, "lr is learner.learning_rate"),
    (config("torch.optim:LBFGS"), False, "cannot be made"),
    (config("test_optimizers:Closure"), False, "fails in a trial step with TypeError.*without a closure"),
    (config("torch.optim:Adafactor"), True, "cannot be divided among shards or ranks: use sync=none"),
    (config("test_optimizers:Shared"), True, "cannot be divided"),
])
def test_unusable_optimizers_are_refused_in_words(cfg, divided, message):
    with pytest.raises(UserError, match=message):
        check_optimizer(cfg, divided)


def test_trial_steps_leave_the_random_numbers_alone():
    before = torch.get_rng_state()
    assert state_kinds(config("torch.optim:NAdam")).keys() == {"step", "exp_avg", "exp_avg_sq", "mu_product"}
    assert torch.equal(torch.get_rng_state(), before)
