"""The verbs against a library that writes a tape: what they call, what they print, and what they return."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qfleet import api
from qfleet.api import EvalResult, RolloutStep
from qfleet.cli.commands import main
from qfleet.core.errors import EnvFault, UserError
from qfleet.core.final_score import FinalScore
from qfleet.launch.train_result import TrainResult
from qfleet.report import doctor
from qfleet.runs.directory import RunDirectory


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    return tmp_path


class Tape:
    """Stands in for the library: remembers every call; `reason` is how its trainings end."""

    def __init__(self):
        self.calls = []
        self.reasons = []
        self.saved_at = 100
        self.score, self.std, self.evaluations = None, 1.8, []

    def _run(self, directory, sinks):
        directory = Path(directory)
        (directory / "checkpoints" / "step-000000000100").mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(
            "seed: 1\ntotal_steps: 100\nenv:\n  id: CartPole-v1\neval:\n  episodes: 10\n")
        rows = [{"step": 50 * i, "updates": i, "time_s": float(i), "rollout/ep_rew_mean": 20.0 * i} for i in (1, 2)]
        rows += [{"step": 100, "updates": 2, "time_s": 2.0, "episodes": 90, "rollout/ep_rew_mean": 40.0,
                  "rollout/ep_rew_std": 5.0, "eval/mean_reward": score, "eval/std_reward": 1.0}
                 for score in self.evaluations]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for sink in sinks:
            sink.plan([("run", str(directory)), ("memory", "3 MB")])
            for row in rows:
                sink.write(row)
            sink.close()
        print("noise of an environment")
        reason = self.reasons.pop(0) if self.reasons else "total_steps"
        if isinstance(reason, Exception):
            raise reason
        code = {"interrupted": 130, "preempted": 75, "failed": 1}.get(reason, 0)
        if self.score is not None:
            RunDirectory(directory).conclude(reason, score=self.score)
        return TrainResult(directory, 100, 25, 7, 61.0, 19.5, reason, code, self.saved_at, score=self.score)

    def train(self, config, *, sinks=(), provenance=None):
        self.calls.append(("train", config.seed, config.run.name, dict(provenance).get("seed")))
        return self._run(f"{config.run.root}/{config.run.name or f'run{config.seed}'}", sinks)

    def resume(self, run, overrides=(), *, sinks=(), trust=False):
        self.calls.append(("resume", str(run), list(overrides), sinks[0].status.goal.steps, trust))
        return self._run(run, sinks)

    def evaluate(self, path, **options):
        told = options.pop("on_episode", lambda episodes: None)
        self.calls.append(("evaluate", str(path), options))
        for episode in range(options["episodes"] + 1):
            told(episode + 1)
        print("noise of an environment")
        return EvalResult(12.5, self.std, options["episodes"], 1000, "classic, full games",
                          options.get("epsilon", 0), [12.5], [9], "runs/x/checkpoints/best-1")

    def rollout(self, path, *, episodes=1, **options):
        self.calls.append(("rollout", str(path), episodes, options))
        for episode in range(episodes):
            for step in range(4):
                yield RolloutStep(np.full((8, 8, 3), 60 * step, np.uint8), 1.5, episode, step == 3)

    def export(self, path, out, which, *, root="runs"):
        self.calls.append(("export", path, out, which, root))
        return Path(out)

    def plan(self, config):
        return [("steps", "100"), ("memory", "3 MB")]


@pytest.fixture
def tape(monkeypatch):
    tape = Tape()
    for name in ("train", "resume", "evaluate", "rollout", "export", "plan"):
        monkeypatch.setattr(api, name, getattr(tape, name))
    return tape


def test_train_prints_results_and_commands_and_the_directory_last(tape, capsys):
    assert main(["train", "cartpole", "seed=3", "run.name=x"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-1] == "runs/x" and tape.calls == [("train", 3, "x", "command line")]
    assert "all steps done: 100 steps, 25 updates, 7 episodes in 1:01, best evaluation 19.5" in lines
    for command in ("qfleet resume runs/x total_steps=200", "tensorboard --logdir runs/x", "qfleet eval runs/x",
                    "qfleet record runs/x", "qfleet plot runs/x", "qfleet report runs/x"):
        assert any(line.endswith(command) for line in lines)
    assert "memory  3 MB" in err and "100 / 50,000 steps" in err


def test_the_score_is_printed_beside_the_best_evaluation_and_not_evaluated_again(tape, capsys):
    tape.score = FinalScore(11.25, 0.5, 20, 1001, "best-000000000100")
    assert main(["train", "cartpole", "run.name=x", "--show"]) == 0
    out = capsys.readouterr().out
    assert "best evaluation 19.5\nscore      11.2 ± 0.5 (standard error), best policy, 20 fresh episodes\n" in out
    assert not any(call[0] == "evaluate" for call in tape.calls) and "evaluation mean return" not in out
    assert main(["train", "cartpole", "run.name=y", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"]["mean"] == 11.25


def test_the_end_warns_of_evaluations_far_below_the_training(tape, capsys):
    tape.evaluations = [9.0, 9.0, 9.0]
    assert main(["train", "cartpole", "run.name=x"]) == 0
    assert "warning    evaluations far below the training: the last 3" in capsys.readouterr().out
    assert main(["resume", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["return_gap"]["training"] == 40


def test_seeds_are_summed_up_by_their_scores(tape, capsys):
    tape.score = FinalScore(11.25, 0.5, 20, 1001, "best-000000000100")
    assert main(["train", "cartpole", "run.name=x", "--seeds", "2"]) == 0
    assert ("2 of 2 seeds, score of the best policies, fresh episodes: mean 11.2, min 11.2, best evaluation mean 19.5"
            in capsys.readouterr().err)


def test_quiet_leaves_stderr_empty(tape, capsys):
    assert main(["train", "cartpole", "--quiet", "run.name=x"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("reason", "code", "hint"), [
    ("interrupted", 130, "qfleet resume runs/x\n"), ("preempted", 75, "qfleet resume runs/x\n"),
    ("stop_at", 0, "qfleet resume runs/x stop_at=null\n"), ("failed", 1, "qfleet resume runs/x\n"),
    ("total_updates", 0, "qfleet resume runs/x total_updates=50\n")])
def test_how_training_ends_decides_the_code_and_the_advice(tape, capsys, reason, code, hint):
    tape.reasons = [reason]
    assert main(["train", "cartpole", "run.name=x"]) == code
    out = capsys.readouterr().out
    assert hint in out and out.splitlines()[-1] == "runs/x"


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("boom"), 1), (EnvFault("hung"), 1)])
def test_a_crash_says_where_the_last_checkpoint_is(tape, capsys, error, code):
    tape.reasons = [error]
    assert main(["train", "cartpole", "run.name=x"]) == code
    err = capsys.readouterr().err
    assert err.count("the run is in runs/x; its last checkpoint is step-000000000100: qfleet resume runs/x") == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
                                   MemoryError("cannot allocate")])
def test_a_lack_of_memory_is_told_in_three_lines(tape, capsys, error):
    error.add_note("lower learner.batch_size")
    tape.reasons = [error]
    assert main(["train", "cartpole", "--quiet", "run.name=x"]) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("out of memory: C") or first.startswith("out of memory: c")
    assert second == "lower learner.batch_size" and third.startswith("the run is in runs/x; its last checkpoint is")


def test_a_mistake_found_late_needs_no_such_note(tape, capsys):
    tape.reasons = [UserError("bad batch")]
    assert main(["train", "cartpole", "--quiet", "run.name=x"]) == 2
    assert capsys.readouterr().err == "error: bad batch\n"


def test_several_seeds_are_several_runs(tape, capsys):
    assert main(["train", "cartpole", "--seeds", "3", "seed=5", "run.name=x"]) == 0
    assert [call[1:3] for call in tape.calls] == [(5, "x-s5"), (6, "x-s6"), (7, "x-s7")]
    assert capsys.readouterr().out.splitlines()[-1] == "runs/x-s7"


def test_without_a_name_every_seed_names_its_run_itself(tape):
    assert main(["train", "cartpole", "--seeds", "2"]) == 0
    assert [call[1:3] for call in tape.calls] == [(1, None), (2, None)]


def test_the_worst_code_of_several_seeds_counts_and_an_interruption_ends_them(tape, capsys):
    tape.reasons = ["failed", "total_steps"]
    assert main(["train", "cartpole", "--seeds", "2", "run.name=x"]) == 1
    tape.calls.clear()
    tape.reasons = ["total_steps", "interrupted", "total_steps"]
    assert main(["train", "cartpole", "--seeds", "3", "run.name=y"]) == 130
    assert len(tape.calls) == 2


def test_a_taken_name_is_found_before_the_first_training(tape, place, capsys):
    (place / "runs" / "x-s2").mkdir(parents=True)
    assert main(["train", "cartpole", "--seeds", "3", "run.name=x"]) == 2
    assert tape.calls == [] and "runs/x-s2 exists already: resume it with `qfleet resume" in capsys.readouterr().err


def test_ranks_that_torchrun_starts_anew_find_their_run(tape, place, monkeypatch):
    (place / "runs" / "x").mkdir(parents=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "cartpole", "sync=allreduce", "run.name=x"]) == 2, "somebody else's"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["train", "cartpole", "sync=allreduce", "run.name=x"]) == 0 and len(tape.calls) == 1


def test_a_dry_run_trains_nothing_and_shows_config_and_plan(tape, place, capsys):
    assert main(["train", "cartpole", "--dry-run", "seed=9"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("seed: 9\n") and "# recipes  cartpole, vector\n" in out and "# memory   3 MB" in out
    assert tape.calls == [] and list(place.iterdir()) == []


def test_show_evaluates_draws_and_films(tape, capsys):
    assert main(["train", "cartpole", "run.name=x", "--show"]) == 0
    out = capsys.readouterr().out
    assert Path("runs/x/plots/learning_curve.png").stat().st_size > 1000
    assert Path("runs/x/videos/best-seed1000.mp4").stat().st_size > 500
    assert "reel-0" in Path("runs/x/report.html").read_text()
    for text in ("curve      runs/x/plots/learning_curve.png", "video      runs/x/videos/best-seed1000.mp4",
                 "report     runs/x/report.html",
                 "evaluation mean return 12.50 over 20 episodes (standard error 0.41, standard deviation 1.80, greedy, "
                 "classic, full games, seed 1000)"):
        assert text in out
    assert out.splitlines()[-1] == "runs/x" and tape.calls[1][0:2] == ("evaluate", "runs/x")


def blind(path, **options):
    yield RolloutStep(None, 1.0, 0, True)


def unfinished(path, **options):
    yield RolloutStep(np.zeros((8, 8, 3), np.uint8), 1.0, 0, False)
    raise UserError("my_env:Blind has no render(): implement it to return an rgb_array image")


@pytest.mark.parametrize(("rollout", "message"), [(blind, "there are no frames"), (unfinished, "has no render()")])
def test_what_cannot_be_shown_does_not_spoil_the_training(tape, monkeypatch, capsys, rollout, message):
    monkeypatch.setattr(api, "rollout", rollout)
    assert main(["train", "cartpole", "run.name=x", "--record"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "runs/x" and "no video: " in err and message in err
    assert main(["record", "x"]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_extra_is_found_before_training(tape, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["train", "cartpole", "--show"]) == 2
    assert tape.calls == [] and "pip install 'qfleet[video,plot]'" in capsys.readouterr().err


def test_resume_passes_overrides_and_knows_the_new_goal(tape, capsys):
    main(["train", "cartpole", "run.name=x"])
    assert main(["resume", "total_steps=300", "x"]) == 0
    assert tape.calls[-1] == ("resume", "runs/x", ["total_steps=300"], 300, False)
    assert main(["resume", "x", "--trust"]) == 0 and tape.calls[-1][-1] is True
    assert capsys.readouterr().out.splitlines()[-1] == "runs/x"
    assert main(["resume", "y"]) == 2
    assert "contains no run with a similar name" in capsys.readouterr().err


@pytest.mark.parametrize(("reason", "saved_at", "text"), [
    ("interrupted", 100, "interrupted, the state is saved: 100 steps"),
    ("interrupted", 64, "interrupted, resume continues from the checkpoint at step 64: 100 steps"),
    ("preempted", 64, "stopped by a signal, resume continues from the checkpoint at step 64: 100 steps"),
    ("failed", None, "but the last checkpoint could not be saved: there is no checkpoint to resume from")])
def test_the_ending_says_where_the_run_goes_on(tape, capsys, reason, saved_at, text):
    tape.reasons, tape.saved_at = [reason], saved_at
    main(["train", "cartpole", "run.name=x"])
    assert text in capsys.readouterr().out


def test_runs_of_another_folder_are_found_by_name(tape, capsys):
    main(["train", "cartpole", "run.root=far/away", "run.name=x", "--quiet"])
    for argv in (["resume", "x"], ["plot", "x"], ["record", "x"], ["eval", "x"], ["export", "x", "out"],
                 ["config", "show", "x", "total_steps=1e5"], ["doctor", "x", "total_steps=1e5"]):
        if argv[0] not in ("eval", "export"):  # the tape finds anything
            assert main(argv) == 2, argv
        capsys.readouterr()
        assert main([*argv, "--root", "far/away"]) == 0, (argv, capsys.readouterr().err)
    assert ("resume", "far/away/x", [], 100, False) in tape.calls
    assert [call[2]["root"] for call in tape.calls if call[0] == "evaluate"] == ["far/away"]
    assert Path("far/away/x/plots/learning_curve.png").exists()
    assert Path("far/away/x/videos/best-seed1000.mp4").exists()
    assert main(["eval", "x", "--log-folder", "far/away"]) == 2
    assert "write --root DIR" in capsys.readouterr().err


def test_eval_counts_aloud_on_a_terminal_only(tape, monkeypatch, capsys):
    assert main(["eval", "x", "--episodes", "2"]) == 0
    assert "episodes" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["eval", "x", "--episodes", "2"]) == 0
    out, err = capsys.readouterr()
    assert "1 of 2 episodes\r2 of 2 episodes" in err and "3 of" not in err and err.endswith("\r")
    assert "of 2 episodes" not in out


def test_eval_reports_for_people_and_passes_its_options(tape, capsys):
    assert main(["eval", "x", "--episodes", "4", "--epsilon", "0.05", "--which", "latest", "--lanes", "2",
                 "--device", "cuda:1"]) == 0
    options = {"episodes": 4, "seed": 1000, "epsilon": 0.05, "which": "latest", "lanes": 2, "device": "cuda:1",
               "root": "runs", "trust": False}
    assert tape.calls == [("evaluate", "x", options)]
    assert ("mean return 12.50 over 4 episodes (standard error 1.04, standard deviation 1.80, ε = 0.05, classic, full "
            "games") in capsys.readouterr().out


JSON = [["train", "cartpole", "run.name=x"], ["train", "cartpole", "run.name=x", "--seeds", "2"],
        ["train", "cartpole", "run.name=x", "--show"], ["train", "cartpole", "--dry-run"], ["resume", "r"],
        ["eval", "r"], ["record", "r"], ["record", "r", "--gif"], ["plot", "r"], ["recipes"],
        ["config", "show", "cartpole"],
        ["config", "explain", "cartpole"], ["config", "schema"], ["config", "diff", "cartpole", "pong"],
        ["check-env", "toy/Catch-v0"], ["doctor"], ["doctor", "cartpole"], ["export", "r", "out"], ["version"]]


@pytest.mark.parametrize("argv", JSON, ids=" ".join)
def test_json_is_one_document_and_nothing_else(tape, capsys, argv):
    tape.std = float("nan")
    main(["train", "cartpole", "run.name=r", "--quiet"])
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert document
    if argv[0] == "eval":
        assert document["mean_reward"] == 12.5 and document["std_reward"] is None and document["episodes"] == 20
        assert {"seed", "protocol"} <= set(document)
    if argv[0] == "train" and "--dry-run" not in argv:
        runs = document if "--seeds" in argv else [document]
        assert runs[0]["directory"] == ("runs/x-s1" if "--seeds" in argv else "runs/x")


def test_record_films_as_many_episodes_as_asked(tape, capsys):
    main(["train", "cartpole", "run.name=x", "--quiet"])
    assert main(["record", "x", "--episodes", "2", "--seed", "4", "--fps", "10"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == ["8 frames, returns of the episodes: 6, 6", "runs/x/videos/best-seed4.mp4"]
    assert main(["record", "x", "--out", "film.gif"]) == 0 and Path("film.gif").read_bytes().startswith(b"GIF")
    assert main(["record", "x", "--out", "film.avi"]) == 2


def test_play_without_a_display_says_what_to_do_instead(tape, capsys):
    assert main(["play", "x"]) == 2
    assert "no display" in capsys.readouterr().err


def test_play_shows_every_picture(tape, monkeypatch, capsys):
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert main(["play", "x", "--episodes", "2", "--fps", "240"]) == 0
    assert capsys.readouterr().out == "returns 6, 6\n"


def test_config_explains_where_values_come_from(capsys):
    assert main(["config", "explain", "cartpole", "seed=8"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "command line" in rows["seed"] and "recipe cartpole" in rows["env.id"] and "default" in rows["launcher"]
    assert "no effect" in rows["env.protocol"]


def test_config_refuses_what_it_does_not_know(capsys):
    for argv, text in ((["config", "shwo", "cartpole"], "choose one of show, explain, schema, diff"),
                       (["config", "diff", "cartpole"], "takes two sources"),
                       (["config", "show", "cartpol"], "did you mean cartpole")):
        assert main(argv) == 2 and text in capsys.readouterr().err


def test_config_of_a_run_is_what_it_was_trained_with(capsys):
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.yaml").write_text("seed: 77\nenv:\n  id: CartPole-v1\n")
    for name in ("x", "runs/x"):
        assert main(["config", "show", name]) == 0 and capsys.readouterr().out.startswith("seed: 77\n")
    Path("runs/x").rename("runs/cartpole")
    assert main(["config", "show", "cartpole"]) == 0 and capsys.readouterr().out.startswith("seed: 1\n")


def test_check_env_fails_on_errors_and_takes_overrides(capsys):
    assert main(["check-env", "CartPole-v1", "env.lanes=2"]) == 0
    assert "2 actions" in capsys.readouterr().out
    assert main(["check-env", "NoSuchEnv-v0"]) in (1, 2)
    assert main(["check-env", "CartPole-v1", "env.lans=2"]) == 2
    assert "lanes" in capsys.readouterr().err


def test_doctor_names_missing_extras_and_the_plan(tape, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "package_version", lambda name: None if name == "ale-py" else "1.0")
    assert main(["doctor", "cartpole"]) == 0
    out = capsys.readouterr().out
    assert "pip install 'qfleet[atari]'" in out and "qfleet[plot]" not in out and "memory      3 MB" in out
    assert main(["doctor", "seed=3"]) == 2
    assert "qfleet doctor RECIPE" in capsys.readouterr().err


def test_doctor_finds_this_machine(monkeypatch):
    report = doctor.examine()
    assert report["packages"]["torch"] and 1 <= report["cpu"]["cores"] <= report["cpu"]["present"]
    assert report["disk"]["free"] > 0 and report["tools"]["display"] is None and report["plan"] is None
    monkeypatch.setenv("DISPLAY", ":0")
    display = doctor.examine(root="not/there/yet")["tools"]["display"]
    assert display == (":0" if sys.platform == "linux" else sys.platform)
