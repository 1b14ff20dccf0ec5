"""A Dockerfile without Docker: strictly parsed, with its COPY and RUN steps carried out below a folder.

Differences from a build by Docker: the base image is this host, absolute paths of the image are paths below the folder,
`useradd` makes a home directory only, and `pip` is `fake_pip`.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from install_kit import build, install
from packaging.requirements import Requirement

KNOWN = {"FROM", "ARG", "ENV", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
ABSOLUTE = re.compile(r"(?<![\w./:-])/(?=\w)")
"""The beginning of an absolute path in a RUN step."""

IMAGE_PATH = re.compile(rf"{ABSOLUTE.pattern}(?=src\b|home\b)")
"""Of those, the ones that are moved below the folder. No other may be used: it would be one of this host."""


class DockerfileError(Exception):
    """A Dockerfile, or a step of it, that would not build."""


@dataclass(frozen=True)
class Step:
    """One instruction, with continuation lines joined."""

    name: str
    text: str


def parse(text: str) -> list[Step]:
    """The instructions of a Dockerfile."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    steps = [Step(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]
    if unknown := [step.name for step in steps if step.name not in KNOWN]:
        raise DockerfileError(f"unknown instructions: {unknown}")
    if not steps or steps[0].name != "FROM" or sum(step.name == "FROM" for step in steps) != 1:
        raise DockerfileError("a Dockerfile of one stage begins with its only FROM")
    for step in steps:
        if step.name in ("ENTRYPOINT", "CMD") and not isinstance(json.loads(step.text), list):
            raise DockerfileError(f"{step.name} is no list: a shell would swallow signals")
    return steps


def ignored(path: str, patterns: str) -> bool:
    """Whether .dockerignore leaves out a path. The last pattern that fits the path or a folder of it decides."""
    left_out = False
    parents = [str(each) for each in [Path(path), *Path(path).parents] if str(each) != "."]
    for line in patterns.splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keeps, pattern = pattern.startswith("!"), pattern.removeprefix("!")
        shapes = [pattern, pattern.removeprefix("**/")]
        if any(fnmatch.fnmatchcase(each, shape) and (shape.count("/") == each.count("/") or "**" in pattern)
               for each in parents for shape in shapes):
            left_out = not keeps
    return left_out


@dataclass
class Image:
    """What the steps have made so far."""

    root: Path
    context: Path
    environment: Path
    variables: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    workdir: Path = Path("/")
    installed: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def below(self, path: Path | str) -> Path:
        return self.root / str(path).lstrip("/")

    def build(self, steps: list[Step], arguments: Mapping[str, str]) -> None:
        """Carry out the steps. `arguments` are those of --build-arg."""
        for step in steps:
            match step.name:
                case "ARG":
                    name, _, default = step.text.partition("=")
                    self.variables[name] = arguments.get(name, default)
                case "ENV":
                    self.variables |= dict(word.split("=", 1) for word in shlex.split(step.text))
                case "COPY":
                    self._copy(shlex.split(step.text))
                case "RUN":
                    self._run(step.text)
                case "USER":
                    self.user = step.text
                case "WORKDIR":
                    self.workdir = Path(step.text)
                    self.below(self.workdir).mkdir(parents=True, exist_ok=True)
                case "ENTRYPOINT":
                    self.entrypoint = json.loads(step.text)
                case "CMD":
                    self.command = json.loads(step.text)

    def _copy(self, words: list[str]) -> None:
        *sources, target = words
        patterns = (self.context / ".dockerignore").read_text()
        for source in sources:
            path = self.context / source
            if not path.exists() or ignored(source, patterns):
                raise DockerfileError(f"COPY {source}: it does not exist, or .dockerignore leaves it out")
            into = self.below(target) / source if target.endswith("/") else self.below(target)
            for each in [path] if path.is_file() else sorted(path.rglob("*")):
                if each.is_file() and not ignored(str(each.relative_to(self.context)), patterns):
                    to = into / each.relative_to(path) if path.is_dir() else into
                    to.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(each, to)

    def _run(self, line: str) -> None:
        log = self.root / "pip.log"
        if len(ABSOLUTE.findall(line)) > len(IMAGE_PATH.findall(line)):
            raise DockerfileError(f"RUN {line}: uses a path outside of /src and /home")
        adjusted = IMAGE_PATH.sub(f"{self.root}/", line)
        shims = self.root / "shims"
        shims.mkdir(exist_ok=True)
        for name, script in (("pip", f'exec {sys.executable} {__file__} {self.environment} {log} "$@"'),
                             ("useradd", f'for name; do :; done; mkdir -p "{self.root}/home/$name"')):
            (shims / name).write_text(f"#!/bin/sh\n{script}\n")
            (shims / name).chmod(0o755)
        python_path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(["sh", "-c", adjusted], cwd=self.below(self.workdir), capture_output=True, text=True,
                              timeout=60, env={"PATH": f"{shims}:/usr/bin:/bin", "PYTHONPATH": python_path,
                                               **self.variables})
        if done.returncode:
            raise DockerfileError(f"RUN {line}\n{done.stdout}{done.stderr}")
        self.installed = log.read_text().splitlines() if log.exists() else []


def fake_pip(environment: Path, log: Path, words: list[str]) -> None:
    """`pip install`. A folder is built and installed without dependencies; a package from an index must be installed
    here in a version that fits. Extras must exist."""
    if words[:1] != ["install"]:
        raise SystemExit(f"pip {words}: only install is expected")
    words = words[1:]
    while words and words[0].startswith("--"):
        option, value, *words = words
        if option == "--constraint":
            Path(value).read_text()
        elif option != "--index-url" or not value.startswith("https://"):
            raise SystemExit(f"pip install: unexpected {option} {value}")
    for word in words:
        folder, _, extras = word.rstrip("]").partition("[")
        if folder.startswith("/"):
            project = tomllib.loads((Path(folder) / "pyproject.toml").read_text())["project"]
            if missing := set(extras.split(",")) - set(project["optional-dependencies"]):
                raise SystemExit(f"pip install {word}: unknown extras {missing}")
            install(build("wheel", Path(folder), Path(folder) / "dist"), environment)
        elif not (needed := Requirement(word)).specifier.contains(version(needed.name).partition("+")[0]):
            raise SystemExit(f"pip install {word}: {version(needed.name)} is installed here")
        with log.open("a") as file:
            file.write(f"{word.replace(str(log.parent), '')}\n")


if __name__ == "__main__":
    fake_pip(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
