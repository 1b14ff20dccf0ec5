"""The Dockerfile, carried out by docker_kit: no Docker, no base image, and local packages instead of downloads."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from docker_kit import DockerfileError, Image, ignored, parse
from install_kit import empty_environment, run

from qfleet import __version__

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]
STEPS = parse((ROOT / "Dockerfile").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    made = Image(folder / "root", ROOT, empty_environment(folder / "venv"))
    made.root.mkdir()
    made.build(STEPS, {})
    return made


def wrong(steps: str, why: str, tmp_path: Path, **arguments: str) -> None:
    """Steps that must fail, and why."""
    made = Image(tmp_path, ROOT, tmp_path / "venv")
    with pytest.raises(DockerfileError, match=why):
        made.build(parse(f"FROM python:3.11-slim\n{steps}"), arguments)


def test_copy_and_run_steps_work_with_local_packages_instead_of_downloads(image):
    torch, package = image.installed
    assert torch in (ROOT / "constraints.txt").read_text().splitlines() and torch.startswith("torch==")
    assert package == "/src[atari]"
    assert not image.below("/src").exists(), "the sources are removed after the installation"
    assert image.below("/home/qfleet/runs").is_dir(), "a volume for runs gets its owner from this folder"


def test_the_entrypoint_runs_the_installed_package(image, tmp_path):
    command = image.environment / "bin" / image.entrypoint[0]
    assert image.command and "usage: qfleet" in run([command, *image.command], tmp_path)
    assert __version__ in run([command, "version"], tmp_path)
    where = run([image.environment / "bin/python", "-c", "import qfleet; print(qfleet.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(image.environment)


def test_commands_run_as_a_user_without_privileges_in_a_home_of_its_own(image):
    assert image.user not in ("", "root", "0")
    assert image.workdir == Path("/home") / image.user and image.below(image.workdir).is_dir()


def test_the_base_image_has_a_python_that_the_package_accepts():
    [major, minor] = re.fullmatch(r"python:(\d+)\.(\d+)-slim", STEPS[0].text).groups()
    least = tuple(map(int, re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["requires-python"]).groups()))
    assert (int(major), int(minor)) >= least
    assert f"Programming Language :: Python :: {major}.{minor}" in PROJECT["classifiers"]


def test_no_local_file_but_those_copied_is_sent_to_docker():
    patterns = (ROOT / ".dockerignore").read_text()
    for path in (".git/config", ".venv/bin/python", "runs/x/run.json", "tests/conftest.py", "token",
                 "qfleet/core/__pycache__/agent.pyc", "qfleet/core/a.nbi"):
        assert ignored(path, patterns), path
    for path in ("qfleet/__init__.py", "qfleet/recipes/catch.yaml", "qfleet/py.typed", "README.md"):
        assert not ignored(path, patterns), path


def test_steps_that_would_not_build_are_found(tmp_path):
    copied = "COPY pyproject.toml README.md LICENSE /src/\nCOPY qfleet /src/qfleet\n"
    wrong("COPY gone /src/", "does not exist", tmp_path)
    wrong("COPY tests /src/tests", "dockerignore leaves it out", tmp_path)
    wrong("RUN pip install torch==0.1", "is installed here", tmp_path)
    wrong("RUN pip install --upgrade-everything yes torch", "unexpected", tmp_path)
    wrong(f"ARG EXTRAS=atari\n{copied}RUN pip install /src[$EXTRAS]", "unknown extras", tmp_path, EXTRAS="atary")
    wrong("RUN false", "RUN false", tmp_path)
    wrong("RUN touch /etc/hosts", "outside of", tmp_path)
    for text in ("FROM a\nRUNN x", "RUN x", "FROM a\nFROM b", 'FROM a\nENTRYPOINT {"a": 1}'):
        with pytest.raises(DockerfileError):
            parse(text)
