"""Every command that the documentation shows is taken by the command line, and its configuration holds.

This is the dry run of what is too long, too large or too far away to be run by a test; the quick start is run for real.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from qfleet import recipe
from qfleet.cli import find_verb, parse
from qfleet.types import UserError
from qfleet.verbs.options import fleet_overrides

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
PLACEHOLDER = re.compile(r"[A-Z]{2,}|=[A-Z]$|\.\.\.|…|[\[<|]")
"""RUN, DIR, [options], a|b: the shape of a command rather than one."""

YOURS = {"my_env:MyEnv": "CartPole-v1", "mine.yaml": "cartpole", "my_explore:Steady": "constant"}
"""Files that the reader is to write, and what stands for them."""

WRONG = re.compile(r"lerning_rate|agent\.n_stp|--seed 3|n_step=100|batch_size=7|train cartpole --listen 0.0.0.0:4440$"
                   r"|--token-file loose|train cartpole --no-local-actors$")
"""Commands that are shown to fail."""

RESOLVED = ("train", "doctor", "check-env")


def commands(text: str) -> Iterator[str]:
    """What stands after a `$` in blocks, and inline code that begins with qfleet; a comment is no part of it."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    blocks = re.findall(r"^(?:    )?\$ (?:\w+=\S+ )*(qfleet .*)$", joined, re.M)
    plain = re.sub(r"^```.*?^```", "", joined, flags=re.M | re.S)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", plain)]
    inline = [re.sub(r"^(torchrun .*-m )(?=qfleet)", "", code) for code in inline]
    for line in [*blocks, *(code for code in inline if code.startswith("qfleet "))]:
        line = re.split(r"\s+#\s|\s[|>&]\s?", line)[0].strip()
        shape = re.sub(r"[\w.]+=\S{2,}|ALE/\S+|\S+NoFrameskip-v4", "", line)
        if not (PLACEHOLDER.search(shape) or WRONG.search(line)):
            yield line


def check(line: str) -> None:
    """Fails unless the command would be taken, down to its configuration."""
    words = shlex.split(line)
    if len(words) < 2 or not re.fullmatch(r"[a-z][a-z-]*", words[1]):
        return
    verb = find_verb(words[1])
    if words[2:] in ([], ["slurm"]) and verb.words[0]:
        return  # a verb that is spoken of
    words = [YOURS.get(word, word) for word in words]
    words = [re.sub(r"=(my_explore:Steady)$", "=constant", word) for word in words]
    args = parse(verb, words[2:])
    args.overrides = [re.sub(r"^env\.kwargs\.size=.*", "seed=1", word) for word in args.overrides]
    source = args.words[:1]
    if verb.name == "submit":
        source = args.words[1:]
    elif verb.name == "config":
        source = args.words[1:2] if args.words[0] in ("show", "explain") else []
    elif verb.name not in RESOLVED:
        return
    if not source or source[0].startswith("runs/") or not (source[0] in KNOWN or re.search(r"[:/]|-v\d$", source[0])):
        return  # a run
    more = fleet_overrides(args) if verb.name == "train" else []
    recipe.resolve(source[0], [*(word for word in args.overrides if not word.startswith("fleet.tls_")), *more])


KNOWN = {path.stem for path in (ROOT / "qfleet/recipes").glob("*.yaml")}
SHOWN = [pytest.param(line, id=f"{page.name}: {line}") for page in PAGES
         for line in dict.fromkeys(commands(page.read_text()))]


@pytest.fixture
def examples(monkeypatch, tmp_path):
    """A working directory with the examples and a token."""
    for path in (ROOT / "examples").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "token").write_text("word")
    (tmp_path / "token").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("line", SHOWN)
def test_commands_are_taken(line, examples):
    check(line)


def test_there_are_commands():
    assert len(SHOWN) > 150 and sum("migration.md" in param.id for param in SHOWN) > 30


@pytest.mark.parametrize("line", ["qfleet trian cartpole", "qfleet train cartpole agent.n_stp=3",
                                  "qfleet eval x --sedes 3", "qfleet train cartpole replay.beta_start=0.5",
                                  "qfleet submit slurm pong actors=0"])
def test_a_wrong_command_is_found(line, examples):
    with pytest.raises((UserError, SystemExit)):
        check(line)


def test_commands_are_found_in_every_form():
    text = ("```console\n$ qfleet train cartpole   # ok\n$ FOO=1 qfleet eval x > out\n```\nSee `qfleet\ntop x` and "
            "`qfleet plot RUN`.\n\n    $ qfleet train pong \\\n        seed=3\n")
    assert list(commands(text)) == ["qfleet train cartpole", "qfleet eval x", "qfleet train pong seed=3",
                                    "qfleet top x"]


TINY = ["total_steps=1200", "eval.episodes=2", "replay.min_steps=200", "replay.samples_per_insert=4"]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_quick_start_runs_as_it_is_written(tmp_path):
    """Every qfleet command of the page, in order, with fewer steps."""
    page = (ROOT / "docs/quickstart.md").read_text()
    (tmp_path / "mine.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.S)[1])
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    lines = [re.split(r"\s+#\s", line)[0] for line in re.findall(r"^\$ ((?:qfleet|cd) .*)$", page, re.M)]
    assert len(lines) >= 12
    script = ["set -e", f"qfleet() {{ {shlex.quote(sys.executable)} -m qfleet \"$@\"; }}"]
    for line in lines:
        more = {"train": TINY, "resume": ["total_steps=2400"]}.get(line.split()[1], [])
        line = re.sub(r"total_steps=\S+", "", line.replace("--seeds 3", "--seeds 2")) if more else line
        script.append(" ".join([line, *map(shlex.quote, more)]))
    (tmp_path / "script.sh").write_text("\n".join(script) + "\n")
    done = subprocess.run(["bash", "script.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=400,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "runs/first/report.html").exists() and (tmp_path / "compare.png").exists()


SCRIPTS = sorted({match for page in PAGES for match in re.findall(
    r"python3? ((?:benchmarks|tests/system|examples)/\w+\.py(?:[^`\n]|\\\n)*)", page.read_text())})


@pytest.mark.parametrize("line", SCRIPTS)
def test_scripts_that_pages_show_have_the_options_that_they_show(line):
    script, *words = line.split()
    sources = [ROOT / script, *(ROOT / "benchmarks").glob("*.py")]  # a command line may be shared
    assert (ROOT / script).is_file()
    known = {option for path in sources for option in re.findall(r'"(--[a-z-]+)"', path.read_text())} | {"--help"}
    assert {word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word)} <= known


def test_what_pages_make_and_install_is_there():
    """`make` targets, and extras of `pip install`: wherever a page names one, it exists."""
    text = "\n".join(page.read_text() for page in PAGES)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    made = set(re.findall(r"(?:^\$ |`)make ([a-z]+)\b", text, re.M))
    assert {"train", "test", "figures"} <= made <= targets
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    wanted = {extra for listed in re.findall(r"pip install[^\n`]*\[([a-z,]+)\]", text) for extra in listed.split(",")}
    assert {"atari", "video", "ray"} <= wanted <= known
