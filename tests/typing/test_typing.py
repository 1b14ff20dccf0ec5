"""A typed program of a user passes both type checkers in strict mode, and names of the API are completed."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import qfleet
from qfleet.interface.arguments import Settings
from qfleet.runconfig.run_config import RunConfig

HERE = Path(__file__).parent
PROGRAM, ROOT = HERE / "user_program.py", HERE.parents[1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_mypy_finds_no_error_in_a_strict_program():
    """Also none that is expected and missing: unused ignores are errors."""
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", ROOT / ".mypy_cache" / "strict",
         PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_basedpyright_finds_no_error_in_a_strict_program(tmp_path):
    settings = {"include": [str(PROGRAM)], "typeCheckingMode": "strict", "extraPaths": [str(ROOT)],
                "reportUnnecessaryTypeIgnoreComment": True}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    checked = subprocess.run(
        [sys.executable, "-m", "basedpyright", "-p", tmp_path, "--pythonpath", sys.executable], cwd=tmp_path,
        capture_output=True, text=True)
    assert checked.returncode == 0 and "0 errors, 0 warnings" in checked.stdout, checked.stdout + checked.stderr


def test_the_package_says_that_it_is_typed():
    assert (Path(qfleet.__file__).parent / "py.typed").exists()


def test_keyword_arguments_are_the_keys_of_the_config():
    """`env` and `callbacks` are arguments of their own."""
    assert Settings.__annotations__.keys() == RunConfig.model_fields.keys() - {"env", "callbacks"}


def test_names_of_the_package_are_completed_and_documented():
    assert sorted(dir(qfleet)) == sorted(qfleet.__all__)
    for name in set(qfleet.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(qfleet, name)), name


@pytest.mark.parametrize(("kind", "names"), [
    (qfleet.Run, {"step", "until", "train", "stop", "save", "evaluate", "resume", "steps", "updates", "episodes",
                  "best", "done", "replay", "metrics", "records", "agent", "network", "close"}),
    (qfleet.TrainedAgent, {"act", "reset", "network"}),
    (qfleet.RunControl, {"steps", "updates", "episodes", "best", "metrics", "network", "log", "stop",
                         "request_evaluation", "request_checkpoint"}),
    (qfleet.Callback, {"on_start", "on_step", "on_episode", "on_evaluation", "on_checkpoint", "on_end"}),
], ids=lambda each: getattr(each, "__name__", ""))
def test_members_are_completed_and_documented(kind, names):
    public = {name for name in dir(kind) if not name.startswith("_")}
    assert names <= public
    assert not [name for name in public if not inspect.getdoc(inspect.getattr_static(kind, name))]


def test_attributes_of_a_run_are_completed(tmp_path):
    with qfleet.Run(env="toy/Catch-v0", run={"root": str(tmp_path)}) as run:
        assert {"config", "directory", "step"} <= set(dir(run))
        assert {"config", "spec", "checkpoint", "policy"} <= set(dir(run.agent))
        assert [name for name in vars(run) if not name.startswith("_")] == ["config", "directory"]
