"""The examples are what the documentation shows, and train by the commands that it gives."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from fake_envpool import NewPool
from policies import cartpole

from qfleet.envs import make
from qfleet.runconfig.resolution import resolve

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = {"custom_env": "custom-env.md", "custom_torso": "custom-network.md", "custom_encoder": "custom-network.md",
         "custom_loss": "custom-algorithm.md", "custom_algorithm": "custom-algorithm.md",
         "custom_optimizer": "optimizers.md"}
TINY = ["total_steps=300", "env.lanes=2", "agent.hidden=[16]", "replay.chunk_steps=8", "replay.min_steps=64",
        "learner.batch_size=8", "replay.samples_per_insert=2", "eval.period_steps=null", "eval.episodes=2",
        "checkpoint.period_steps=null", "stop_at=null", "run.tensorboard=false"]
OBJECTS = {"dict_env": ("custom-env.md", "action "), "custom_metric": ("metrics.md", "evaluation {'success': ")}
"""Programs that pass environments as Python objects: the page that shows them, and what they print at the end."""

ENVPOOL = "envpool_atari"
"""The example that needs EnvPool, which is not installed here: a stand-in with the same interface takes its place."""
PROGRAMS = {"step_by_hand": "20,000 steps", "callback": "stopped after"}
"""Programs of docs/python.md, and what they print."""

MOST_LINES = 50
TUNE = "tune"
MINIMAL = "minimal_dqn"
"""The example that connects a run by hand. It is a script of its own, and docs/design.md begins with it."""

ON_THE_PATH = {"core", "actor", "learner", "optim", "replay", "algos", "networks", "maths", "training"}
"""Packages whose files have to be read to follow a step and an update."""

SERVED = "serve_onnx"
"""The example that serves an exported policy."""

MOST_FILES = 23
"""Files of these packages that run in a step and an update, one that stores a chunk included."""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=110,
                          env=environment)
    assert done.returncode == 0, done.stderr
    return done


def joined(text: str) -> str:
    """A text whose commands are one line each."""
    return re.sub(r" \\\n\s+", " ", text)


def documented(name: str) -> list[str]:
    """The words of the train command that an example's page shows."""
    page = joined((ROOT / "docs" / PAGES[name]).read_text())
    commands = re.findall(rf"^\$ qfleet (train .*\b{name}:.*)$", page, re.M)
    assert commands, f"docs/{PAGES[name]} shows no command that trains {name}"
    return commands[0].split()


def test_every_example_has_a_page():
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    assert found == {*PAGES, *OBJECTS, *PROGRAMS, ENVPOOL, MINIMAL, SERVED, TUNE}
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "docs/design.md").read_text())
    assert links[0] == f"../examples/{MINIMAL}.py"


@pytest.mark.parametrize("name", PAGES)
def test_examples_are_short_and_name_their_command(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < MOST_LINES
    assert " ".join(["qfleet", *documented(name)]) in joined(text)


@pytest.mark.parametrize(("name", "opening"), [("custom_env", "class Dock"), ("custom_torso", "def residual"),
                                               ("custom_encoder", "class Fourier"), ("custom_loss", "class TwoHot"),
                                               ("custom_algorithm", "def loss("),
                                               ("custom_algorithm", "class Advantage"),
                                               ("custom_optimizer", "class Lion")])
def test_excerpts_are_those_of_the_example(name, opening):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / PAGES[name]).read_text(), re.M | re.S)
    excerpt = next(block for block in blocks if block.startswith(opening))
    lines = [line.strip() for line in excerpt.splitlines() if line.strip() not in ("", "...")]
    assert len(lines) > 5
    text = (EXAMPLES / f"{name}.py").read_text()
    assert [line for line in lines if line not in text] == []


