"""`ls` and `rm`: what is listed, in which order and width, and what is asked before anything is removed."""

from __future__ import annotations

import io
import json
import sys

import pytest

from qfleet.cli import runs as module
from qfleet.cli.commands import main
from qfleet.cli.runs import format_age
from qfleet.runs.lock import LockOwner


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def make(root, name, best=None, day=1, reason="total_steps", algo="dqn", size=0, score=None):
    path = root / name
    (path / "checkpoints" / "step-1").mkdir(parents=True)
    (path / "config.yaml").write_text(f"seed: 1\ntotal_steps: 2000\nenv:\n  id: CartPole-v1\nagent:\n  algo: {algo}\n")
    record = {"id": "x", "attempts": [{"started": f"2026-01-{day:02}T10:00:00+00:00"}],
              "ended": reason and {"reason": reason, "score": score and {
                  "mean": score, "standard_error": 1.5, "episodes": 20, "seed": 1001, "checkpoint": "best-1"}}}
    (path / "run.json").write_text(json.dumps(record))
    (path / "checkpoints" / "step-1" / "data").write_bytes(b"x" * size)
    row = {"step": 500} | ({} if best is None else {"eval/best_reward": best})
    (path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return path


def listed(capsys, *argv):
    assert main(["ls", *argv]) == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_runs_are_listed_sorted_and_filtered(root, capsys):
    make(root, "b", 10.0, day=2, size=10)
    make(root, "a", 300.0, day=1, reason="failed", algo="c51", size=300_000)
    make(root, "c", None, day=3, reason=None)
    assert listed(capsys) == ["c", "b", "a"] and listed(capsys, "--sort", "name") == ["a", "b", "c"]
    assert listed(capsys, "--sort", "score") == ["a", "b", "c"] and listed(capsys, "--sort", "size")[0] == "a"
    assert listed(capsys, "crashed") == ["c"] and listed(capsys, "cartpole", "C51") == ["a"]
    main(["ls", "failed"])
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "state", "environment", "agent", "steps", "best", "score", "age", "size"]
    assert "failed  CartPole-v1  c51    500 / 2,000  300   -" in row
    main(["ls", "--json"])
    assert [(run["name"], run["best"]) for run in json.loads(capsys.readouterr().out)] == [
        ("c", None), ("b", 10.0), ("a", 300.0)]


