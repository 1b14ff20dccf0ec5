"""Finding things by name: files of a package, and a user's own module in the working directory."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from qfleet.config import load_attribute, plugin, plugin_module, plugin_names
from qfleet.core.errors import UserError

MINE = """
from types import SimpleNamespace
from pydantic import Field
from qfleet.config import Config as Section, Fraction

class Config(Section):
    kind: str
    level: Fraction = Field(0.5, description="how much")

def build(cfg, lanes, first, total):
    return cfg.level

class Nest:
    class Deep:
        Config = Config
        build = staticmethod(build)

bare = SimpleNamespace(Config=Config)
nameless = SimpleNamespace(Config=type("Nameless", (Section,), {}), build=build)
wrong = SimpleNamespace(Config=dict, build=build)
whole = SimpleNamespace(Config=Config, build=build)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a user's modules, which nobody put on the path."""
    (tmp_path / "my_explorers.py").write_text(MINE)
    (tmp_path / "broken_one.py").write_text("x = 1 +\n")
    (tmp_path / "needy.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "angry.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    for name in ("my_explorers", "broken_one", "needy", "angry"):
        sys.modules.pop(name, None)


def test_modules_of_the_working_directory_are_found(here: Path) -> None:
    assert load_attribute("my_explorers:build").__name__ == "build"
    assert load_attribute("my_explorers:Nest.Deep").Config is load_attribute("my_explorers:Config")
    assert sys.path[0] == str(here)


def test_a_default_stands_for_an_attribute_only(here: Path) -> None:
    assert load_attribute("my_explorers:ns/Mine-v0", None) is None
    assert load_attribute("my_explorers:build", None).__name__ == "build"
    with pytest.raises(UserError, match="there is no module 'my_explorer'"):
        load_attribute("my_explorer:build", None)


@pytest.mark.parametrize(("reference", "message"), [
    ("my_explorers", "write module:attribute, such as my_module:MyClass"),
    (":x", "write module:attribute"), ("x:", "write module:attribute"),
    ("my_explorer:build", "there is no module 'my_explorer' in "), ("my_explorer:build", "did you mean my_explorers?"),
    ("my_explorers:biuld", "my_explorers has no attribute 'biuld'; did you mean build?"),
    ("my_explorers:Nest.Deeep", "my_explorers.Nest has no attribute 'Deeep'; did you mean Deep?"),
    ("broken_one:x", "importing broken_one failed with SyntaxError"),
    ("needy:x", "module needy needs 'no_such_package_anywhere', which is not installed"),
    ("angry:x", "importing angry failed with RuntimeError: not today"),
    ("my_explorers.sub:x", "there is no module 'my_explorers.sub'"),
])
def test_what_cannot_be_loaded_is_explained(here: Path, reference: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_attribute(reference)
    assert str(caught.value).startswith(repr(reference)) and message in str(caught.value)


def test_files_of_the_package_are_plugins_by_name() -> None:
    assert "dqn" in plugin_names("qfleet.algos") and {"ladder", "linear"} <= set(plugin_names("qfleet.explore"))
    assert plugin_module("qfleet.algos", "dqn").Config().algo == "dqn"
    with pytest.raises(UserError, match=r"'dqnn' is not one of .*dqn.*did you mean dqn\?"):
        plugin_module("qfleet.algos", "dqnn")


def test_a_users_own_kind(here: Path) -> None:
    mark = plugin("qfleet.explore", "kind", "linear")
    section = mark.check({"kind": "my_explorers:whole", "level": 0.25})
    assert section.model_dump() == {"kind": "my_explorers:whole", "level": 0.25}
    assert plugin_module("qfleet.explore", "my_explorers:Nest.Deep").build(section, 1, 0, 1) == 0.25
    assert mark.make().model_dump()["kind"] == "linear"


@pytest.mark.parametrize(("name", "message"), [
    ("my_explorers:bare", "has no function `build`"), ("my_explorers:wrong", "has no `Config` that is a section"),
    ("my_explorers:nameless", "needs a field `kind: str`"),
])
def test_a_users_own_kind_that_lacks_something(here: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + message):
        plugin("qfleet.explore", "kind", "linear").check({"kind": name})


@pytest.mark.slow
def test_the_working_directory_is_found_from_the_installed_command_as_well(here: Path) -> None:
    code = "from qfleet.config import load_attribute; print(load_attribute('my_explorers:build').__name__)"
    script = here / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], cwd=here, capture_output=True, text=True, timeout=60)
    assert done.stdout == "build\n", done.stderr


@pytest.mark.parametrize("shared", ["value_based", "categorical", "actor_critic", "curiosity"])
def test_what_algorithms_share_is_public_and_no_algorithm(shared: str) -> None:
    assert importlib.import_module(f"qfleet.algos.{shared}") and shared not in plugin_names("qfleet.algos")
    with pytest.raises(UserError, match=f"'{shared}' is not one of agent57"):
        plugin_module("qfleet.algos", shared)
