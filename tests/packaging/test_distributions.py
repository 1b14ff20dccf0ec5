"""The sdist and the wheel: what is in them, and that the installed wheel works away from the source tree."""

from __future__ import annotations

import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from install_kit import build, empty_environment, install, run

from qfleet import __version__

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MADE = {"__pycache__", ".nbi", ".nbc"}
"""Made by use of the source tree."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def package_files() -> set[str]:
    """Files of the package in the source tree."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / "qfleet").rglob("*")
            if path.is_file() and not MADE & {*path.parts, path.suffix}}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that the sdist builds, as an installer without a matching wheel does."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [source] = folder.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    made = empty_environment(tmp_path_factory.mktemp("installed") / "venv")
    install(wheel, made)
    return made


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return HeaderParser().parsestr(archive.read(f"qfleet-{__version__}.dist-info/METADATA").decode())


def test_the_sdist_holds_the_package_and_what_builds_it(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/", ".git/", "runs/"))]


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if not name.startswith(f"qfleet-{__version__}.dist-info/")} == package_files()
    assert "qfleet/py.typed" in names and f"qfleet-{__version__}.dist-info/licenses/LICENSE" in names
    assert sum(name.startswith("qfleet/recipes/") for name in names) > 30
    assert {Path(name).suffix for name in names if name.startswith("qfleet/report/page/")} == {".js", ".css"}


def test_the_metadata_is_that_of_the_project(wheel):
    found = metadata(wheel)
    assert (found["Name"], found["Version"], found["License-Expression"]) == ("qfleet", __version__, "MIT")
    required = [line for line in found.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(required) == len(PROJECT["dependencies"])
    assert set(found.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert found.get_all("Project-URL") is None, "nothing is published: an address would lead nowhere"


def test_the_installed_wheel_is_what_is_imported(environment, tmp_path):
    code = "import qfleet; print(qfleet.__file__, qfleet.__version__)"
    where, version = run([environment / "bin/python", "-c", code], tmp_path).split()
    assert Path(where).is_relative_to(environment) and version == __version__


def test_the_installed_command_trains_from_any_directory(environment, tmp_path):
    command = environment / "bin/qfleet"
    assert __version__ in run([command, "version"], tmp_path)
    recipes = run([command, "recipes"], tmp_path)
    assert all(path.stem in recipes for path in (ROOT / "qfleet/recipes").glob("*.yaml"))
    run([command, "train", "catch", "--smoke"], tmp_path)
