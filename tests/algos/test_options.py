"""No option is silently ignored: each of them changes the update, or setting it is an error that says why.

Options are read off the configs, so that a new one is covered, or fails here, without being listed.
"""

from pathlib import Path

import pytest
import torch
from family_kit import ALGOS, OWN_ENCODER, PICTURES, SMALL, SPEC, batch_of, changes_of, config, twins

from qfleet import api
from qfleet.algos import agent57, ngu, r2d2
from qfleet.config import inactive_keys
from qfleet.core.errors import UserError
from qfleet.runconfig import resolution
from qfleet.runconfig.describe import explain
from qfleet.runconfig.resolution import resolve

PERMISSIONS = {"noisy_epsilon"}
"""Say what may be combined, and compute nothing; settings hold them against the exploration (see below)."""

NUMBERS = {"gamma": 0.5, "n_step": 2, "noisy_sigma": 2.0, "munchausen_alpha": 0.1, "munchausen_temperature": 1.0,
           "munchausen_floor": -0.1, "torso_width": 2, "torso_pool": 2, "hidden": (4, 4), "huber_delta": 0.1,
           "atoms": 9, "v_min": -7.0, "v_max": 9.0, "quantiles": 6, "kappa": 0.1, "samples": 5, "target_samples": 6,
           "policy_samples": 1, "cosines": 9, "sigma_ratio": 0.2, **OWN_ENCODER, "encoder_kwargs": {"scale": 0.5}}
"""Another value for every option that is a number, and for the encoder of a user."""

CONTEXTS = [{}, {"noisy": True}, {"munchausen": True, "double": False}, {"torso": "impala"}, OWN_ENCODER]
"""Where an option is idle, another context must wake it."""


CHANGES = [(algo, name, value) for algo in ALGOS
           for name, value in changes_of(config(algo), NUMBERS, {"algo", *PERMISSIONS})]


OTHER_NETWORKS = {
    "dueling": "networks/test_networks.py::test_the_mean_over_actions_is_the_value_whatever_lies_beside_them",
    "hidden": "networks/test_networks.py::test_hidden_layers_are_applied_in_turn",
    "torso": "networks/test_networks.py::test_every_torso_is_a_network_of_its_own",
    "torso_width": "networks/test_impala.py::test_width_pooling_and_any_size",
    "torso_pool": "networks/test_impala.py::test_width_pooling_and_any_size",
    "atoms": "algos/test_family.py::test_loss_and_priority_equal_a_naive_loop",
    "quantiles": "algos/test_family.py::test_loss_and_priority_equal_a_naive_loop",
    "cosines": "algos/test_iqn.py::test_the_network_equals_a_naive_loop"}
"""Options with which layers have other shapes, so that no weights can be shared and any update differs by chance alone:
here only that the layers do, and the test that proves what they compute."""


def layers(net):
    """All that multiplies by weights, in order."""
    return [layer for layer in net.modules() if getattr(layer, "weight", None) is not None and layer.weight.ndim > 1]


def shapes(net):
    return [tuple(layer.weight.shape) for layer in layers(net)]


