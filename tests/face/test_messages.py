"""What a newcomer mistypes, and the answer that leads on."""

from __future__ import annotations

import pytest

from qfleet.cli import main
from qfleet.recipe import list_recipes, recipe_names


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys, *argv, code=2):
    """What a command says on stderr."""
    assert main(list(argv)) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err and (code != 2 or out == "")
    return err


@pytest.mark.parametrize(("command", "written"), [
    ("train --env CartPole-v1 --algo dqn", "qfleet train CartPole-v1 agent.algo=dqn"),
    ("train --env CartPole-v1", "qfleet train CartPole-v1"),
    ("train cartpole --total-timesteps 50000 --learning-rate 1e-3",
     "qfleet train cartpole total_steps=50000 learner.learning_rate=1e-3"),
    ("train cartpole --track --seed=3 --quiet", "qfleet train cartpole run.wandb=true seed=3 --quiet"),
    ("train env.id=CartPole-v1 --dry-run", "qfleet train CartPole-v1 --dry-run"),
    ("recipes --search pong", "qfleet recipes pong"),
    ("check-env --env-id CartPole-v1", "qfleet check-env CartPole-v1"),
])
def test_all_unknown_options_are_answered_at_once_with_a_command_that_is_accepted(command, written, capsys):
    assert f"write `{written}`" in told(capsys, *command.split())


def test_an_option_that_means_nothing_here_is_named_beside_those_that_do(capsys):
    text = told(capsys, "train", "cartpole", "--foo", "1", "--lr", "3")
    assert "unknown option --foo (see qfleet train --help)" in text and "write learner.learning_rate=3" in text
    text = told(capsys, "eval", "run", "--n-eval-episodes", "3")
    assert "did you mean --episodes?" in text and "eval.episodes" not in text, "eval takes no overrides"


@pytest.mark.parametrize("verb", ["train", "recipes"])
def test_help_takes_a_verb(verb, capsys):
    assert main(["help", verb]) == 0
    assert capsys.readouterr().out.startswith(f"usage: qfleet {verb}")


def test_help_alone_is_the_overview(capsys):
    assert main(["help"]) == 0
    assert capsys.readouterr().out.startswith("usage: qfleet VERB")


def test_recipes_are_searched_by_words(capsys):
    assert main(["recipes", "atari"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"atari", "pong", "rainbow", "agent57"} <= set(names) and "cartpole" not in names
    assert [name for name, _ in list_recipes(["Pendulum", "d4pg"])] == ["pendulum-d4pg"]
    assert "no recipe is about zzz" in told(capsys, "recipes", "zzz")
    assert [name for name, _ in list_recipes()] == recipe_names()


def test_check_env_takes_a_recipe(capsys):
    assert main(["check-env", "catch", "env.max_episode_steps=7"]) == 0
    assert "the agent chooses among 3 actions" in capsys.readouterr().out
