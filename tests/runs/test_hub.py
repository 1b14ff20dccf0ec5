"""`hf:USER/NAME`: policies of the Hugging Face Hub, from the library's own cache and without a network."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from policies import cartpole, checkpoint_of

from qfleet import api
from qfleet.cli.commands import main
from qfleet.core.errors import UserError
from qfleet.runs import hub

library, constants, errors = (pytest.importorskip(f"huggingface_hub{name}") for name in ("", ".constants", ".errors"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return checkpoint_of(cartpole(), tmp_path_factory.mktemp("trained"))


@pytest.fixture
def cache(tmp_path, monkeypatch, policy):
    """A cache as the library writes it: snapshots of links to blobs. There is no network."""
    home = tmp_path / "hf"
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": True}.items():
        monkeypatch.setattr(constants, name, value)
    for revision, commit in COMMITS.items():
        add_snapshot(home / "hub", "me/poles", revision, commit, policy)
    return home


def add_snapshot(root, repo, revision, commit, source):
    folder = root / f"models--{repo.replace('/', '--')}"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    for file in source.iterdir():
        blob = folder / "blobs" / f"{commit[:4]}-{file.name}"
        shutil.copy(file, blob)
        (folder / "snapshots" / commit / file.name).symlink_to(Path("../../blobs") / blob.name)
    return folder


def test_a_policy_is_loaded_evaluated_and_recorded_from_the_cache(cache, capsys):
    agent = api.load("hf:me/poles")
    assert agent.checkpoint.path == cache / "qfleet" / "me--poles" / COMMITS["main"]
    assert api.load("hf:me/poles@v1").checkpoint.path.name == COMMITS["v1"]
    assert api.load(f"hf:me/poles@{COMMITS['v1']}").checkpoint.path.name == COMMITS["v1"]
    assert main(["eval", "hf:me/poles", "--episodes", "1"]) == 0
    assert "mean return" in capsys.readouterr().out
    assert next(iter(api.rollout("hf:me/poles", render=False))).reward == 0
    assert main(["record", "hf:me/poles@v1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "poles-seed1000.mp4"
    assert api.export("hf:me/poles", "poles.onnx").is_file()
    assert main(["train", "cartpole", "agent.hidden=[16]", "init_from=hf:me/poles", "--dry-run"]) == 0
    assert main(["train", "cartpole", "init_from=hf:me/gone", "--dry-run"]) == 2


def test_a_damaged_copy_is_made_again(cache):
    path = api.load("hf:me/poles").checkpoint.path
    (path / "policy.safetensors").write_bytes(b"nothing")
    assert api.load("hf:me/poles").checkpoint.path == path and len(list(path.parent.iterdir())) == 1


def test_a_snapshot_of_plain_files_is_used_in_place(policy, monkeypatch):
    monkeypatch.setattr(library, "snapshot_download", lambda repo, revision, allow_patterns: str(policy))
    assert api.load("hf:me/poles").checkpoint.path == policy


def test_code_that_a_policy_names_is_not_imported(cache, policy, tmp_path, capsys):
    strange = checkpoint_of(cartpole(), tmp_path / "strange")
    agent = api.load(strange)
    config = agent.config.model_copy(update={"env": agent.config.env.model_copy(update={"id": "strange_env:Strange"})})
    path = checkpoint_of(type(agent)(config, agent.spec, agent.policy), tmp_path / "other")
    add_snapshot(cache / "hub", "me/strange", "main", "c" * 40, path)
    assert main(["eval", "hf:me/strange"]) == 2
    assert "imports strange_env:Strange" in capsys.readouterr().err
    assert api.load("hf:me/strange", trust=True).act([0, 0, 0, 0]) in (0, 1)


@pytest.mark.parametrize(("name", "message"), [
    ("hf:poles", "write hf:USER/NAME"), ("hf:me/../x", "write hf:USER/NAME"), ("hf:me/poles@", "write hf:USER/NAME"),
    ("hf:me/poles@a b", "write hf:USER/NAME"), ("hf:me/gone", "the Hub cannot be reached"),
    ("hf:me/poles@v2", "the Hub cannot be reached")])
def test_mistakes_and_a_missing_network_are_told(cache, capsys, name, message):
    assert main(["eval", name]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_a_repository_without_a_policy_is_named(cache, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.yaml").write_text("x: 1")
    add_snapshot(cache / "hub", "me/model", "main", "d" * 40, tmp_path / "model")
    with pytest.raises(UserError, match="hf:me/model is not a policy of qfleet"):
        api.load("hf:me/model")


@pytest.mark.parametrize(("kind", "message"), [
    ("RepositoryNotFoundError", "there is no such repository"), ("RevisionNotFoundError", "has no revision v7"),
    ("GatedRepoError", "owner must grant"), ("HfHubHTTPError", "500 Server Error")])
def test_answers_of_the_hub_are_explained(monkeypatch, kind, message):
    class Answer(getattr(errors, kind)):
        def __init__(self):
            Exception.__init__(self, "\n500 Server Error\nmore")

    def download(repo, **options):
        raise Answer

    monkeypatch.setattr(library, "snapshot_download", download)
    with pytest.raises(UserError, match=f"cannot download hf:me/poles@v7: .*{message}"):
        hub.download("hf:me/poles@v7")


def test_a_missing_library_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["eval", "hf:me/poles"]) == 2
    assert "pip install 'qfleet[hub]'" in capsys.readouterr().err
