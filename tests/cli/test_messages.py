"""What a newcomer mistypes, and the answer that leads on."""

from __future__ import annotations

import json
import sys

import pytest

from qfleet.api import EvalResult
from qfleet.cli.commands import main
from qfleet.cli.play import describe_result
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.envs import gym
from qfleet.launch.attempt import require_same_spaces
from qfleet.report.bottleneck import acting_shares
from qfleet.report.live_page import RunFollower
from qfleet.runconfig import resolution
from qfleet.runconfig.resolution import list_recipes, recipe_names, resolve
from qfleet.runconfig.resumable import changed_on_resume
from qfleet.runs.directory import RunDirectory


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mine", None)


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
    ("recipes --search pong", "qfleet recipes pong"),
    ("check-env --env-id CartPole-v1", "qfleet check-env CartPole-v1"),
])
def test_all_unknown_options_are_answered_at_once_with_a_command_that_is_accepted(command, written, capsys):
    assert f"write `{written}`" in told(capsys, *command.split())


def test_all_wrong_options_values_and_keys_are_told_at_once(capsys):
    text = told(capsys, "train", "cartpole", "--sedes", "3", "agent.n_stp=3", "--dry_run", "--restarts", "many",
                "learner.lr=1", "learner.batch_size=0")
    assert text.startswith("usage: qfleet train") and "\nqfleet train: errors:\n  " in text
    for answer in ("unknown option --sedes: did you mean --seeds?", "unknown option --dry_run: did you mean --dry-run?",
                   "argument --restarts: 'many' is not an integer",
                   "agent.n_stp: unknown key; did you mean agent.n_step?",
                   "learner.lr: unknown key; did you mean learner.learning_rate?", "learner.batch_size: must be"):
        assert answer in text
    text = told(capsys, "eval", "x", "--wich", "best", "--epsilon", "7", "--lanes", "0", "seed=3")
    for answer in ("did you mean --which?", "7 is not between 0 and 1", "0 is too small", "takes no overrides"):
        assert answer in text


def test_one_mistake_is_one_line(capsys):
    last = told(capsys, "train", "cartpole", "--sedes", "3").splitlines()[-1]
    assert last == "qfleet train: error: unknown option --sedes: did you mean --seeds?"


@pytest.mark.parametrize("argv", [["train", "env.id=CartPole-v1", "--dry-run"], ["check-env", "env.id=CartPole-v1"]])
def test_an_environment_may_be_given_by_its_key_alone(argv, capsys):
    assert main([*argv, "--json"]) == 0
    by_key = json.loads(capsys.readouterr().out)
    assert main([argv[0], "CartPole-v1", *argv[2:], "--json"]) == 0
    by_id = json.loads(capsys.readouterr().out)
    if argv[0] == "train":
        assert by_key["config"] == by_id["config"]
    else:
        assert len(by_key) == len(by_id) and "the agent chooses among 2 actions" in str(by_key)


def test_a_key_that_names_no_environment_is_refused(capsys):
    assert "cartpole" in told(capsys, "train", "env.id=cartpole", "--dry-run")


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
    assert capsys.readouterr().out.startswith("usage: qfleet COMMAND")