def update(algo, spec, start=None, **switches):
    """Loss, priority and gradients of the first update in one vector, and the networks it began with.

    It starts from the weights of the networks `start`, so that a difference is never one of luck; None if they do not
    fit.
    """
    cfg = config(algo, **switches)
    made = ALGOS[algo].build(cfg, spec)
    nets = twins(made, seed=3)
    if start is not None and not all(shapes(net) == shapes(other) for net, other in zip(nets, start, strict=True)):
        return None, nets
    for net, other in zip(nets, start or (), strict=start is not None):
        for layer, source in zip(layers(net), layers(other), strict=True):
            layer.load_state_dict({name: source.state_dict()[name] for name in ("weight", "bias")}, strict=False)
    batch = batch_of(cfg.n_step + 1, 8 if spec is PICTURES else 64, spec=spec)
    found = made.loss(*nets, batch, torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(found.per_item.mean(), [layer.weight for layer in layers(nets[0])])
    return torch.cat([found.per_item.detach(), found.priority, torch.stack([grad.norm() for grad in grads])]), nets


@pytest.mark.parametrize(("algo", "name", "value"), CHANGES)
def test_every_option_changes_the_update_where_it_is_not_refused(algo, name, value):
    """A yes or no and a choice do so wherever they are active; a number, in one place at least: how many samples vote
    for an action shows only where the vote is close."""
    changed = []
    pictures = name in ("torso", "torso_width", "torso_pool", "spectral_norm") or value == "group"
    for context in CONTEXTS:
        if name in context or (("torso" in context) != (name in ("torso_width", "torso_pool", "spectral_norm"))):
            continue
        if ("encoder" in context) != (name == "encoder_kwargs"):
            continue
        if name in config(algo, **context).inactive():
            continue
        spec = PICTURES if pictures else SPEC
        before, start = update(algo, spec, **context)
        after, nets = update(algo, spec, start, **context, **{name: value})
        assert (after is None) == (name in OTHER_NETWORKS), "is it in the table, and needs to be?"
        changed.append(shapes(nets[0]) != shapes(start[0]) if after is None else
                       not torch.allclose(before, after, rtol=1e-5))
    assert changed, f"{name} is idle in every context"
    assert all(changed) if isinstance(value, (bool, str)) else any(changed)


def test_what_other_networks_compute_is_proven_where_the_table_says():
    for name, where in OTHER_NETWORKS.items():
        file, test = where.split("::")
        assert f"def {test}(" in (Path(__file__).parents[1] / file).read_text(), f"{name}: {where} is gone"


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize(("words", "why"), [
    (["agent.noisy_sigma=0.3"], "agent.noisy_sigma: has no effect without agent.noisy=true"),
    (["agent.noisy_epsilon=true"], "agent.noisy_epsilon: has no effect without agent.noisy=true"),
    (["agent.munchausen_alpha=0.5"], "agent.munchausen_alpha: has no effect without agent.munchausen=true"),
    (["agent.munchausen=true", "agent.munchausen_alpha=0", "agent.munchausen_floor=-2"],
     "agent.munchausen_floor: has no effect with agent.munchausen_alpha=0"),
    (["agent.noisy=true", "agent.noisy_sigma=0", "explore.kind=constant", "explore.epsilon=0"],
     "agent.noisy_sigma: must be greater than 0"),
    (["agent.munchausen=true", "agent.double=true"], "agent.double: has no effect with agent.munchausen=true"),
    (["agent.spectral_norm=true"], "agent.spectral_norm: has no effect unless agent.torso=impala"),
    (["agent.torso=nature", "agent.torso_width=2"], "agent.torso_width: has no effect unless agent.torso=impala"),
    (["agent.noisy=true"], "explore.kind=constant explore.epsilon=0, or agent.noisy_epsilon=true"),
    (["agent.noisy=true", "explore.kind=ladder"], "explore.kind=ladder adds random actions"),
    (["agent.noisy=true", "agent.noisy_epsilon=true", "explore.kind=constant", "explore.epsilon=0"],
     "agent.noisy_epsilon=true has no effect"),
    (["explore.kind=constant", "explore.epsilon=0"], "there would be no exploration"),
])
def test_what_would_be_ignored_is_refused(algo, words, why):
    with pytest.raises(UserError) as error:
        resolve("vector", ["env.id=CartPole-v1", f"agent.algo={algo}", *words])
    assert why in str(error.value)


@pytest.mark.parametrize("words", [
    ["agent.noisy=true", "explore.kind=constant", "explore.epsilon=0"],
    ["agent.noisy=true", "agent.noisy_epsilon=true"], ["agent.munchausen=true"]])
def test_what_is_wanted_is_accepted(words):
    assert resolve("cartpole", words).config.agent.n_step == 3


def test_a_support_without_room_is_refused():
    with pytest.raises(UserError, match=r"agent\.v_min=10 is not below agent\.v_max=10"):
        resolve("cartpole", ["agent.algo=c51", "agent.v_min=10"])


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize(("spec", "switches", "why"), [
    (SPEC, {"torso": "impala"}, "is for images"), (SPEC, {"norm": "group"}, "has no images"),
    (PICTURES, {"norm": "group", "torso": "mlp"}, "agent.torso=mlp has none"),
    (SPEC, {"norm": "layer", "hidden": ()}, "no dense layer to normalise")])
def test_networks_refuse_what_they_cannot_use(algo, spec, switches, why):
    with pytest.raises(UserError, match=why):
        ALGOS[algo].build(config(algo, **switches), spec)


@pytest.mark.parametrize("module", [agent57, ngu, r2d2])
@pytest.mark.parametrize(("spec", "switches", "why"), [
    (SPEC, {"torso": "impala"}, "is for images"), (SPEC, {"norm": "group"}, "has no images"),
    (SPEC, {"norm": "layer", "hidden": (), "features": ()}, "no dense layer to normalise")])
def test_so_do_those_of_agents_that_remember(module, spec, switches, why):
    with pytest.raises(UserError, match=why):
        module.build(module.Config(**switches), spec)
    assert module.Config(**switches).unused_for(spec), "`config explain` says so, too"
    assert not module.Config(norm="layer", hidden=()).unused_for(spec), "layers before the LSTM have use for it"


def test_explain_says_what_is_active():
    rows = {row.key: row for row in explain(resolve("cartpole", ["agent.munchausen=true"]))}
    assert rows["agent.munchausen_temperature"].active and not rows["agent.double"].active
    assert "averages over actions" in rows["agent.double"].idle
    assert not rows["agent.noisy_sigma"].active and not rows["agent.spectral_norm"].active


@pytest.mark.parametrize(("words", "key", "why"), [
    (["agent.torso=impala"], "agent.torso", "agent.torso=impala is for images, and CartPole-v1 has none"),
    (["agent.norm=group"], "agent.norm", "agent.norm=group applies to convolutions, and CartPole-v1 has no"),
    (["agent.norm=layer", "agent.hidden=[]"], "agent.norm", "agent.norm=layer has no dense layer to normalise")])
def test_explain_says_what_this_environment_would_refuse(words, key, why):
    rows = {row.key: row for row in explain(resolve("cartpole", words))}
    assert rows[key].idle.startswith(why)
    with pytest.raises(UserError) as error:
        api.plan(resolve("cartpole", words).config)
    assert rows[key].idle == f"{error.value} (a run would fail)", "in its words"


def test_explain_makes_no_environment_unless_there_is_a_question(monkeypatch):
    made = []

    def missing(*args):
        made.append(args)
        raise UserError("an extra is missing")

    monkeypatch.setattr(resolution.envs, "make", missing)
    for words in ([], ["agent.norm=layer"]):
        assert explain(resolve("cartpole", words)) and not made
    rows = {row.key: row for row in explain(resolve("btr"))}
    assert made and rows["agent.torso"].active and rows["agent.torso"].description.endswith("(only for images)")


def test_explain_knows_that_pictures_have_use_for_a_torso():
    words = ["env.kwargs={pixels: true, side: 12}", "agent.torso=impala", "agent.norm=group"]
    rows = {row.key: row for row in explain(resolve("catch", words))}
    assert rows["agent.torso"].active and rows["agent.norm"].active
    assert "images)" not in rows["agent.torso"].description


def test_every_number_has_another_value():
    fields = {name for module in ALGOS.values() for name in module.Config.model_fields}
    assert set(NUMBERS) <= fields and SMALL.keys() == ALGOS.keys() and inactive_keys(config("dqn"))
