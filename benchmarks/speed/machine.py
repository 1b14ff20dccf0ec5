"""The machine, packages and commit that a measurement was made with, as every result file stores them."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import qfleet
from qfleet.runs.machine import cpu_model, gpus, package_versions

PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "mujoco", "box2d", "minigrid", "minatar", "stable-baselines3",
            "tianshou", "cpprb")
GIT_TIMEOUT_S = 10


def describe_machine(command: str | None = None) -> dict[str, Any]:
    """Hardware, versions, commit, command and load average; the load shows whether other processes ran meanwhile."""
    return {"date": date.today().isoformat(), "cpu": cpu_model(), "cores": os.cpu_count(),
            "gpu": next((gpu["name"] for gpu in gpus()), None), "python": platform.python_version(),
            "versions": package_versions(PACKAGES), "commit": _commit(),
            "load": [round(value, 2) for value in os.getloadavg()], "command": command or shlex.join(sys.argv)}


def _commit() -> str | None:
    """Commit of the imported qfleet, with a + if code or recipes have changed since; None if unknown.

    QFLEET_COMMIT is used for a tree without .git. An installed copy does not belong to the repository around it.
    """
    answers = []
    for question in (["ls-files", "--error-unmatch", "__init__.py"], ["rev-parse", "--short", "HEAD"],
                     ["status", "--porcelain", "--untracked-files=all", "--", ":/qfleet", ":/*.py"]):
        try:
            done = subprocess.run(["git", *question], cwd=Path(qfleet.__file__).parent, capture_output=True, text=True,
                                  timeout=GIT_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return os.environ.get("QFLEET_COMMIT") or None
        answers.append(done.stdout.strip())
    return answers[1] + ("+" if answers[2] else "")
