"""A virtual environment with one wheel in it, which finds its dependencies in the environment of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 60


def run(words: Sequence[str | Path], cwd: Path, **variables: str) -> str:
    """The output of a command that must succeed. No variable makes it import the source tree."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """The sdist or wheel of a source tree."""
    path = os.environ.get("PYTHONPATH", "")
    run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out], source, PYTHONPATH=path)
    [built] = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


def empty_environment(folder: Path) -> Path:
    """A virtual environment without any package, pip included."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    return folder


def install(wheel: Path, environment: Path) -> None:
    """Install a wheel and nothing else. Dependencies are found where the tests find them, after the wheel."""
    run([sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "--quiet", "--no-index",
         "--no-deps", wheel], environment)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