def test_recipes_are_searched_by_words(capsys):
    assert main(["recipes", "atari"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"atari", "pong", "rainbow", "agent57"} <= set(names) and "cartpole" not in names
    assert [name for name, _ in list_recipes(["Pendulum", "d4pg"])] == ["pendulum-d4pg"]
    assert "no recipe contains zzz" in told(capsys, "recipes", "zzz")
    assert [name for name, _ in list_recipes()] == recipe_names()


def test_check_env_takes_a_recipe(capsys):
    assert main(["check-env", "catch", "env.max_episode_steps=7"]) == 0
    assert "the agent chooses among 3 actions" in capsys.readouterr().out


MY_ENV = """
import gymnasium

class Helper:
    pass

class Mine(gymnasium.Env):
    def __init__(self):
        raise ValueError("no map")

LEVEL = 3
"""


@pytest.mark.parametrize(("command", "answer"), [
    ("train cartpole learner.learning_rate=-1", "(got -1); in recipe cartpole it is 0.001"),
    ("train mine.py", "mine.py is a Python file: did you mean mine:Mine?"),
    ("train gone.py", "gone.py is a Python file: use module:Class instead"),
    ("train mine:Nope", "mine has no 'Nope', neither as an attribute nor as an environment that it registers; it has "
                        "mine:Mine"),
    ("train mine:Mime", "did you mean mine:Mine?"),
    ("train mine:LEVEL", "mine:LEVEL is neither an environment nor a function that returns one"),
    ("train CartPole-v1 agent.algo=ppo", "has no PPO, which learns on-policy"),
    ("train Pendulum-v1 agent.algo=sac", "qfleet has no SAC; for continuous actions use agent.algo=ddpg"),
    ("train ppo", "'ppo' is not a recipe: qfleet learns values off-policy"),
])
def test_the_cause_of_a_mistake_is_told_with_its_remedy(command, answer, capsys, place):
    (place / "mine.py").write_text(MY_ENV)
    assert answer in told(capsys, *command.split(), "--dry-run")


@pytest.mark.parametrize("source", ["Pendulum-v1", "pendulum"])
@pytest.mark.parametrize("algo", ["dqn", "r2d2"])
def test_an_algorithm_for_other_actions_is_the_only_cause_that_is_told(source, algo, capsys):
    [line] = told(capsys, "train", source, f"agent.algo={algo}").splitlines()
    assert "Pendulum-v1 has continuous actions" in line and "use agent.algo=ddpg" in line
    both = told(capsys, "train", source, f"agent.algo={algo}", "learner.lr=3").splitlines()
    assert "Pendulum-v1 has continuous actions" in both[1] and "learner.lr: unknown key" in both[2]


def test_a_refused_change_on_resume_is_answered_in_few_words():
    old = resolve("cartpole").config
    with pytest.raises(UserError) as caught:
        changed_on_resume(old, resolve("cartpole", ["learner.learning_rate=1", "env.wrappers=[a:B]"]).config)
    *_, changed, may = str(caught.value).splitlines()
    assert changed == "learner.learning_rate: is 1.0, but the run was started with 0.001"
    assert all(word in may for word in ("total_steps", "eval.*", "checkpoint.*", "init_from=RUN")) and len(may) < 400


def test_the_frames_of_the_package_are_left_out_before_the_users_own_exception(capsys, place):
    (place / "mine.py").write_text(MY_ENV)
    assert main(["check-env", "mine:Mine"]) == 1
    checked = capsys.readouterr().out
    assert main(["train", "mine:Mine"]) == 1
    trained = capsys.readouterr().err
    for text in (checked, trained):
        assert "mine:Mine could not be built:" in text and "ValueError: no map" in text and "mine.py" in text
        assert "/qfleet/" not in text.replace(str(place), "")


def test_an_outdated_version_of_an_environment_is_told_once(capsys, caplog):
    gym._log_outdated.cache_clear()
    assert main(["train", "CartPole-v0", "--dry-run"]) == 0
    assert caplog.text.count("CartPole-v0 is out of date: CartPole-v1 is its newest version") == 1
    assert main(["train", "CartPole-v1", "--dry-run"]) == 0
    assert caplog.text.count("out of date") == 1


MY_ALGORITHM = """
from qfleet.algos import dqn

class algo:
    class Config(dqn.Config):
        algo: str

    def build(cfg, spec):
        return BODY
"""


@pytest.mark.parametrize(("body", "said", "ours"), [
    ("1 / 0", "error in your code in {file}, line 9, in build: ZeroDivisionError", False),
    ("dqn.build(cfg, None)", "called by your code in {file}, line 9, in build; check the values passed there", True)])
def test_a_bug_in_an_algorithm_of_the_users_own_is_reported_as_such(body, said, ours, capsys, place):
    (place / "mine.py").write_text(MY_ALGORITHM.replace("BODY", body))
    assert main(["train", "catch", "agent.algo=mine:algo", "run.root=runs"]) == 1
    text = capsys.readouterr().err
    assert said.format(file=place / "mine.py") in text and ("report a bug with the lines above" in text) == ours
    assert ("runconfig/build.py" in text) == ours


def test_a_bug_of_the_package_is_still_asked_to_be_reported(capsys, monkeypatch):
    monkeypatch.setattr(resolution, "RECIPES", 3)
    assert main(["recipes"]) == 1
    text = capsys.readouterr().err
    assert "failed unexpectedly; please report a bug with the lines above" in text and "your code" not in text


@pytest.mark.parametrize(("command", "answer"), [
    ("watch --port 99999", "argument --port: 99999 is not a port: the maximum is 65535"),
    ("eval model.zip", "model.zip is a file, not a qfleet run: a run is a folder with config.yaml"),
    ("plot model.zip", "models of other libraries cannot be read"),
    ("train catch run.root=model.zip", "model.zip is a file, not a folder; choose a writable folder"),
    ("train catch run.root=model.zip/runs", "model.zip is a file, not a folder; choose a writable folder"),
    ("train catch run.root=/proc/x", "no folder can be created in /proc; choose a writable folder"),
    ("train cartpole init_from=nope --dry-run", "no run 'nope'"),
    ("train catch run.threads=100000 --dry-run", "run.threads=100000: this process may use"),
])
def test_what_is_wrong_with_a_path_a_port_or_a_number_is_told(command, answer, capsys, place):
    (place / "model.zip").touch()
    assert answer in told(capsys, *command.split())


def test_spaces_that_differ_are_told_without_the_names_of_classes():
    was = EnvSpec("A", {"obs": Leaf((4,), "float32", "vector")}, 2)
    now = EnvSpec("B", {"grid": Leaf((4, 8, 8), "uint8", "image"), "room": Leaf((), "int32", "category", (3,))}, 5)
    with pytest.raises(UserError) as caught:
        require_same_spaces("the checkpoint was trained on", was, "the environment", now)
    assert str(caught.value).split("; ") == [
        "the checkpoint was trained on A with 2 actions, observing obs 4 float32",
        "the environment B has 5 actions, observing grid 4×8×8 uint8, room scalar int32 below 3"]


@pytest.mark.parametrize(("episodes", "words"), [(1, "over 1 episode ("), (2, "over 2 episodes (")])
def test_one_episode_is_one(episodes, words):
    assert words in describe_result(EvalResult(1.0, 0.0, episodes, 1, "full episodes", 0.0, [1.0], [9], "x"))


@pytest.mark.parametrize(("fleet", "part"), [({}, "storing"), ({"fleet/actors": 1.0}, "wire")])
def test_only_a_run_of_several_processes_speaks_of_the_wire(fleet, part):
    parts = acting_shares({"actor/env_ms": 1.0, "actor/store_ms": 3.0, **fleet})
    assert parts == {"env": 0.25, part: 0.75}


@pytest.mark.parametrize(("section", "period"), [("eval: {video_period: 2}", 2), ("eval: {video_period: 0}", 0),
                                                 ("seed: 1", None)])
def test_the_live_page_knows_whether_videos_are_to_come(place, section, period):
    (place / "config.yaml").write_text(section + "\n")
    assert RunFollower(RunDirectory(place)).updates_since(0)["video_period"] == period
