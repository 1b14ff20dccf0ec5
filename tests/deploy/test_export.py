"""Exported policies choose the actions that the agent chooses, in the environment's own arrays, at any batch size."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from policies import BOARDS, NESTED, VECTOR, agent_for, checkpoint_of, with_random_weights

from qfleet import api
from qfleet.algos import iqn
from qfleet.cli.commands import main
from qfleet.core.agent import ExplorationParams
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import ExportError, UserError
from qfleet.deploy import onnx_format
from qfleet.maths.value_rescaling import h_inverse

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
TWO = spaces.Discrete(2)
IMAGE = spaces.Box(0, 255, (12, 10, 3), np.uint8)
AGENTS = {
    "dqn": (VECTOR, TWO, "agent.algo=dqn"),
    "dueling and noisy": (VECTOR, TWO, "agent.algo=dqn", "agent.dueling=true", "agent.noisy=true",
                          "agent.noisy_epsilon=true"),
    "c51": (VECTOR, spaces.Discrete(3, start=-1), "agent.algo=c51", "agent.rescale=true"),
    "qr": (VECTOR, TWO, "agent.algo=qr"),
    "iqn": (VECTOR, TWO, "agent.algo=iqn", "agent.dueling=true"),
    "munchausen": (VECTOR, TWO, "agent.algo=dqn", "agent.munchausen=true"),
    "dict": (NESTED, spaces.MultiDiscrete([2, 3], start=[0, 7]), "agent.algo=dqn"),
    "boards": (BOARDS, TWO, "agent.algo=dqn", "agent.torso=minatar"),
    "normalised dict": (NESTED, TWO, "agent.algo=c51", "normalise.observations=true", "normalise.rewards=true"),
    "images": (IMAGE, TWO, "agent.algo=dqn", "agent.norm=group"),
    "large images": (spaces.Box(0, 255, (3, 40, 44), np.uint8), TWO, "agent.algo=dqn"),
    "grey images": (spaces.Box(0, 255, (12, 12), np.uint8), TWO, "agent.algo=dqn", "agent.torso=impala",
                    "agent.norm=layer"),
    "ddpg": (VECTOR, spaces.Box(-2, 2, (1,)), "agent.algo=ddpg", "normalise.observations=true",
             "normalise.rewards=true"),
    "td3": (VECTOR, spaces.Box(np.array([-1.0, 0]), np.array([1, 5.0]), dtype=np.float64), "agent.algo=ddpg",
            "agent.twin=true", "agent.smoothing=0.2", "agent.policy_delay=2"),
    "d4pg": (IMAGE, spaces.Box(-2, 2, (2, 2)), "agent.algo=d4pg"),
}
RECURRENT = {"r2d2": ("agent.algo=r2d2",), "r2d2 of rescaled values": ("agent.algo=r2d2", "agent.rescale=true"),
             "ngu": ("agent.algo=ngu",), "agent57": ("agent.algo=agent57",),
             "r2d2 with scaled rewards": ("agent.algo=r2d2", "normalise.observations=true", "normalise.rewards=true"),
             "ngu without memory": ("agent.algo=ngu", "agent.memory=none")}


def run_onnx(path):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def run_torchscript(path):
    files = {"qfleet.json": ""}
    module = torch.jit.load(str(path), _extra_files=files)
    about = json.loads(files["qfleet.json"])
    inputs, outputs = ([port["name"] for port in about[side]] for side in ("inputs", "outputs"))
    return lambda given: {name: value.numpy() for name, value in zip(
        outputs, module(*(torch.from_numpy(given[name]) for name in inputs)), strict=True)}


RUN = {"onnx": run_onnx, "torchscript": run_torchscript}


def leaves_of(raw, name="obs"):
    """The arrays of a raw observation by the names of the inputs."""
    parts = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, tuple) else None
    if parts is None:
        return {name: np.asarray(raw)}
    return {inner: array for key, part in parts for inner, array in leaves_of(part, f"{name}.{key}").items()}


def batch_of(raws):
    each = [leaves_of(raw) for raw in raws]
    return {name: np.stack([leaves[name] for leaves in each]) for name, array in each[0].items()
            if array.dtype.kind != "U"}  # the agent does not read text


@pytest.mark.parametrize("form", RUN)
@pytest.mark.parametrize("name", AGENTS)
def test_a_file_chooses_as_the_agent_does(name, form, tmp_path, monkeypatch):
    observation, *rest = AGENTS[name]
    monkeypatch.setattr(iqn, "sample_taus", lambda items, n, rng: ((torch.arange(n) + 0.5) / n).expand(items, n))
    agent = agent_for(observation, *rest)
    written = agent.export(tmp_path / "policy", form)
    assert written.path.exists() and written.difference is not None and written.difference < 1e-4
    run = RUN[form](written.path)
    observation.seed(5)
    for lanes in (1, 2, 7):
        raws = [observation.sample() for _ in range(lanes)]
        found = run(batch_of(raws))
        expected = np.stack([agent.act(raw) for raw in raws])
        assert found["action"].shape == expected.shape and found["action"].dtype == expected.dtype
        np.testing.assert_allclose(found["action"], expected, rtol=1e-5, atol=1e-6)
        if agent.spec.box is None:
            assert found["q"].shape == (lanes, agent.spec.num_actions)
            table = [np.asarray(agent.interpreter.actions.decode(a)) for a in range(agent.spec.num_actions)]
            assert (found["action"] == np.stack(table)[found["q"].argmax(1)]).all()


def test_values_are_those_of_the_network(tmp_path):
    agent = agent_for(VECTOR, TWO, "agent.algo=dqn")
    obs = np.random.default_rng(1).normal(size=(5, 3))
    found = run_onnx(agent.export(tmp_path / "policy.onnx").path)({"obs": obs})
    expected = agent.network({"obs": torch.from_numpy(obs).float()}).detach().numpy()
    np.testing.assert_allclose(found["q"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", RUN)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_state_is_passed_by_the_caller(name, form, tmp_path):
    agent = agent_for(VECTOR, spaces.Discrete(3), *RECURRENT[name])
    written = agent.export(tmp_path / "policy", form)
    run, lanes, rng = RUN[form](written.path), 3, np.random.default_rng(2)
    state = {port.name: np.zeros((lanes, *port.shape) if port.batched else port.shape, port.dtype)
             for port in written.inputs if port.name != "obs"}
    about = metadata_of(written.path, form)
    assert set(about["state"]["names"]) == set(state)
    for step in range(8):  # longer than the episodic memory
        obs, reward = rng.normal(size=(lanes, 3)), rng.normal(size=lanes).astype(np.float32)
        decision = agent.policy.act({"obs": obs.astype(np.float32)}, ExplorationParams(torch.zeros(lanes), False))
        found = run({"obs": obs, **state})
        assert found["action"].tolist() == decision[0].tolist()
        if "q" in decision[1]:
            q = torch.from_numpy(decision[1]["q"])
            q = (h_inverse(q) if agent.config.agent.rescale else q).numpy().copy()
            q *= decision[1].get("reward_scale", np.ones(lanes))[:, None]
            np.testing.assert_allclose(found["q"], q, rtol=1e-4, atol=1e-5)
        over = np.array([step == 2, False, step == 4])
        agent.policy.observe(reward, over)
        state |= {key.removeprefix("next."): value for key, value in found.items() if key.startswith("next.")}
        if "state.reward" in state:
            state["state.reward"] = reward
        for key in about["state"]["zero_at_episode_start"]:
            state[key] = state[key].copy()
            state[key][over] = 0
    assert bool(state) == (name != "ngu without memory")


def test_the_loop_of_the_page_plays_an_episode(tmp_path):
    page = (Path(__file__).parents[2] / "docs/export.md").read_text()
    [code] = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "while not over" in block]
    env = CartPoleEnv()
    path = agent_for(env.observation_space, env.action_space, *RECURRENT["agent57"]).export(tmp_path / "p.onnx").path
    names = {"session": onnxruntime.InferenceSession(str(path)), "about": metadata_of(path, "onnx"), "np": np,
             "env": env, "obs": env.reset(seed=1)[0], "over": False}
    exec(code, names)
    assert names["terminated"] and names["state"]["episodic.count"] > 5


def metadata_of(path, form):
    if form == "torchscript":
        files = {"qfleet.json": ""}
        torch.jit.load(str(path), _extra_files=files)
        return json.loads(files["qfleet.json"])
    return json.loads(onnxruntime.InferenceSession(str(path)).get_modelmeta().custom_metadata_map["qfleet"])


def test_running_statistics_begin_as_they_were_saved(tmp_path):
    agent = agent_for(VECTOR, TWO, "agent.algo=ngu")
    agent.policy.flat.set_buffers({"kept.distance.mean": torch.tensor(0.75)})
    about = metadata_of(agent.export(tmp_path / "policy.onnx").path, "onnx")
    assert about["state"]["initial"] == {"distance.mean": 0.75}
    assert "distance.mean" not in about["state"]["zero_at_episode_start"]


def test_stacked_frames_and_atari_are_inputs_as_the_network_sees_them(tmp_path):
    agent = agent_for(IMAGE, TWO, "agent.algo=dqn", "env.stack=2")
    [port] = agent.export(tmp_path / "stacked.onnx").inputs
    assert (port.shape, port.dtype) == ((6, 12, 10), "uint8") and "2 frames stacked" in port.meaning
    spec = EnvSpec("ALE/Pong-v5", {"obs": Leaf((4, 40, 40), "uint8", "image", stack=4)}, 6)
    atari = agent_for(IMAGE, TWO, "agent.algo=dqn", env="ALE/Pong-v5")
    agent = with_random_weights(atari.config, spec)
    written = agent.export(tmp_path / "pong.onnx")
    images = np.random.default_rng(1).integers(0, 255, (4, 4, 40, 40), dtype=np.uint8)
    assert run_onnx(written.path)({"obs": images})["action"].tolist() == agent.act(images).tolist()


@pytest.fixture
def policy(tmp_path):
    return checkpoint_of(agent_for(VECTOR, TWO, "agent.algo=dqn"), tmp_path / "best")


def test_the_suffix_names_the_format_of_a_loaded_agent(policy, tmp_path):
    agent = api.load(policy)
    for out, form in (("p.pt", "torchscript"), ("p.ts", "torchscript"), ("p.onnx", "onnx"), ("p", "onnx")):
        assert agent.export(tmp_path / out).format == form
    torch.jit.load(str(tmp_path / "p.pt"))
    with pytest.raises(UserError, match="'safetensors' is a checkpoint: use"):
        agent.export(tmp_path / "q", "safetensors")


@pytest.mark.parametrize(("form", "out"), [(None, "policy.onnx"), ("onnx", "policy"), (None, "policy.pt"),
                                           ("torchscript", "policy.x")])
def test_the_command_describes_what_it_wrote(policy, tmp_path, capsys, form, out):
    words = ["export", str(policy), str(tmp_path / out), *([] if form is None else ["--format", form])]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["inputs   obs batch×3 float64", "outputs  action batch int64", "outputs  q batch×2 float32"]
    assert lines[3].startswith("verified with batches of 1, 2, 7") and lines[4:] == [str(tmp_path / out)]
    about = metadata_of(tmp_path / out, "torchscript" if form == "torchscript" or out.endswith(".pt") else "onnx")
    assert (about["run"], about["score"], about["steps"], about["updates"]) == ("run-id", {"mean_reward": 12.5}, 40, 7)
    assert about["algo"] == "dqn" and about["env"]["spaces"]["observation"]["shape"] == [3]
    assert about["config"]["agent"]["hidden"] == [16] and about["qfleet"]
    assert about["inputs"][0]["shape"] == ["batch", 3]
    assert main(words) == 2 and "exists already" in capsys.readouterr().err


def test_a_checkpoint_is_written_unless_a_format_is_named(policy, tmp_path, capsys):
    assert main(["export", str(policy), str(tmp_path / "copy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "safetensors"
    assert (tmp_path / "copy" / "policy.safetensors").exists()
    assert api.export(policy, tmp_path / "odd.onnx", format="safetensors").is_dir()
    with pytest.raises(UserError, match="must be one of safetensors, onnx, torchscript"):
        api.export(policy, tmp_path / "x", format="pickle")
    assert api.export(policy, tmp_path / "p.onnx").is_file()


def worse(export):
    """An exporter that writes another policy."""
    def wrapped(graph, path):
        other = copy.deepcopy(graph)
        with torch.no_grad():
            next(other.net.parameters()).add_(0.1)
        export(other, path)
    return wrapped


def test_a_file_that_computes_something_else_is_removed(policy, tmp_path, capsys, monkeypatch):
    for name in ("_export_traced", "_export_dynamo"):
        monkeypatch.setattr(onnx_format, name, worse(onnx_format._export_traced))
    (tmp_path / "out").mkdir()
    assert main(["export", str(policy), str(tmp_path / "out" / "policy.onnx")]) == 1
    err = capsys.readouterr().err
    assert "differs from the policy's" in err and "Traceback" not in err
    assert list((tmp_path / "out").iterdir()) == []


def test_what_an_exporter_cannot_express_is_named(tmp_path, monkeypatch):
    agent = agent_for(VECTOR, TWO, "agent.algo=dqn")
    values = {"values": lambda net, obs: net(obs) + torch.linalg.qr(net(obs)).R.mean()}
    vars(agent.policy.agent.greedy.keywords["model"]).update(values)
    monkeypatch.setattr(onnx_format, "_export_dynamo", onnx_format._export_traced)  # knows more operations
    with pytest.raises(ExportError, match=r"cannot be exported to ONNX: .*qr"):
        agent.export(tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_and_agents_without_greedy_are_refused(policy, tmp_path, capsys, monkeypatch):
    agent = agent_for(VECTOR, TWO, "agent.algo=dqn")
    vars(agent.policy.agent)["greedy"] = None
    with pytest.raises(UserError, match="defines no `greedy`"):
        agent.export(tmp_path / "policy.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["export", str(policy), str(tmp_path / "policy.onnx")]) == 2
    assert "pip install 'qfleet[onnx]'" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(policy), str(tmp_path / "policy.onnx")]) == 0
    assert "not verified" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_newer_exporter_takes_over(tmp_path, monkeypatch):
    def gone(graph, path):
        raise RuntimeError("this exporter was removed")

    monkeypatch.setattr(onnx_format, "_export_traced", gone)
    agent = agent_for(NESTED, TWO, "agent.algo=dqn")
    path = agent.export(tmp_path / "policy.onnx").path
    assert [file.name for file in tmp_path.iterdir()] == ["policy.onnx"], "weights are in the file"
    NESTED.seed(1)
    raws = [NESTED.sample() for _ in range(5)]
    assert run_onnx(path)(batch_of(raws))["action"].tolist() == [agent.act(raw) for raw in raws]
