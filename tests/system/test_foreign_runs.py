"""Checkpoints that are damaged, foreign or malicious: fall back, or exit 2; their code runs only when trusted."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from real_runs import newest, records, train

from qfleet import api
from qfleet.cli.commands import main
from qfleet.core.errors import UserError
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with two checkpoints and a best policy."""
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("origin"))
    try:
        return train("cartpole", "run.name=x", "total_steps=700", "checkpoint.period_steps=300").directory.resolve()
    finally:
        os.chdir(here)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("strange_env", "strange_net"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def copy(run, place):
    shutil.copytree(run, "runs/x")
    return Path("runs/x")


def code_of(*argv):
    return main([str(arg) for arg in argv])


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_resume_falls_back_to_the_checkpoint_before(copy, damage, caplog):
    older, newer = sorted(copy.glob("checkpoints/step-*"))
    target = newer / "state.safetensors"
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "missing":
        target.unlink()
    else:
        target.write_bytes(data if damage == "flip" else data[:-1])
    result = api.resume("x", ["total_steps=900"])
    assert result.exit_code == 0 and result.steps >= 900
    assert "is damaged" in caplog.text and (copy / "checkpoints" / f"{newer.name}.corrupt").is_dir()
    attempts = json.loads((copy / "run.json").read_text())["attempts"]
    assert attempts[-1]["resumed_from"] == older.name
    steps = [record["step"] for record in records(copy)]
    assert steps == sorted(steps), "what the damaged checkpoint stood for was measured again"


def test_resume_without_any_valid_checkpoint_says_so(copy, capsys):
    for checkpoint in copy.glob("checkpoints/step-*"):
        (checkpoint / "manifest.json").unlink()
    assert code_of("resume", "x") == 2
    assert "no valid checkpoint" in capsys.readouterr().err


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def foreign(folder):
    """Things that are no checkpoint of ours, by name."""
    folder.mkdir()
    (folder / "model.pt").write_bytes(pickle.dumps(Bomb()))
    (folder / "model.zip").write_bytes(b"PK\x03\x04 stable")
    (folder / "empty").mkdir()
    (folder / "pickled").mkdir()
    (folder / "pickled" / "manifest.json").write_bytes(pickle.dumps(Bomb()))
    return [folder / "model.pt", folder / "model.zip", folder / "empty", folder / "pickled", folder / "absent"]


@pytest.mark.parametrize("verb", ["eval", "record", "export"])
def test_foreign_paths_are_refused_and_nothing_is_executed(copy, verb, capsys):
    for path in foreign(copy.parent / "foreign"):
        assert code_of(verb, path, *(["out"] if verb == "export" else [])) == 2, path
        err = capsys.readouterr().err
        assert str(path) in err and "Traceback" not in err, err
    assert not Path("exploded").exists()


def test_a_forged_policy_and_a_forged_config_are_refused(copy, capsys):
    """Manifests with right hashes around contents that are wrong."""
    found = newest(copy)
    other = {name: value[..., :1].contiguous() for name, value in found.policy().items()}
    config = found.config_text
    forged = {
        "weights": (other, config),
        "config": (found.policy(), "env: 3\n"),
        "nonsense": (found.policy(), "[1, 2"),
        "unknown": (found.policy(), config + "surprise: 1\n"),
        "object": (found.policy(), config + "x: !!python/object/apply:os.system ['touch exploded']\n"),
    }
    for name, (policy, text) in forged.items():
        path = Checkpoints(Path(name), 1).save_policy(1, 1, policy, CheckpointMeta(text, found.spec))
        assert code_of("eval", path, "--episodes", 1) == 2, name
        err = capsys.readouterr().err
        assert "Traceback" not in err and str(path) in err, (name, err)
    assert not Path("exploded").exists()


ENV = """
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv
Path("imported").touch()
class Mine(CartPoleEnv):
    pass
"""
NET = """
from pathlib import Path
from torch import nn
Path("imported").touch()
def build(shape, norm):
    return nn.Flatten()
"""


def strange(copy, name, change):
    """The run's policy as somebody else would send it, with a config that names code."""
    found = newest(copy)
    config = yaml.safe_load(found.config_text)
    change(config)
    return Checkpoints(Path(name), 1).save_policy(
        1, 1, found.policy(), CheckpointMeta(yaml.safe_dump(config), found.spec)
    )


NAMED = {
    "env": lambda config: config["env"].update(id="strange_env:Mine", max_episode_steps=30),
    "wrapper": lambda config: config["env"].update(wrappers=["strange_env:Mine"]),
    "torso": lambda config: config["agent"].update(torso="strange_net:build"),
    "explore": lambda config: config["explore"].update(kind="strange_net:build"),
}


@pytest.mark.parametrize("what", NAMED)
def test_a_strangers_checkpoint_imports_nothing_unasked(copy, what, capsys):
    Path("strange_env.py").write_text(ENV)
    Path("strange_net.py").write_text(NET)
    path = strange(copy, "sent", NAMED[what])
    for verb in (["eval", path, "--episodes", "1"], ["record", path, "--out", "x.mp4"], ["play", path]):
        assert code_of(*verb) == 2
        err = capsys.readouterr().err
        assert "imports strange_" in err or "no display" in err, err
        assert "--trust" in err or verb[0] == "play"
    with pytest.raises(UserError, match="trust=True"):
        api.load(path)
    assert code_of("export", path, "out") == 0, "nothing is imported to do that"
    assert not Path("imported").exists()


def test_code_that_only_training_imports_needs_no_trust_to_play(copy, capsys):
    def change(config):
        config.update(callbacks=["absent:A"], sync="absent:B", launcher="absent:C")
        config["learner"].update(optimizer="absent:D", optimizer_options={"rule": "absent:E"}, schedule="absent:F",
                                 schedule_updates=10)
        del config["learner"]["optimizer_eps"]
        config["replay"].update(store="absent:G")

    path = strange(copy, "sent", change)
    assert code_of("eval", path, "--episodes", 1) == 0, capsys.readouterr().err
    assert code_of("record", path, "--gif", "--out", "x.gif") == 0, capsys.readouterr().err
    assert api.load(path).config.callbacks == ("absent:A",)
    assert api.export(path, "policy.pt").exists()
    (copy / "config.yaml").write_text((path / "config.yaml").read_text())
    with pytest.raises(UserError, match=r"run .* imports absent:A, .*absent:B, and it was not created here by you"):
        api.resume("x")


def test_with_trust_it_is_played_and_exported(copy, capsys):
    Path("strange_env.py").write_text(ENV)
    path = strange(copy, "sent", NAMED["env"])
    assert code_of("eval", path, "--episodes", 1, "--trust", "--json") == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 1 and Path("imported").exists()
    assert code_of("export", path, "out") == 0
    assert code_of("eval", "out", "--episodes", 1) == 2, "what was exported is nobody's run"
    assert code_of("eval", "out", "--episodes", 1, "--trust") == 0
    assert code_of("record", path, "--trust", "--gif", "--out", "x.gif") == 0 and Path("x.gif").exists()


def test_ones_own_run_needs_no_trust_and_another_users_does(capsys):
    Path("strange_env.py").write_text(ENV)
    train("strange_env:Mine", "env.max_episode_steps=30", "run.name=own", "total_steps=100")
    for where in ("own", "runs/own", newest(Path("runs/own")).path):
        assert code_of("eval", where, "--episodes", 1) == 0
    os.chown("runs/own/run.json", 12345, -1)
    for where in ("own", newest(Path("runs/own")).path):
        assert code_of("eval", where, "--episodes", 1) == 2
        assert "--trust" in capsys.readouterr().err
        assert code_of("eval", where, "--episodes", 1, "--trust") == 0


VERBS = (["eval", "--episodes", "1"], ["record", "--out", "x.gif"], ["resume", "total_steps=130"], ["config", "show"],
         ["config", "explain"], ["config", "diff", "cartpole"], ["doctor", "total_steps=130"])


def test_a_copied_run_imports_nothing_unasked_and_a_moved_one_does(capsys):
    Path("strange_env.py").write_text(ENV)
    train("strange_env:Mine", "env.max_episode_steps=30", "run.name=own", "total_steps=100")
    Path("imported").unlink()
    shutil.copytree("runs/own", "runs/copy")
    before = {path: path.read_bytes() for path in Path("runs/copy").rglob("*") if path.is_file()}
    sys.modules.pop("strange_env")
    for verb, *rest in VERBS:
        assert code_of(verb, *rest, "copy") == 2, verb
        err = capsys.readouterr().err
        assert "imports strange_env:Mine" in err and "--trust" in err and "Traceback" not in err, (verb, err)
    with pytest.raises(UserError, match="trust=True"):
        api.resume("copy", ["total_steps=130"])
    assert not Path("imported").exists()
    assert {path: path.read_bytes() for path in Path("runs/copy").rglob("*") if path.is_file()} == before
    for verb, *rest in VERBS:
        assert code_of(verb, *rest, "copy", "--trust") == 0, (verb, capsys.readouterr().err)
    assert Path("imported").exists() and code_of("config", "show", "copy") == 2, "trust is for one command"
    Path("runs/own").rename("renamed")
    assert code_of("config", "show", "renamed") == 0 and code_of("resume", "renamed", "total_steps=120") == 0


@pytest.mark.parametrize("text", ["env:\n  id: strange_env:Mine\n", "agent:\n  algo: strange_net:build\n",
                                  "explore:\n  kind: strange_net:build\n", "extends: below.yaml\n"])
def test_a_downloaded_run_is_asked_before_its_config_is_understood(text, capsys):
    """Modules are imported while a config is validated, so nothing of it may be validated before."""
    Path("strange_env.py").write_text(ENV)
    Path("strange_net.py").write_text(NET)
    run = Path("sent")
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(text)
    (run / "below.yaml").write_text("env:\n  id: strange_env:Mine\n")
    (run / "run.json").write_text('{"home": "here", "attempts": []}')
    for verb in (["resume", run], ["config", "show", run], ["config", "show", run / "config.yaml"],
                 ["doctor", run, "seed=3"]):
        assert code_of(*verb) == 2
        assert "run sent imports " in capsys.readouterr().err, verb
    assert code_of("doctor", run) == 0, "which reads records and logs, and no config"
    assert not Path("imported").exists()


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "logs/learner.log", ".fleet.json.tmp", "checkpoints/step-9"])
def test_a_run_from_elsewhere_is_not_resumed_through_its_links(copy, name, capsys):
    private = Path("private")
    private.write_text("mine")
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(private.resolve())
    assert code_of("resume", "x", "total_steps=720") == 2
    err = capsys.readouterr().err
    assert f"{copy / name} is a link to {private.resolve()}" in err and "--trust" in err, err
    assert private.read_text() == "mine"
    (copy / name).unlink()
    (copy / "within").symlink_to("config.yaml")
    assert code_of("resume", "x", "total_steps=700") == 0


def test_a_copy_that_names_no_module_needs_no_trust(copy):
    assert code_of("eval", "x", "--episodes", 1) == 0 and code_of("config", "show", "x") == 0
    assert code_of("resume", "x", "total_steps=720") == 0
