"""Every command that the documentation shows is taken by the command line, and its configuration holds.

This is the dry run of what is too long, too large or too far away to be run by a test; the quick start is run for real.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import bench
import pytest
from doc_pages import unfolded

from qfleet.cli.commands import MOVED, find_command, parse
from qfleet.cli.options import fleet_overrides
from qfleet.core.errors import UserError
from qfleet.runconfig import resolution, resumable
from qfleet.tuning.parameters import split_overrides
from qfleet.tuning.space import DeclaredSpace, TrialConfig
from qfleet.tuning.study_folder import recipe_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
PLACEHOLDER = re.compile(r"[A-Z]{2,}|=[A-Z]$|\.\.\.|…|[\[<|]")
"""RUN, DIR, [options], a|b: the shape of a command rather than one."""

SHAPE = "key=value"
YOURS = {"my_env:MyEnv": "CartPole-v1", "mine.yaml": "cartpole", "my_explore:Steady": "constant",
         "studies/cartpole/best.yaml": "CartPole-v1"}
"""Files that the reader is to write, and what stands for them."""

WRONG = re.compile(r"lerning_rate|agent\.n_stp|--seed 3|n_step=100|batch_size=7|train cartpole --listen 0.0.0.0:4440$"
                   r"|--token-file loose|train cartpole --no-local-actors$|resume demo seed=4$|--algo dqn")
"""Commands that are shown to fail."""

RESOLVED = ("train", "doctor", "check-env")


LAUNCHER = re.compile(r"^(?:\w+=\S+ )*(?:taskset -c \S+ )?(?:torchrun .*?-m |srun (?:-c \d+ |-\S+ )*|python3? -m )?"
                      r"(?=qfleet |python3? )")
"""What starts a command here or elsewhere, and is no part of it."""


def spoken(text: str) -> Iterator[str]:
    """What stands after a `$` in blocks, and inline code, on one line each and without comments and pipes."""
    joined = re.sub(r"\s*\\\n\s*", " ", unfolded(text))
    plain = re.sub(r"^```.*?^```", "", joined, flags=re.M | re.S)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", plain)]
    for line in [*re.findall(r"^(?:    )?\$ (.*)$", joined, re.M), *inline]:
        yield re.split(r"\s+#\s|\s[|>&](?:\s|$)", line)[0].strip()


def commands(text: str) -> Iterator[str]:
    """Those that begin with qfleet, whoever launches them, and are no shape of a command, nor shown to fail."""
    for line in spoken(text):
        line = LAUNCHER.sub("", line)
        shape = re.sub(r"[\w.]+=\S{2,}|ALE/\S+|\S+NoFrameskip-v4|(?<=resume )RUN", "", line)
        if line.startswith("qfleet ") and not (PLACEHOLDER.search(shape) or SHAPE in line or WRONG.search(line)):
            yield line


def check(line: str) -> None:
    """Fails unless the command would be taken, down to its configuration."""
    words = shlex.split(line)
    if len(words) < 2 or not re.fullmatch(r"[a-z][a-z-]*", words[1]):
        return
    verb = find_command(words[1])
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
    elif verb.name == "resume":
        met = any(word.startswith(("learners=", "parameter_server.")) for word in args.overrides)
        learnt = ["sync=server"] if met else []
        if any(word.startswith("learner.schedule_updates=") for word in args.overrides):
            learnt.append("learner.schedule=linear")
        begun, changed = (resolution.resolve("cartpole", [*learnt, *more]).config for more in ([], args.overrides))
        resumable.changed_on_resume(begun, changed)
        return
    elif verb.name == "tune" and source:
        plain, space = split_overrides(args.overrides)
        shared = TrialConfig(recipe_of(resolution.resolve(source[0], plain)))
        if space:  # else it is in a file
            DeclaredSpace.parse(space, shared)
        return
    elif verb.name not in RESOLVED:
        return
    if not source or source[0].startswith("runs/") or not (source[0] in KNOWN or re.search(r"[:/]|-v\d$", source[0])):
        return  # a run
    given = [word for word in args.overrides if not word.startswith("fleet.tls_")]
    if verb.name == "train":
        given += fleet_overrides(args, lambda words: resolution.resolve(source[0], words).config.has_children)
    resolution.resolve(source[0], given)


def exempt(page: str, line: str) -> bool:
    """Whether a command may be one of an earlier version: the changelog names verbs that have become scripts."""
    return page == "CHANGELOG.md" and line.split()[:2] in [["qfleet", verb] for verb in MOVED]


KNOWN = {path.stem for path in (ROOT / "qfleet/recipes").glob("*.yaml")}
SHOWN = [pytest.param(line, id=f"{page.name}: {line}") for page in PAGES
         for line in dict.fromkeys(commands(page.read_text())) if not exempt(page.name, line)]


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
    assert len(SHOWN) > 150 and sum("migration.md" in param.id or "sources.md" in param.id for param in SHOWN) > 30


@pytest.mark.parametrize("line", ["qfleet trian cartpole", "qfleet train cartpole agent.n_stp=3",
                                  "qfleet eval x --sedes 3", "qfleet train cartpole replay.beta_start=0.5",
                                  "qfleet submit slurm pong learners=2", "qfleet train pong placement=processes",
                                  "qfleet resume demo seed=4",
                                  "qfleet resume demo eval.episods=3"])
def test_a_wrong_command_is_found(line, examples):
    with pytest.raises((UserError, SystemExit)):
        check(line)


def test_only_verbs_of_the_past_are_exempt():
    assert exempt("CHANGELOG.md", "qfleet bench pong") and not exempt("cli.md", "qfleet bench pong")
    assert not exempt("CHANGELOG.md", "qfleet trian pong")


def test_commands_are_found_in_every_form():
    text = ("```console\n$ qfleet train cartpole   # ok\n$ FOO=1 qfleet eval x > out\n```\nSee `qfleet\ntop x` and "
            "`qfleet plot RUN`.\n\n    $ qfleet train pong \\\n        seed=3\n\n"
            "    $ torchrun --nproc-per-node 2 -m qfleet train catch\n    $ srun --ntasks=4 -c 2 qfleet join x:1 &\n"
            "Or `python -m qfleet watch x`, `qfleet resume RUN learners=1`, and `ray start`.")
    assert list(commands(text)) == ["qfleet train cartpole", "qfleet eval x", "qfleet train pong seed=3",
                                    "qfleet train catch", "qfleet join x:1", "qfleet top x", "qfleet watch x",
                                    "qfleet resume RUN learners=1"]


TINY = ["total_steps=1200", "eval.episodes=2", "replay.min_steps=200", "replay.samples_per_insert=4"]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_quick_start_runs_as_it_is_written(tmp_path):
    """Every qfleet command of the page, in order, with fewer steps."""
    page = re.sub(r"\s*\\\n\s*", " ", (ROOT / "docs/quickstart.md").read_text())
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


SCRIPT = re.compile(r"python3? ((?:benchmarks|tests|examples)/[\w/]+\.py.*)")
SCRIPTS = sorted({found[1] for page in PAGES for line in spoken(page.read_text())
                  if (found := SCRIPT.match(LAUNCHER.sub("", line))) and not exempt(page.name, found[1])})
PROSE = re.compile(r"\b[A-Z]{3,}\b(?!=)|, \w+ \w+ (?:after|by) |, one by one|\.\.\.")
"""Where a command stands for several: its options are looked at, not their values."""

BASES = {"cost.py": "pong-fast", "curiosity_plots.py": "deep-sea", "continuous_returns.py": "halfcheetah",
         "steady_memory.py": "pong", "spread.py": "pong", "pong_family.py": "agent57"}
"""What the settings that a script is given are set over."""


class Taken(Exception):
    """Thrown where a script has read its command line, before it does anything."""


def read_by_itself(script: Path, words: list[str], monkeypatch) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """A script's own parser, and what it makes of the words."""
    def stopped(name):
        genuine = getattr(argparse.ArgumentParser, name)

        def parse(self, args=None, namespace=None):
            prose = bool(PROSE.search(" ".join(words)))
            raise Taken(self, None if prose else genuine(self, args, namespace))

        return parse

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stopped(name))
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.setattr(sys, "path", [str(script.parent), str(ROOT / "tests/system"), *sys.path])
    with pytest.raises(Taken) as taken:
        runpy.run_path(str(script), run_name="__main__")
    return taken.value.args


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Options of a parser and of its commands."""
    commands = [command for action in parser._actions if isinstance(action, argparse._SubParsersAction)
                for command in action.choices.values()]
    return set(parser._option_string_actions).union(*map(options_of, commands))


def dry_run(line: str, monkeypatch) -> None:
    """Fails unless a script takes these words."""
    script, *words = shlex.split(line)
    path = ROOT / script
    text = path.read_text()
    if "parse_args" not in text and "parse_intermixed_args" not in text:
        compile(text, script, "exec")
        assert words == [], "it takes no words"
        return
    parser, args = read_by_itself(path, words, monkeypatch)
    assert {word for word in words if re.match(r"--[a-z]", word)} <= options_of(parser)
    if args is not None and path.name == "bench.py":
        names, overrides = bench.split_words(args.words)
        found = bench.find_workloads(names)
        bench.find_device([word for word in overrides if not word.startswith("device=")], args.profile)
        resolution.resolve(found[0].recipe, overrides)
    elif args is not None and getattr(args, "overrides", None):
        resolution.resolve(BASES[path.name], args.overrides)


@pytest.mark.parametrize("line", SCRIPTS)
def test_scripts_that_pages_show_take_what_they_are_given(line, monkeypatch):
    dry_run(line, monkeypatch)


@pytest.mark.parametrize("line", ["benchmarks/learn.py --only 'no such row'", "benchmarks/learn.py --threads 3",
                                  "benchmarks/pong_family.py --only NAME --jbs 3", "tests/report/screenshots.py --fast",
                                  "benchmarks/continuous_returns.py learner.precison=bf16",
                                  "benchmarks/suite.py run --jbs 3", "benchmarks/suite.py rnak",
                                  "benchmarks/bench.py pnog", "benchmarks/bench.py pong --rouns 3",
                                  "benchmarks/bench.py pong learner.batch_size=7",
                                  "benchmarks/bench.py pong --profile learner.precison=fp32"])
def test_a_wrong_word_for_a_script_is_found(line, monkeypatch):
    with pytest.raises((SystemExit, AssertionError, UserError)):
        dry_run(line, monkeypatch)


def test_scripts_are_found_in_every_form():
    assert len(SCRIPTS) > 30 and {"tests/report/screenshots.py", "benchmarks/sweep.py lanes"} <= set(SCRIPTS)
    assert any(line.startswith("benchmarks/ranks_speed.py") for line in SCRIPTS), "with taskset before it"


@pytest.mark.parametrize("words", sorted({found[1] for page in PAGES for line in spoken(page.read_text())
                                          if (found := re.match(r"torchrun (.*-m qfleet .*)", line))}))
def test_torchrun_takes_its_own_words(words):
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(shlex.split(words))
    assert args.module and args.training_script == "qfleet" and int(args.nproc_per_node) > 1


def after_dollars(tool: str) -> list[str]:
    return sorted({line for page in PAGES for line in spoken(page.read_text()) if line.startswith(f"{tool} -")
                   or re.match(rf"{tool} [a-z]+ -", line)})


@pytest.mark.parametrize("line", after_dollars("ray"))
def test_ray_knows_the_options_that_pages_give_it(line):
    from ray.scripts.scripts import start

    _, verb, *words = shlex.split(line)
    known = {option for param in start.params for option in (*param.opts, *param.secondary_opts)}
    assert verb == "start" and {word.partition("=")[0] for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("line", after_dollars("openssl"))
def test_openssl_makes_what_pages_ask_of_it(line, tmp_path):
    done = subprocess.run(shlex.split(line), cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0 and (tmp_path / "cert.pem").exists() and (tmp_path / "key.pem").exists()


OTHERS = {"make", "pip", "python", "python3", "cd", ".", ".venv/bin/pre-commit", "export", "tensorboard", "torchrun",
          "taskset", "srun", "ray", "kubectl", "docker", "openssl", "curl", "(umask", "qfleet", "jupytext"}
"""What may stand after a `$`: what is looked at here, and tools of others, which no test of pages starts."""

NEEDS = {r"benchmarks/(?:fast_speed|pong_family|sources|precision|spread)\.py": r"H200|GPU",
         r"python tests/report/screenshots\.py": r"needs Chromium", r"\$ srun ": r"Slurm",
         r"\$ kubectl ": r"have not been applied to a cluster", r"\$ docker ": r"no image has been built",
         r"\$ ray start": r"nodes?\b"}
"""Commands that few machines can run, and how the page that shows them says so."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_stands_after_a_dollar_that_nobody_looks_at(page):
    text = page.read_text()
    first = {line.split()[0] for line in re.findall(r"^(?:    )?\$ (?:\w+=\S+ )*(.*)$", text, re.M)}
    assert first <= OTHERS, f"look at {first - OTHERS} in a test, or name them here"
    for command, words in NEEDS.items():
        assert not re.search(command, text) or re.search(words, text), f"say what {command} needs: {words}"


def test_what_pages_make_and_install_is_there():
    """`make` targets, and extras of `pip install`: wherever a page names one, it exists."""
    text = "\n".join(page.read_text() for page in PAGES)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    made = set(re.findall(r"(?:^\$ |`)make ([a-z]+)\b", text, re.M))
    assert {"train", "test", "figures"} <= made <= targets
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    wanted = {extra for listed in re.findall(r"pip install[^\n`]*\[([a-z,]+)\]", text) for extra in listed.split(",")}
    assert {"atari", "video", "ray"} <= wanted <= known
