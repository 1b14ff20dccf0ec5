"""`qfleet share`, against a hub that runs in the test: the folder, the card, and what the real library sends."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from qfleet.cli.commands import main
from qfleet.report.model_card import model_card
from qfleet.runs.checkpoint import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
TINY = ["total_steps=300", "env.lanes=2", "agent.hidden=[16]", "replay.chunk_steps=8", "replay.min_steps=64",
        "learner.batch_size=8", "replay.samples_per_insert=2", "eval.period_steps=200", "eval.episodes=1",
        "stop_at=null", "run.tensorboard=false", "env.max_episode_steps=40"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    assert main(["train", "cartpole", *TINY, f"run.root={root}", "run.name=x", "--quiet"]) == 0
    return root / "x"


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs" / "x")
    return tmp_path


def front_matter(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def test_a_dry_run_leaves_a_folder_that_can_be_evaluated(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["share", "x", "me/poles", "--dry-run", "--episodes", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "poles" and "mean return" in out and err == ""
    assert sorted(path.name for path in (place / "poles").iterdir()) == [
        "README.md", "config.yaml", "manifest.json", "policy.safetensors", "replay.mp4"]
    assert open_checkpoint(place / "poles").manifest.kind == "policy"
    front = front_matter(place / "poles")
    [result] = front["model-index"][0]["results"]
    assert result["dataset"]["name"] == "CartPole-v1" and result["task"]["type"] == "reinforcement-learning"
    assert " +/- " in result["metrics"][0]["value"] and "deep-reinforcement-learning" in front["tags"]
    assert main(["eval", "poles", "--episodes", "1"]) == 0


@pytest.mark.parametrize(("words", "told"), [
    (["share", "x", "nonsense"], "write USER/NAME"), (["share", "x", "me/../you"], "write USER/NAME"),
    (["share", "gone", "me/poles", "--dry-run"], "no run 'gone'"), (["share", "x"], "is missing"),
    (["share", "x", "me/runs", "--dry-run"], "exists already"), (["share", "x", "me/poles"], "qfleet[hub]")])
def test_mistakes_are_told(place, capsys, monkeypatch, words, told):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_without_films_the_policy_is_shared_all_the_same(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert main(["share", "x", "me/poles", "--dry-run", "--episodes", "1"]) == 0
    assert "no video: " in capsys.readouterr().err and "replay.mp4" not in (place / "poles/README.md").read_text()


def test_a_card_of_anything_is_still_a_card():
    evil = "a`b|c\n---\nd: [e"
    score = {"mean_reward": 14.6, "std_reward": 0.5, "episodes": 3, "protocol": "full", "seed": 1}
    text = model_card(
        "me/x", {"env": {"id": evil}, "agent": {"algo": "dqn"}}, score, {"steps": 1000, "updates": 5}, True
    )
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["tags"][0] == "a`b|c --- d: [e" and "human" not in text
    known = model_card("me/x", {"env": {"id": "ALE/Pong-v5"}}, score, {"steps": 1000, "updates": 5}, False)
    assert "`100%`" in known and "Video" not in known


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files needs; what comes is kept in `server.files`."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        here = f"http://127.0.0.1:{self.server.server_address[1]}"
        if self.headers.get("Authorization") != "Bearer hf_test":
            return self._say({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self._say({"url": f"{here}/me/poles", "name": "me/poles", "id": "1"})
        if "/preupload/" in self.path:
            return self._say({"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                                        for each in json.loads(body)["files"]]})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._say({"success": True, "commitOid": "1" * 40, "commitUrl": f"{here}/me/poles/commit/1"})
        return self._say({}, 404 if "yaml" not in self.path else 200)

    def do_GET(self):
        self._say({"id": "me/poles", "sha": "0" * 40, "siblings": []})

    do_HEAD = do_GET

    def _say(self, document, status=200):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        """Nobody reads it."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    library = pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.created, server.files = [], {}
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    where = f"http://127.0.0.1:{server.server_address[1]}"
    real = library.HfApi
    monkeypatch.setattr(library, "HfApi", lambda **options: real(endpoint=where, token=server.token, **options))
    server.token = "hf_test"
    yield server
    server.shutdown()
    server.server_close()


def test_everything_is_uploaded(place, hub, capsys):
    assert main(["share", "x", "me/poles", "--private", "--episodes", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["url"].endswith("/me/poles") and told["folder"] is None
    assert hub.created[0]["name"] == "poles" and "private" in json.dumps(hub.created[0])
    assert set(hub.files) == {"README.md", "config.yaml", "manifest.json", "policy.safetensors", "replay.mp4"}
    assert hub.files["README.md"].startswith(b"---\nlibrary_name: qfleet")
    assert not (place / "poles").exists()


def test_a_hub_that_refuses_is_told_without_a_traceback(place, hub, capsys):
    hub.token = "hf_wrong"
    assert main(["share", "x", "me/poles", "--episodes", "1"]) == 2
    err = capsys.readouterr().err
    assert "cannot upload to me/poles" in err and "hf auth login" in err and "Traceback" not in err
