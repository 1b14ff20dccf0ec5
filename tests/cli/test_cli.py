"""The command line: words, overrides and options in any order, exit codes, and messages that help."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import types

import pytest

from qfleet.cli import commands
from qfleet.cli.commands import COMMANDS, IMPORTS, main, parse
from qfleet.cli.foreign_options import FOREIGN_OPTIONS
from qfleet.cli.parsing import make_parser
from qfleet.core.errors import EnvFault, UserError

BY_NAME = {command.name: command for command in COMMANDS}
PUBLIC = [command for command in COMMANDS if not command.hidden]


@pytest.fixture
def said(monkeypatch):
    """Replaces the command `version` by a function of the test's choice."""
    def install(function):
        table = tuple(types.SimpleNamespace(**{**vars(each), "run": function}) if each.name == "version" else each
                      for each in COMMANDS)
        monkeypatch.setattr(commands, "COMMANDS", table)
    return install


def raising(error):
    def run(args):
        raise error
    return run


def run_qfleet(command, **kwargs):
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"} | kwargs.pop("env", {})
    return subprocess.run(command, shell=True, executable="/bin/bash", env=env, capture_output=True, text=True,
                          timeout=60, **kwargs)


@pytest.mark.parametrize("command", PUBLIC, ids=lambda command: command.name)
def test_every_verb_has_help_with_examples(command, capsys):
    assert main([command.name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: qfleet {command.name}") and command.summary in text
    assert all(example in text for example in command.examples)


@pytest.mark.parametrize("command", [each for each in PUBLIC if each.examples], ids=lambda each: each.name)
def test_every_example_parses(command):
    for example in command.examples:
        words = example.partition(" > ")[0].split()
        assert words[:2] == ["qfleet", command.name]
        assert isinstance(parse(command, words[2:]), argparse.Namespace)


def test_the_overview_lists_all_public_verbs_and_no_hidden_one(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command.name} " in text for command in PUBLIC) and "_env-host" not in text
    assert main([]) == 2


def test_every_verb_that_reports_takes_json():
    assert [command.name for command in PUBLIC if "--json" not in make_parser(command).format_help()] == []


@pytest.mark.parametrize("argv", [
    ["cartpole", "seed=3", "--seeds", "2", "agent.n_step=3"], ["seed=3", "agent.n_step=3", "cartpole", "--seeds", "2"],
    ["--seeds", "2", "seed=3", "cartpole", "agent.n_step=3"], ["--seeds=2", "cartpole", "seed=3", "agent.n_step=3"]])
def test_overrides_may_stand_anywhere(argv):
    args = parse(BY_NAME["train"], argv)
    assert (args.words, args.overrides, args.seeds) == (["cartpole"], ["seed=3", "agent.n_step=3"], 2)


def test_values_with_equals_signs_and_paths_are_told_apart():
    args = parse(BY_NAME["train"], ["./a=b.yaml", "run.name=x=y", "env.id=ALE/Pong-v5"])
    assert args.words == ["./a=b.yaml"] and args.overrides == ["run.name=x=y", "env.id=ALE/Pong-v5"]


@pytest.mark.parametrize(("argv", "message"), [
    (["train"], "RECIPE|ENV_ID|FILE is missing"),
    (["export", "run"], "OUT is missing"),
    (["train", "cartpole", "pong"], "unexpected argument 'pong'"),
    (["train", "cartpole", "--seeds", "0"], "0 is too small: the minimum is 1"),
    (["train", "cartpole", "--seeds", "two"], "'two' is not an integer"),
    (["eval", "run", "--epsilon", "1.5"], "1.5 is not between 0 and 1"),
    (["eval", "run", "--which", "newest"], "invalid choice"),
    (["eval", "run", "seed=3"], "takes no overrides such as seed=3: write --seed 3"),
    (["eval", "run", "--episode", "3"], "did you mean --episodes?"),
    (["plot", "run", "--nonsense"], "unknown option --nonsense (see qfleet plot --help)"),
    (["train", "cartpole", "--capture-video"], "write --record"),
    (["train", "cartpole", "--track"], "write run.wandb=true"),
    (["train", "cartpole", "--env", "CartPole-v1"], "write env.id=CartPole-v1"),
    (["train", "cartpole", "--seed=7"], "write seed=7"),
    (["train", "cartpole", "-n", "1000"], "write total_steps=1000"),
])
def test_misuse_exits_2_with_a_remedy_and_no_traceback(argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert message in err and "Traceback" not in err and out == ""


@pytest.mark.parametrize("flag", sorted(set(FOREIGN_OPTIONS) - {"--track"}))
def test_habits_from_elsewhere_are_answered_with_our_spelling(flag, capsys):
    assert main(["train", "cartpole", flag, "3"]) == 2
    assert f"write {FOREIGN_OPTIONS[flag]}3" in capsys.readouterr().err


@pytest.mark.parametrize(("typo", "meant"), [("trian", "train"), ("recrod", "record"), ("checkenv", "check-env"),
                                             ("enjoy", "play"), ("evaluate", "eval"), ("list", "recipes")])
def test_did_you_mean(typo, meant, capsys):
    assert main([typo]) == 2
    assert f"did you mean `qfleet {meant}`?" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["bench"], ["bench", "cartpole", "--rounds", "3"], ["bench", "--help"],
                                  ["help", "bench"], ["benchmark"]])
def test_a_verb_that_became_a_script_names_it(argv, capsys):
    assert main(argv) == 2
    said = capsys.readouterr()
    assert "python benchmarks/bench.py" in said.err and not said.out and len(said.err.splitlines()) == 1


def test_a_verb_unlike_any_other_gets_the_list(capsys):
    assert main(["zzzz"]) == 2
    assert "choose one of train, resume" in capsys.readouterr().err


def test_a_users_mistake_is_one_line_and_several_are_a_list(said, capsys):
    said(raising(UserError("lr=7 is too large: use lr=1")))
    assert main(["version"]) == 2
    assert capsys.readouterr().err == "error: lr=7 is too large: use lr=1\n"
    said(raising(UserError("one\ntwo")))
    assert main(["version"]) == 2
    assert capsys.readouterr().err == "errors:\n  one\n  two\n"


def test_an_environments_fault_shows_its_own_traceback(said, capsys):
    fault = EnvFault("MyEnv failed 3 times")
    try:
        raise ZeroDivisionError("in step")
    except ZeroDivisionError as cause:
        fault.__cause__ = cause
    fault.add_note("in the environment's process: ...")
    said(raising(fault))
    assert main(["version"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: in step" in err and "in the environment's process" in err
    assert err.index("Traceback") < err.index("environment failed: MyEnv failed 3 times")


def test_a_surprise_shows_traceback_and_notes(said, capsys):
    error = RuntimeError("boom")
    error.add_note("the run is in runs/x")
    said(raising(error))
    assert main(["version"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "RuntimeError: boom" in err and err.count("the run is in runs/x") == 1


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (75, 75), (130, 130)])
def test_the_verbs_code_is_the_commands_code(said, code, expected):
    said(lambda args: code)
    assert main(["version"]) == expected


def test_ctrl_c_outside_of_training_is_130(said, capsys):
    said(raising(KeyboardInterrupt()))
    assert main(["version"]) == 130 and capsys.readouterr().err == "interrupted\n"


def test_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"qfleet {commands.__version__}\n"
    assert main(["version"]) == 0 and capsys.readouterr().out == f"qfleet {commands.__version__}\n"


def test_help_needs_neither_torch_nor_any_extra():
    code = ("import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'rich', 'gymnasium', 'pydantic'])); "
            "from qfleet.cli.commands import main; sys.exit(main(['train', '--help']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage: qfleet train" in done.stdout


COLLECTED = """
import gc, sys
from qfleet.cli.commands import main
before = gc.get_freeze_count()
assert main(["recipes", "--json"]) == 0 and (gc.get_freeze_count(), gc.isenabled()) == (before, True)
sys.argv = ["qfleet", "recipes", "--json"]
assert main() == 0 and gc.get_freeze_count() > before + 100_000 and gc.isenabled()
"""


def test_only_a_command_of_its_own_process_sets_objects_aside_and_garbage_is_collected_afterwards():
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_needed_modules_are_named_for_real():
    assert set(IMPORTS) <= {command.name for command in COMMANDS}
    assert all(importlib.util.find_spec(module) for module in IMPORTS.values())


def test_a_closed_pipe_is_silent():
    done = run_qfleet(f"set -o pipefail; {sys.executable} -m qfleet --help | true; echo codes ${{PIPESTATUS[@]}}")
    assert done.stdout == "codes 0 0\n" and done.stderr == ""


def test_a_reader_who_leaves_in_the_middle_is_silent():
    script = ("import sys; from qfleet.cli import commands as cli; from qfleet.cli.output import print_line; "
              "command = [v for v in cli.COMMANDS if v.name == 'version'][0]; object.__setattr__(command, 'run', "
              "lambda args: [print_line('line') for _ in range(100000)] and 75); sys.exit(cli.main(['version']))")
    done = run_qfleet(f"{sys.executable} -c \"{script}\" | head -1; echo codes ${{PIPESTATUS[@]}}")
    assert done.stdout == "line\ncodes 75 0\n" and done.stderr == ""


def test_closed_standard_streams_and_a_full_disk():
    done = run_qfleet(f"{sys.executable} -m qfleet version >&-; echo $?")
    assert done.stdout == "0\n" and done.stderr == ""
    done = run_qfleet(f"{sys.executable} -m qfleet trian 2>&-; echo $?")
    assert done.stdout == "2\n"
    if os.path.exists("/dev/full"):
        done = run_qfleet(f"{sys.executable} -m qfleet --help > /dev/full; echo $?")
        assert done.stdout == "1\n" and done.stderr == "error: cannot write to stdout: No space left on device\n"


def test_verbs_are_exactly_those_of_the_table():
    assert len({command.run for command in COMMANDS}) == len({command.name for command in COMMANDS}) == len(COMMANDS)
    assert all(command.run.__module__.startswith("qfleet.cli.") for command in COMMANDS)