def test_the_score_of_fresh_episodes_is_listed_beside_the_best_evaluation(root, capsys):
    make(root, "lucky", 300.0, score=180.5)
    make(root, "steady", 250.0, score=240.0)
    make(root, "unscored", 200.0)
    assert listed(capsys, "--sort", "score") == ["steady", "unscored", "lucky"]
    assert main(["ls", "lucky"]) == 0 and "500 / 2,000  300   180.5" in capsys.readouterr().out
    assert main(["ls", "lucky", "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)
    assert run["best"] == 300 and run["score"]["mean"] == 180.5 and run["score"]["episodes"] == 20


def test_nothing_to_list_is_told_on_stderr(root, capsys):
    assert main(["ls"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and f"there are no runs in {root}" in err
    make(root, "a")
    assert main(["ls", "pong", "x"]) == 0 and "matches 'pong' and 'x'" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [200, 80, 60, 40, 30])
def test_a_terminal_gets_lines_that_fit_and_the_first_runs(root, capsys, monkeypatch, columns):
    for number in range(40):
        make(root, f"CartPole-v1__dqn__1__20260101-{number:06}", 1.0, day=1 + number % 28)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(module.shutil, "get_terminal_size", lambda: type("size", (), {"columns": columns}))
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns and len(lines) == 32
    assert lines[-1] == "10 more: qfleet ls --all" and lines[0].split()[0] == "run" and lines[0].split()[-1] in (
        "best", "score", "age", "size")
    assert main(["ls", "--all"]) == 0 and len(capsys.readouterr().out.splitlines()) == 41


@pytest.mark.parametrize(("seconds", "text"), [(-5, "0 s"), (59, "59 s"), (61, "1 min"), (7200, "2 h"),
                                               (47.9 * 3600, "47 h"), (100 * 3600, "4 d")])
def test_an_age_has_one_unit(seconds, text):
    assert format_age(seconds) == text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_rm_asks_first(root, capsys, monkeypatch, answer, code):
    path = make(root, "a", size=100_000)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert main(["rm", "a"]) == code and path.exists() == (code == 1)
    out, err = capsys.readouterr()
    assert "remove 1 run, " in err and "runs/a  " in out and ("freed " in out) == (code == 0)


def test_rm_needs_a_terminal_or_a_yes(root, capsys, monkeypatch):
    path = make(root, "a")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["rm", "a"]) == 2 and "pass --yes" in capsys.readouterr().err and path.exists()
    assert main(["rm", "a", "--dry-run"]) == 0 and "would remove 1 run" in capsys.readouterr().out and path.exists()
    assert main(["rm", "a", "--yes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["removed"] == ["runs/a"] and document["freed_bytes"] > 0 and not path.exists()


def test_options_select_runs_or_restrict_those_that_are_named(root, capsys):
    for name, reason in (("failed", "failed"), ("crashed", None), ("fine", "total_steps")):
        make(root, name, reason=reason)
    assert main(["rm", "--yes"]) == 2 and "name the runs to remove" in capsys.readouterr().err
    assert main(["rm", "--failed", "--older-than", "1h", "--yes"]) == 0, "the metrics are new"
    assert "no run is selected" in capsys.readouterr().out
    assert main(["rm", "fine", "crashed", "--failed", "--yes"]) == 0
    assert sorted(path.name for path in root.iterdir()) == ["failed", "fine"]
    running = make(root, "running", reason="failed")
    (running / "lock").write_text(f"{LockOwner.current()}\n")
    assert main(["rm", "--older-than", "0m", "--yes"]) == 0
    assert [path.name for path in root.iterdir()] == ["running"]
    assert "skipped: runs/running is running: stop it first" in capsys.readouterr().err


def test_a_run_that_died_before_it_had_a_config_is_told_in_words(root, capsys):
    path = make(root, "early", reason=None)
    (path / "config.yaml").unlink()
    assert main(["rm", "early", "--failed", "--yes"]) == 2
    err = capsys.readouterr().err
    assert "the state of runs/early cannot be read (No such file or directory)" in err and "Traceback" not in err
    assert main(["rm", "early", "--yes"]) == 0 and not path.exists()


def test_a_name_that_cannot_be_removed_keeps_all_of_them(root, capsys):
    make(root, "a")
    (make(root, "b") / "run.json").unlink()
    assert main(["rm", "a", "b", "c", "--yes"]) == 2
    err = capsys.readouterr().err
    assert "no run 'c'" in err and "runs/b is not a run that qfleet can remove" in err and (root / "a").exists()


@pytest.mark.parametrize("text", ["7", "d", "-3d", "7 y", "1.5h"])
def test_an_age_of_another_form_is_refused(text, capsys):
    assert main(["rm", f"--older-than={text}"]) == 2
    assert "such as 7d" in capsys.readouterr().err


def test_last_and_prefixes_name_runs_of_other_commands(root, capsys):
    make(root, "cartpole-1", 5.0, day=1)
    make(root, "other", 7.0, day=2)
    for argv in (["top", "last", "--once"], ["doctor", "last"], ["doctor", "oth"], ["config", "show", "last"],
                 ["config", "diff", "last", "cartpole-"], ["report", "last", "cartpole-", "-o", "page.html"],
                 ["plot", "oth", "--y", "eval/best_reward", "--out", "curve.png"]):
        code, (out, err) = main([*argv, *(["--trust"] if argv[0] == "config" else [])]), capsys.readouterr()
        assert code == 0, (argv, err)
        assert argv[0] != "top" or out.startswith("runs/other ")
    for argv in (["eval", "o"], ["record", "o"], ["export", "o", "out"], ["resume", "c"]):
        assert main(argv) != 0, argv
        assert "no run 'o'" not in capsys.readouterr().err, "it is found, and has no valid checkpoint"
