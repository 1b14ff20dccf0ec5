"""Tab completion: candidates in every place, and the scripts in their shells.

`python tests/cli/test_completion.py` writes the config keys anew, after a change of the config.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qfleet
from qfleet.cli.commands import COMMANDS, main
from qfleet.cli.completion import candidates, split_line
from qfleet.runconfig.describe import key_choices

KEYS = Path(qfleet.__file__).parent / "cli" / "config_keys.json"


def keys_text():
    return json.dumps(key_choices(), indent=0) + "\n"


def found(*words):
    return [word for word in candidates(words, COMMANDS) if word.startswith(words[-1])]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cartpole-1", "pong-7"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("agent:\n  algo: c51\n  atoms: 51\n")
    return tmp_path


def test_the_config_keys_are_those_of_the_config():
    assert KEYS.read_text() == keys_text(), "run python tests/cli/test_completion.py"


def test_commands_and_their_options(place):
    assert found("") == [*(command.name for command in COMMANDS if not command.hidden), "help"]
    assert found("re") == ["resume", "record", "report", "recipes"] and found("help", "trai") == ["train"]
    assert found("train", "--se") == ["--seeds"] and "--keep-best" in found("rm", "--")
    assert found("eval", "--which", "") == ["best", "latest"] and found("eval", "--which", "l") == ["latest"]
    assert found("eval", "--seed", "") == [] and found("nonsense", "") == []


def test_recipes_and_runs_where_they_are_named(place):
    assert "cartpole" in found("train", "ca") and not {"last", "pong-7"} & set(found("train", ""))
    for command in ("resume", "top", "watch", "eval", "record", "plot", "report", "export", "rm", "share"):
        assert sorted(found(command, "")) == ["cartpole-1", "last", "pong-7"], command
    assert found("eval", "pong-7", "") == [] and "pong-7" in found("plot", "cartpole-1", "")
    assert {"pong", "pong-7"} <= set(found("doctor", "pon")) and "pong-7" in found("config", "diff", "pong", "p")
    assert found("config", "s") == ["show", "schema"] and found("submit", "") == ["slurm"]
    (place / "far" / "other" / "checkpoints").mkdir(parents=True)
    assert found("eval", "--root", "far", "") == ["other", "last"] == found("eval", "--root=far", "")
    assert found("eval", "--root", "absent", "") == [] and found("eval", "--episodes", "3", "po") == ["pong-7"]


def test_config_keys_and_values_of_the_recipe(place):
    assert found("train", "cartpole", "learner.l") == ["learner.learning_rate="]
    assert found("train", "cartpole", "lea") == ["learners=", "learner."]
    assert found("train", "learner.l") == ["learner.learning_rate="], "a dot is enough"
    assert found("train", "c51", "agent.at") == ["agent.atoms="] and found("train", "cartpole", "agent.at") == []
    assert found("train", "cartpole", "agent.algo=c51", "agent.at") == ["agent.atoms="]
    assert "agent.unroll=" in found("train", "r2d2-short", "agent."), "through the recipes that it extends"
    assert {"agent.atoms=", "agent.unroll="} <= set(found("train", "CartPole-v1", "agent.")), "any algorithm"
    assert found("resume", "pong-7", "agent.at") == ["agent.atoms="]
    assert found("train", "pong", "agent.dueling=") == ["agent.dueling=true", "agent.dueling=false"]
    assert found("train", "pong", "agent.algo=c") == ["agent.algo=c51"]
    assert found("train", "pong", "sync=s") == ["sync=server"] and found("train", "pong", "seed=") == []
    assert found("check-env", "pong", "") and not [key for key in found("check-env", "pong", "le")]
    assert found("eval", "cartpole-1", "learner.") == []


@pytest.mark.parametrize(("line", "words"), [
    ("qfleet ", ["qfleet", ""]), ("qfleet tr", ["qfleet", "tr"]), ("qfleet train 'a b' --s", ["qfleet", "train", "a b",
                                                                                             "--s"]),
    ("qfleet train 'a b", ["qfleet", "train", "a b"]), ('qfleet eval "', ["qfleet", "eval", ""])])
def test_a_line_is_split_as_the_shell_does(line, words):
    assert split_line(line) == words


def test_bash_gets_what_readline_replaces(capsys):
    assert main(["__complete", "--line", "qfleet train pong sync=s", "--breaks", " \t=:"]) == 0
    assert capsys.readouterr().out == "server\n"
    assert main(["__complete", "--line", "qfleet train pong sync=s", "--breaks", " \t"]) == 0
    assert capsys.readouterr().out == "sync=server\n"


def test_candidates_need_neither_torch_nor_pydantic(place):
    code = ("import sys; from qfleet.cli.commands import main\n"
            "for words in ([''], ['train', 'pong', 'learner.'], ['eval', '']): main(['__complete', *words])\n"
            "sys.exit(bool({'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "learner.batch_size=\n" in done.stdout and "pong-7\n" in done.stdout, done.stderr


def test_a_shell_without_a_script_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2 and "choose one of bash, zsh, fish" in capsys.readouterr().err


@pytest.fixture
def environment(place):
    """Environment in which `qfleet` is this tree's, with a script for each shell."""
    (place / "bin").mkdir()
    (place / "bin" / "qfleet").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m qfleet "$@"\n')
    (place / "bin" / "qfleet").chmod(0o755)
    root = str(Path(qfleet.__file__).parents[1])
    return os.environ | {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": root,
                         "HOME": str(place)}


BASH = """
eval "$(qfleet completion bash)"
compopt() { echo "$2"; }
for line in 'qfleet tra' 'qfleet train cartpole learner.l' 'qfleet train pong sync=se' 'qfleet eval l' \
            'qfleet eval nothing'; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_WORDS=(qfleet x) COMP_CWORD=1
    _qfleet
    echo "$line -> ${COMPREPLY[*]}"
done
complete -p qfleet
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_bash_completes(environment):
    done = subprocess.run(["bash", "--norc", "-c", BASH], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == [
        "qfleet tra -> train", "nospace", "qfleet train cartpole learner.l -> learner.learning_rate=",
        "qfleet train pong sync=se -> server", "qfleet eval l -> last", "qfleet eval nothing -> ",
        "complete -o bashdefault -o default -F _qfleet qfleet"], done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_shell_that_is_installed_can_read_its_script(environment):
    for shell in filter(shutil.which, ("bash", "zsh", "fish")):
        script = subprocess.run(["qfleet", "completion", shell], env=environment, capture_output=True, text=True,
                                timeout=50, check=True).stdout
        Path("script").write_text(script)
        done = subprocess.run([shell, "-n", "script"], env=environment, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0 and done.stderr == "", (shell, done.stderr)
        if shell == "fish":
            ask = "source script; complete -C 'qfleet train cartpole learner.l'"
            done = subprocess.run(["fish", "--no-config", "-c", ask], env=environment, capture_output=True, text=True,
                                  timeout=50)
            assert done.stdout.strip() == "learner.learning_rate=", done.stderr


if __name__ == "__main__":
    KEYS.write_text(keys_text())
