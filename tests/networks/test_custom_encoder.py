"""An encoder of the user: what it is given, what it may return, and every agent family that trains it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from qfleet.algos import agent57, c51, d4pg, ddpg, dqn, hlgauss, iqn, ngu, qr, r2d2
from qfleet.config import inactive_keys
from qfleet.core.agent import ExplorationParams
from qfleet.core.env import Box, EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample
from qfleet.networks.custom_encoder import CustomEncoder
from qfleet.networks.encoder import Encoder
from qfleet.runconfig.resolution import resolve

LEAVES = {"grid": Leaf((1, 6, 6), "uint8", "image"), "speed": Leaf((2,), "float32", "vector"),
          "room": Leaf((), "int32", "category", sizes=(5,))}
SPEC = EnvSpec("toy", LEAVES, num_actions=3)
REACH = EnvSpec("toy", LEAVES, num_actions=0, box=Box((2,), (-1.0, -1.0), (1.0, 1.0)))
HERE = Path(__file__).stem


class Everything(nn.Module):
    """All leaves in one layer; the room by an embedding."""

    def __init__(self, observation, width=6, rooms=None):
        super().__init__()
        self.room = nn.Embedding(rooms or observation["room"].sizes[0], 4)
        self.dense = nn.Linear(36 + 2 + 4, width)

    def forward(self, obs):
        seen = [obs["grid"].flatten(1), obs["speed"], self.room(obs["room"]).to(obs["speed"].dtype)]
        return self.dense(torch.cat(seen, 1)).relu()


class Echo(nn.Module):
    """Returns what the function says, and keeps its input."""

    def __init__(self, observation, answer=lambda obs: obs["speed"]):
        super().__init__()
        self.answer, self.seen = answer, None

    def forward(self, obs):
        self.seen = obs
        return self.answer(obs)


def three_rooms(observation, *, width):
    return Everything(observation, width)


class TwoArguments(Everything):
    def forward(self, obs, state):
        return super().forward(obs)


def seven(observation):
    return 7


BUILT = nn.Linear(2, 2)
ALGOS = {"dqn": dqn, "c51": c51, "hlgauss": hlgauss, "qr": qr, "iqn": iqn, "r2d2": r2d2, "ngu": ngu,
         "agent57": agent57, "ddpg": ddpg, "d4pg": d4pg}
REMEMBERING = {"features": (8,), "units": 6, "burn_in": 1, "unroll": 2, "stride": 2, "n_step": 1}
CURIOUS = {"arms": 3, "episodic_capacity": 7, "neighbours": 2, "curious_hidden": (8,), "embedding": 4}
SWITCHES = {"r2d2": REMEMBERING, "ngu": REMEMBERING | CURIOUS, "agent57": REMEMBERING | CURIOUS,
            "ddpg": {"twin": True}, "d4pg": {}}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def encoder(name, **kwargs):
    return CustomEncoder(LEAVES, f"{HERE}:{name}", kwargs)


def blank(items):
    return {"grid": torch.full((items, 1, 6, 6), 255, dtype=torch.uint8), "speed": torch.ones(items, 2),
            "room": torch.full((items,), 4, dtype=torch.int32)}


def agent(algo, **changes):
    module = ALGOS[algo]
    switches = SWITCHES.get(algo, {"dueling": True, "noisy": True, "n_step": 2})
    cfg = module.Config(hidden=(8,), encoder=f"{HERE}:Everything", **switches, **changes)
    return module.build(cfg, REACH if algo in ("ddpg", "d4pg") else SPEC)


def batch_of(made, items=4):
    """Random rows of a window, with everything that the agent stores."""
    rng, window = torch.Generator().manual_seed(0), made.window
    rows = window.past + window.unroll + window.future
    column = {name: (items, rows, *leaf.shape) for name, leaf in LEAVES.items()}
    found = {"obs.grid": torch.randint(0, 256, column["grid"], generator=rng, dtype=torch.uint8),
             "obs.speed": torch.randn(column["speed"], generator=rng),
             "obs.room": torch.randint(0, 5, column["room"], generator=rng, dtype=torch.int32),
             "action": torch.randint(0, 3, (items, rows), generator=rng, dtype=torch.int32),
             "reward": torch.randn(items, rows, generator=rng), "discount": torch.ones(items, rows),
             "last": torch.zeros(items, rows, dtype=torch.bool)}
    if made.param_groups:  # continuous actions
        found["action"] = torch.rand(items, rows, 2, generator=rng)
    found |= {name: torch.ones(items, rows, *shape, dtype=getattr(torch, dtype))
              for name, (shape, dtype) in made.columns.items()}
    found |= {name: torch.zeros(items, len(made.state_rows), *shape, dtype=getattr(torch, dtype))
              for name, (shape, dtype) in made.stored_states.items()}
    return Sample(keys=torch.arange(items).numpy(), weight=torch.ones(items), rows=found)


@pytest.mark.parametrize("algo", ALGOS)
def test_every_agent_trains_the_users_module_and_acts_by_it(algo):
    made = agent(algo)
    torch.manual_seed(0)
    net, target = made.network(), made.network().requires_grad_(False)
    encoders = [module for module in net.modules() if isinstance(module, CustomEncoder)]
    assert encoders and not any(isinstance(module, Encoder) for module in net.modules())
    loss = made.loss(net, target, batch_of(made), torch.Generator().manual_seed(0))
    assert loss.per_item.shape == loss.priority.shape == (4,) and loss.per_item.isfinite().all()
    (loss.per_item.mean() + (0 if loss.extra is None else loss.extra)).backward()
    trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad and ".module." in name]
    assert len(trained) >= 3
    assert all(net.get_parameter(name).grad.isfinite().all() for name in trained)
    memory = made.recurrent_state and made.recurrent_state.initial(2, torch.device("cpu"))
    with torch.no_grad():
        decision = made.act(net, blank(2), memory, ExplorationParams(torch.zeros(2)), torch.Generator())
    assert len(decision.action) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_are_scaled_vectors_are_floats_and_categories_are_whole_numbers(dtype):
    made = encoder("Echo")
    features = made(blank(3), dtype)
    seen = made.module.seen
    assert (seen["grid"] == 1).all() and (seen["room"] == 4).all()
    assert {name: leaf.dtype for name, leaf in seen.items()} == {"grid": dtype, "speed": dtype, "room": torch.int64}
    assert all(seen[name].shape == (3, *leaf.shape) for name, leaf in LEAVES.items())
    assert features.dtype == dtype and made.features == 2


def test_features_take_the_dtype_of_the_network():
    made = encoder("Echo", answer=lambda obs: obs["speed"].double())
    assert made(blank(3), torch.bfloat16).dtype == torch.bfloat16


def test_keyword_arguments_reach_a_class_or_a_function():
    assert encoder("Everything").features == 6 and encoder("Everything", width=9).features == 9
    assert encoder("three_rooms", width=5).features == 5


@pytest.mark.parametrize(("answer", "message"), [
    (lambda obs: obs["grid"], r"a tensor of shape \[2, 1, 6, 6\] for 2 .* must return \[2, F\].*x.flatten\(1\)"),
    (lambda obs: obs["speed"].flatten(), r"shape \[4\] for 2 observations; it must return \[2, F\]"),
    (lambda obs: obs["speed"][:1], r"shape \[1, 2\] for 2 observations"),
    (lambda obs: obs["speed"][:, :0], r"shape \[2, 0\] for 2 observations"),
    (lambda obs: (obs["speed"], None), "a value of type tuple; it must return one tensor"),
    (lambda obs: obs["speed"].long(), "returned int64; features must be floats")])
def test_an_output_of_another_form_is_refused(answer, message):
    with pytest.raises(UserError, match=rf"agent.encoder={HERE}:Echo .*{message}"):
        encoder("Echo", answer=answer)


@pytest.mark.parametrize(("name", "kwargs", "message"), [
    ("Everything", {"widht": 3}, r"takes \(observation, width=6, .*; it has no widht; did you mean width\?"),
    ("three_rooms", {}, r"\(none are set\), and takes \(observation, \*, width\)"),
    ("Everything", {"observation": 3}, "it has no observation"),
    ("TwoArguments", {}, r"forward\(obs, state\) must take one argument"),
    ("seven", {}, "built a value of type int; an nn.Module is needed"),
    ("BUILT", {}, "is a module that is already built; name an nn.Module class"),
    ("LEAVES", {}, "is of type dict; name an nn.Module class"),
    ("Evrything", {}, "no attribute 'Evrything'; did you mean Everything")])
def test_something_that_builds_no_encoder_is_refused(name, kwargs, message):
    with pytest.raises(UserError, match=message):
        encoder(name, **kwargs)


def test_an_error_of_the_users_code_is_not_mistaken_for_a_wrong_setting():
    with pytest.raises(TypeError, match="not callable"):
        encoder("Echo", answer=3)


@pytest.mark.parametrize("algo", ["dqn", "r2d2", "ddpg"])
def test_agents_refuse_an_unknown_option_when_they_are_built(algo):
    with pytest.raises(UserError, match="did you mean width"):
        agent(algo, encoder_kwargs={"widht": 3})


OWN = "agent.encoder=my_nets:Mine"


@pytest.mark.parametrize(("words", "message"), [
    (["agent.encoder_kwargs={width: 3}"], "agent.encoder_kwargs: has no effect without agent.encoder"),
    ([OWN, "agent.torso=small"], "agent.torso: has no effect with agent.encoder, which replaces the torsos"),
    ([OWN, "agent.torso_width=2"], "agent.torso_width: has no effect with agent.encoder"),
    (["agent.encoder=impala"], "'impala' is not one of auto, or module:attribute"),
    (["agent.algo=r2d2", "agent.encoder_kwargs.width=3"], "agent.encoder_kwargs: has no effect without"),
    (["agent.algo=r2d2", OWN, "agent.torso=small"], "agent.torso: has no effect with agent.encoder")])
def test_settings_without_effect_are_refused(words, message):
    with pytest.raises(UserError) as error:
        resolve("cartpole", words)
    assert message in str(error.value)


def test_norms_of_convolutions_need_torsos():
    with pytest.raises(UserError, match=r"agent\.norm=group applies to convolutions, and agent.encoder replaces those"):
        agent("dqn", norm="group")
    with pytest.raises(UserError, match=r"agent\.norm=layer has no dense layer"):
        dqn.build(dqn.Config(hidden=(), norm="layer", encoder=f"{HERE}:Everything"), SPEC)


def test_inactive_keys_are_keys_of_the_section():
    for module in ALGOS.values():
        cfg = module.Config(encoder="a:b")
        assert inactive_keys(cfg).keys() <= type(cfg).model_fields.keys()


def test_options_of_a_recipes_torso_give_way_to_the_encoder():
    config = resolve("btr", [OWN, "agent.encoder_kwargs.width=3"]).config
    assert config.agent.torso == "auto" and config.agent.encoder_kwargs == {"width": 3}