def test_a_step_and_an_update_run_few_files(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    training = importlib.import_module(MINIMAL).Training(seed=0, explore_steps=500)
    actor, learner, package = training.actor, training.learner, ROOT / "qfleet"
    while learner.updates < 10:
        actor.step()
        learner.step()
    files: set[str] = set()

    def note(frame, event, argument):
        files.add(frame.f_code.co_filename)

    before = learner.updates
    sys.setprofile(note)
    try:
        for _ in range(16):  # steps of a chunk
            actor.step()
            learner.step()
    finally:
        sys.setprofile(None)
    training.env.close()
    paths = [Path(name).relative_to(package) for name in files if Path(name).is_relative_to(package)]
    found = sorted(str(path) for path in paths if path.parts[0] in ON_THE_PATH)
    assert learner.updates > before and {"learner/learner.py", "replay/codec.py", "algos/dqn.py"} <= set(found)
    assert len(found) <= MOST_FILES, found


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_minimal_example_learns():
    lines = run(str(EXAMPLES / f"{MINIMAL}.py"), "0", "6000", cwd=ROOT).stdout.splitlines()
    assert len(lines) == 7 and lines[0].startswith("step ")
    assert float(lines[-1].rpartition(" ")[2]) > 100, lines  # a random policy reaches 20 to 25


@pytest.mark.slow
def test_the_tuning_example_ends_with_a_recipe(tmp_path):
    tiny = [word for word in TINY if not word.startswith(("eval.period", "checkpoint", "stop_at"))]
    text = (EXAMPLES / f"{TUNE}.py").read_text()
    assert len(text.splitlines()) <= 40
    out = run(str(EXAMPLES / f"{TUNE}.py"), "--trials", "2", *tiny, cwd=tmp_path).stdout
    assert out.count(" complete ") == 2
    recipe = re.search(r"qfleet train (\S+best.yaml)", out)
    assert recipe is not None and (tmp_path / recipe[1]).read_text().startswith("# Best settings")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_examples_train(name, tmp_path):
    words = [*documented(name), *TINY, f"run.root={tmp_path}", "run.name=run", "--quiet", "--json"]
    result = json.loads(run("-m", "qfleet", *words, cwd=EXAMPLES).stdout)
    assert result["reason"] == "total_steps" and result["updates"] > 20
    again = run("-m", "qfleet", "eval", str(tmp_path / "run"), "--episodes", "2", "--json", cwd=EXAMPLES)
    assert json.loads(again.stdout)["episodes"] == 2


WITHOUT = "import runpy, sys; sys.modules['torch'] = sys.modules['qfleet'] = None; runpy.run_path('serve_onnx.py')"


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_example_serves_a_policy_without_torch_or_qfleet(tmp_path):
    pytest.importorskip("onnxruntime")
    agent = cartpole()
    policy = agent.export(tmp_path / "policy.onnx").path
    with subprocess.Popen([sys.executable, "-c", WITHOUT, str(policy), "0"], cwd=EXAMPLES, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as served:
        try:
            name, _, address = served.stdout.readline().strip().rpartition(" at ")
            assert name == "CartPole-v1"
            obs = [[0.0, 0.1, 0.0, -0.1], [0.5, -1.0, 0.1, 2.0]]
            with urlopen(address, json.dumps({"obs": obs}).encode(), timeout=20) as answer:
                assert json.load(answer)["action"] == agent.act(np.array(obs, np.float32)).tolist()
            with pytest.raises(HTTPError, match="400"):
                urlopen(address, b'{"obs": 1}', timeout=20)
        finally:
            served.kill()


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", OBJECTS)
def test_programs_with_environments_of_their_own_train(name, tmp_path):
    page, printed = OBJECTS[name]
    path = EXAMPLES / f"{name}.py"
    assert f"(../examples/{name}.py)" in (ROOT / "docs" / page).read_text() and len(path.read_text().splitlines()) <= 40
    lines = run(str(path), "1100", cwd=tmp_path).stdout.splitlines()
    assert lines[-1].startswith(printed)
    assert "\n".join(lines).count("  success ") == (0 if name == "dict_env" else 2)


def test_the_envpool_example_calls_what_envpool_has(monkeypatch):
    calls = []

    def make_gymnasium(task_id, **options):
        calls.append((task_id, options))
        return NewPool(options["num_envs"], seed=options["seed"], image=True)

    monkeypatch.setitem(sys.modules, "envpool", SimpleNamespace(make_gymnasium=make_gymnasium))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    program = importlib.import_module(ENVPOOL)
    config = resolve("atari", [f"env.id={ENVPOOL}:pong", "env.lanes=3", "env.clip_rewards=true", "env.life_loss=true"])
    with closing(make(config.config.env, 3)) as env:
        assert env.reset([5, 6, 7])["obs"].shape == (3, 4, 24, 24)
        env.send(np.ones(3, int))
        assert env.recv().reward.tolist() == [1, 1, 1]
    assert [(task, options["num_envs"], options["seed"]) for task, options in calls] == [
        ("Pong-v5", 3, 0), ("Pong-v5", 3, 5)]
    # Of EnvPool 1.2: options of all environments, and of Atari's.
    assert calls[0][1].keys() == {"num_envs", "seed", "stack_num", "use_fire_reset", "max_episode_steps"}
    assert callable(program.pong) and len((EXAMPLES / f"{ENVPOOL}.py").read_text().splitlines()) <= 40


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_the_python_api_run(name, tmp_path):
    page = (ROOT / "docs/python.md").read_text()
    path = EXAMPLES / f"{name}.py"
    assert f"(../examples/{name}.py)" in page and len(path.read_text().splitlines()) <= 40
    done = run(str(path), cwd=tmp_path)
    assert PROGRAMS[name] in done.stdout and list(tmp_path.glob("runs/*/checkpoints/step-*"))


@pytest.mark.slow
def test_the_example_environment_passes_its_check():
    found = json.loads(run("-m", "qfleet", "check-env", "custom_env:Dock-v0", "--json", cwd=EXAMPLES).stdout)
    assert {finding["level"] for finding in found} == {"info"}


@pytest.mark.slow
def test_the_readme_script_runs_without_a_guard(tmp_path):
    code = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert code is not None
    tiny = ", ".join(['total_steps=300, overrides=["env.isolate=true"', *(f'"{word}"' for word in TINY)]) + "]"
    script = code[1].replace("total_steps=20_000", tiny)
    assert script != code[1] and "__main__" not in script
    (tmp_path / "script.py").write_text(script)
    done = run("script.py", cwd=tmp_path)
    assert re.search(r"^\d+\.\d+ [01]$", done.stdout.strip(), re.M) and list(tmp_path.glob("runs/*/metrics.jsonl"))
