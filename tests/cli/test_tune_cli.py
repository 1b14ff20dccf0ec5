"""The verb `tune`: what it passes to the library, what it prints, and which command lines it refuses."""

import json
import re
from pathlib import Path

import pytest

from qfleet.cli.commands import main
from qfleet.config import parse_mapping
from qfleet.runconfig.resolution import resolve
from qfleet.tuning import study
from qfleet.tuning.space import TrialConfig, make_space
from qfleet.tuning.study import TuneResult
from qfleet.tuning.study_folder import recipe_of
from qfleet.tuning.study_settings import StudySettings
from qfleet.tuning.trials import TrialSummary

TRIALS = (TrialSummary(0, "complete", 12.5, {"learner.learning_rate": 0.00123456, "agent.double": True}, "trial-000",
                       20_000, 61.0, (10.0, 15.0), ""),
          TrialSummary(1, "pruned", 3.0, {"learner.learning_rate": 0.01, "agent.double": False}, "trial-001", 4_000,
                       9.0, (3.0,), ""),
          TrialSummary(2, "failed", None, {}, "trial-002", 0, 0.0, (), "no such level"),
          TrialSummary(3, "complete", 99.0, {"learner.learning_rate": 0.002, "agent.double": True}, "trial-003",
                       20_000, 62.0, (99.0,), ""))


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Calls of `qfleet.tune`, and how the last one is to end."""
    found, endings = [], [("trials", 0)]

    def tune(*arguments, **options):
        found.append((arguments, options))
        return TuneResult(Path("s"), TRIALS, TRIALS[3], Path("s/best.yaml"), (), *endings[-1])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "tune", tune)
    return found, endings


def test_ranges_and_choices_are_the_space_and_other_words_overrides(calls):
    Path("space.yaml").write_text("learner: {batch_size: [32, 64]}\nagent.n_step: {low: 1, high: 3}\n")
    assert main(["tune", "cartpole", "agent.n_step=1..5", "seed=3", "agent.hidden=[64, 64]", "--space", "space.yaml",
                 "--trials", "7", "--jobs", "2", "--sampler", "random", "--pruner", "none", "--objective", "best",
                 "--seeds-per-trial", "2", "--study", "s", "--quiet"]) == 0
    assert calls[0] == [(("cartpole", ["seed=3", "agent.hidden=[64, 64]"]), {
        "space": {"learner.batch_size": [32, 64], "agent.n_step": "1..5"}, "trials": 7, "jobs": 2,
        "sampler": "random", "pruner": "none", "objective": "best", "seeds_per_trial": 2, "study": "s",
        "progress": False})]


def test_the_table_has_the_best_first_and_the_directory_is_last(calls, capsys):
    assert main(["tune", "cartpole", "agent.n_step=1..5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["trial", "state", "score", "steps", "time", "learning_rate", "double"]
    assert [line.split()[0] for line in lines[1:5]] == ["3", "0", "1", "2"]
    assert lines[2].split() == ["0", "complete", "12.5", "20,000", "1:01", "0.00123", "true"]
    assert "4 trials: 2 complete, 1 failed, 1 pruned" in lines and "best       qfleet train s/best.yaml" in lines
    assert lines[-1] == "s"


def test_json_is_one_document(calls, capsys):
    assert main(["tune", "cartpole", "agent.n_step=1..5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"]["number"] == 3 and [trial["state"] for trial in document["trials"]].count("pruned") == 1


def test_an_interrupted_study_names_the_command_that_continues_it(calls, capsys):
    calls[1].append(("interrupted", 130))
    assert main(["tune", "cartpole", "agent.n_step=1..5"]) == 130
    assert "continue   qfleet tune --resume s\n" in capsys.readouterr().out


def test_resume_takes_trials_and_jobs(calls):
    assert main(["tune", "--resume", "s", "--trials", "40", "--jobs", "3"]) == 0
    assert calls[0] == [((), {"study": "s", "resume": True, "trials": 40, "jobs": 3, "progress": True, "trust": False})]


@pytest.mark.parametrize(("words", "text"), [
    ([], "continue a study with --resume DIR"), (["cartpole"], "no search space"),
    (["cartpole", "seed=3"], "learner.learning_rate=1e-5..1e-2:log"),
    (["cartpole", "agent.n_step=1..5", "agent.n_step=3"], "agent.n_step is both"),
    (["cartpole", "--space", "gone.yaml"], "there is no such file"),
    (["--resume", "s", "cartpole"], "leave out cartpole"), (["--resume", "s", "agent.n_step=1..5"], "leave out agent"),
    (["--resume", "s", "--sampler", "random", "--study", "x"], "leave out --sampler, --study"),
    (["cartpole", "agent.n_step=1..5", "--sampler", "tqe"], "invalid choice"),
    (["cartpole", "agent.n_step=1..5", "--trials", "0"], "0 is too small")])
def test_refused_command_lines(calls, capsys, words, text):
    assert main(["tune", *words]) == 2
    assert text in capsys.readouterr().err and calls[0] == []


def test_jobs_need_as_many_seeds(calls, capsys):
    assert main(["train", "cartpole", "--jobs", "2"]) == 2
    assert "pass --seeds 2 or more" in capsys.readouterr().err
    assert main(["train", "cartpole", "--jobs", "9", "--seeds", "3"]) == 2
    assert "--jobs 9 is more than --seeds 3: use --jobs 3" in capsys.readouterr().err


def test_help_describes_the_search_space(capsys):
    assert main(["tune", "--help"]) == 0
    out = capsys.readouterr().out
    assert "key=LOW..HIGH[:log|:STEP]" in out and "--pruner" in out and "--resume DIR" in out


def test_help_names_the_defaults_of_a_study(capsys):
    main(["tune", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in ("trials", "sampler", "pruner", "objective", "seeds_per_trial"):
        entry = text.partition(f" --{name.replace('_', '-')} ")[2]
        assert re.search(r"\(default: (\w+)\)", entry)[1] == str(StudySettings.model_fields[name].default)


def test_the_documented_search_space_is_valid():
    text = (Path(__file__).parents[2] / "docs/tune.md").read_text()
    block = re.search(r"```yaml\n(.*?)```", text, re.S)
    assert block is not None
    shared = TrialConfig(recipe_of(resolve("cartpole")))
    assert len(make_space(parse_mapping(block[1], "tune.md"), shared).parameters) == 6
