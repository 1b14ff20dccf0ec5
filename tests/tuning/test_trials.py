"""Trials with scripted runs: scores, seeds, pruning, failures, interruptions, and what a study keeps of them."""

import csv
import json
import shutil
from pathlib import Path
from typing import ClassVar

import optuna
import pytest

import qfleet
from qfleet.config import parse_mapping
from qfleet.core.errors import UserError
from qfleet.launch.train_result import TrainResult
from qfleet.runconfig.resolution import resolve
from qfleet.runs.directory import RunDirectory, default_name
from qfleet.runs.run_state import describe_state, run_state
from qfleet.tuning import trials as trials_module
from qfleet.tuning.results import table_rows
from qfleet.tuning.study_folder import StudyFolder
from qfleet.tuning.study_settings import StudySettings, make_pruner, make_sampler
from qfleet.tuning.trials import TrialSummary

SPACE = {"agent.n_step": "1..16"}
"""Scripted runs score by their n_step."""


class ScriptedRun:
    """Stands in for the process of a run: an evaluation per poll, with a score that is n_step, or what `scores` say."""

    scores_of = staticmethod(lambda config: [float(config.agent.n_step)] * 4)
    made: ClassVar[list] = []

    def __init__(self, order, folder, threads):
        self.config, self.directory, self.stopped, self.shown = order.config, order.directory, False, 0
        self.made.append(self)
        self.script = self.scores_of(order.config)
        (self.directory.path / "checkpoints/step-1").mkdir(parents=True, exist_ok=True)
        (self.directory.path / "run.json").write_text("{}")

    @property
    def exited(self):
        return self.stopped or self.shown == len(self.script) or isinstance(self.script, str)

    def kill(self): ...

    def request_stop(self):
        self.stopped = True

    def new_records(self):
        if self.exited:
            return []
        self.shown += 1
        return [{"step": self.shown, "eval/mean_reward": 0.0}]

    def scores(self):
        return [] if isinstance(self.script, str) else self.script[:self.shown]

    def end(self):
        if isinstance(self.script, str):
            return None, self.script
        reason = "preempted" if self.stopped else "total_steps"
        return TrainResult(self.directory.path, self.shown, 0, 0, 1.0, None, reason, 0), ""


@pytest.fixture(autouse=True)
def scripted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qfleet.launch.run_process.RunProcess", ScriptedRun)
    monkeypatch.setattr(trials_module, "POLL_S", 0.0)
    monkeypatch.setattr(ScriptedRun, "made", [])
    return monkeypatch


def tune(**options):
    return qfleet.tune("cartpole", **{"space": SPACE, "trials": 6, "study": "study", "pruner": "none", **options})


def script(monkeypatch, scores):
    monkeypatch.setattr(ScriptedRun, "scores_of", staticmethod(scores))


def test_the_best_trial_has_the_highest_score_and_becomes_a_recipe():
    result = tune(overrides=["agent.hidden=[32]"], total_steps=5_000)
    assert [trial.state for trial in result.trials] == ["complete"] * 6 and result.exit_code == 0
    assert result.best.score == max(trial.settings["agent.n_step"] for trial in result.trials)
    best = resolve(str(result.best_recipe)).config
    trained = ScriptedRun.made[result.best.number].config
    assert (best.eval.final_episodes, trained.eval.final_episodes) == (20, 0), "a study compares evaluations"
    unscored = best.eval.model_copy(update={"final_episodes": 0})
    assert best.model_copy(update={"run": trained.run, "eval": unscored}) == trained and best.run.name is None
    assert (best.total_steps, best.agent.hidden, best.stop_at) == (5_000, (32,), None)
    text = Path(result.best_recipe).read_text()
    assert text.startswith("# Best settings of the study study") and f"agent.n_step: {best.agent.n_step}\n" in text
    assert all(path.stat().st_size > 1000 for path in result.plots) and len(result.plots) == 2


def test_every_trial_has_a_run_directory_and_a_row_of_the_table():
    result = tune(trials=2)
    rows = list(csv.DictReader(Path("study/trials.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == ["trial-000", "trial-001"] == [trial.run for trial in result.trials]
    assert [float(row["agent.n_step"]) for row in rows] == [trial.score for trial in result.trials]
    assert [run.directory.path for run in ScriptedRun.made] == [Path("study/trial-000"), Path("study/trial-001")]
    assert not list(Path("study").glob("trial-*/checkpoints/step-*")), "a finished trial keeps its best policy only"


def test_trials_are_compared_at_equal_steps_with_ten_evaluations_unless_told_otherwise():
    tune(trials=1, total_steps=20_000)
    config = ScriptedRun.made[0].config
    assert (config.stop_at, config.eval.period_steps) == (None, 2_000)
    tune(trials=1, study="other", overrides=["stop_at=400", "eval.period_steps=5000"])
    config = ScriptedRun.made[1].config
    assert (config.stop_at, config.eval.period_steps) == (400, 5000)
    Path("mine.yaml").write_text("extends: cartpole\nstop_at: 400\neval:\n  period_steps: 5000\n")
    for number, source in enumerate(["mine.yaml", resolve("mine.yaml").config]):
        qfleet.tune(source, space=SPACE, trials=1, study=f"more{number}")
        config = ScriptedRun.made[-1].config
        assert (config.stop_at, config.eval.period_steps) == (400, 5000)


def test_trials_begin_with_the_weights_of_a_run_outside_of_the_study():
    run = Path("elsewhere/first")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 1\n")
    Path("mine.yaml").write_text("extends: cartpole\nrun: {root: elsewhere}\n")
    for word in ("first", "last"):
        qfleet.tune("mine.yaml", space=SPACE, trials=1, study=f"from-{word}", init_from=word)
        assert ScriptedRun.made[-1].config.init_from == str(run.absolute())
        assert parse_mapping(Path(f"from-{word}/base.yaml").read_text(), "")["init_from"] == str(run.absolute())


@pytest.mark.parametrize(("objective", "score"), [("final", 6.0), ("last", 8.0), ("best", 9.0), ("mean", 5.0)])
def test_objectives(scripted, objective, score):
    script(scripted, lambda config: [2.0, 9.0, 1.0, 8.0])
    assert tune(trials=1, objective=objective).best.score == pytest.approx(score)


def test_seeds_of_a_trial_are_averaged(scripted):
    script(scripted, lambda config: [float(config.seed)] * 2)
    result = tune(trials=2, seeds_per_trial=3, seed=5)
    assert [run.config.seed for run in ScriptedRun.made] == [5, 6, 7] * 2 and result.best.score == 6.0
    assert [run.directory.name for run in ScriptedRun.made[:3]] == [f"trial-000-s{seed}" for seed in (5, 6, 7)]
    assert result.trials[0].evaluations == (5.0, 5.0, 6.0, 6.0, 7.0, 7.0)


def test_a_pruned_trial_is_marked_in_its_run_and_the_study_goes_on(scripted):
    script(scripted, lambda config: [10.0 - len(ScriptedRun.made)] * 10)
    result = tune(pruner="median", trials=8)
    states = [trial.state for trial in result.trials]
    assert states == ["complete"] * 5 + ["pruned"] * 3
    pruned = result.trials[states.index("pruned")]
    assert pruned.score == pruned.evaluations[-1] and len(pruned.evaluations) == 4
    run = RunDirectory(Path("study") / pruned.run)
    assert run_state(run) == "pruned" and "was pruned" in describe_state(run, "pruned")
    assert "resume" not in describe_state(run, "pruned"), "a pruned run is not to be resumed"
    assert result.best.state == "complete"


def test_a_trial_that_is_pruned_at_the_end_of_a_seed_trains_no_further_seed(scripted):
    script(scripted, lambda config: [float(-len(ScriptedRun.made))] * 2)
    scripted.setattr("qfleet.tuning.study_folder.make_pruner",
                     lambda *options: optuna.pruners.ThresholdPruner(lower=-2.5))
    scripted.setattr(ScriptedRun, "exited", True)  # each run ends before its evaluations are seen
    scripted.setattr(ScriptedRun, "scores", lambda run: run.script)
    result = tune(trials=2, seeds_per_trial=2)
    assert [trial.state for trial in result.trials] == ["complete", "pruned"]
    assert [run.directory.name for run in ScriptedRun.made] == ["trial-000-s1", "trial-000-s2", "trial-001-s1"]


def test_a_stopped_study_starts_no_further_seed(scripted):
    class Stop:
        reason = None

    scripted.setattr("qfleet.tuning.study.SignalledStop", Stop)

    def scores(config):
        Stop.reason = "interrupted"  # and the run ends by itself, before it is asked to stop
        return []

    script(scripted, scores)
    scripted.setattr(ScriptedRun, "scores", lambda run: [1.0])
    scripted.setattr(ScriptedRun, "request_stop", lambda run: None)
    result = tune(trials=1, seeds_per_trial=2)
    assert (result.reason, result.exit_code, len(ScriptedRun.made)) == ("interrupted", 130, 1)
    assert [trial.state for trial in result.trials] == ["interrupted"]


def test_a_failed_trial_is_recorded_and_the_study_goes_on(scripted):
    script(scripted, lambda config: "no such level" if len(ScriptedRun.made) == 1 else [1.0])
    result = tune(trials=3)
    assert [trial.state for trial in result.trials] == ["failed", "complete", "complete"]
    assert result.trials[0].error == "no such level" and result.exit_code == 0


def test_a_study_without_a_complete_trial_fails(scripted):
    script(scripted, lambda config: "no such level")
    result = tune(trials=2)
    assert (result.exit_code, result.best, result.best_recipe, result.plots) == (1, None, None, ())


def test_settings_that_contradict_each_other_fail_their_trial_only():
    result = tune(space={"replay.min_steps": [1000, 30000], "replay.capacity": [20000, 50000]}, sampler="grid",
                  trials=9, overrides=["total_steps=40000"])
    states = sorted(trial.state for trial in result.trials)
    assert states == ["complete"] * 3 + ["failed"] and len(ScriptedRun.made) == 3
    assert "replay.min_steps" in next(trial.error for trial in result.trials if trial.state == "failed")


def test_an_existing_study_is_an_error_that_names_the_remedy():
    tune(trials=1)
    with pytest.raises(UserError, match=r"study exists already: continue it with `qfleet tune --resume study`"):
        tune(trials=1)
    Path("full").mkdir()
    Path("full/letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is not a study"):
        tune(study="full")
    with pytest.raises(UserError, match="is not a study"):
        qfleet.tune(study="none", resume=True)


def test_a_study_is_continued_with_its_own_settings():
    tune(trials=2, sampler="random", objective="best")
    result = qfleet.tune(study="study", resume=True, trials=4)
    assert len(result.trials) == 4 and len({trial.settings["agent.n_step"] for trial in result.trials}) > 2
    assert len(ScriptedRun.made) == 4
    assert len(qfleet.tune(study="study", resume=True).trials) == 4, "a finished study has nothing left to do"
    with pytest.raises(UserError, match="with its own settings"):
        qfleet.tune("cartpole", study="study", resume=True)


def test_a_copied_study_that_names_code_is_continued_only_with_trust(monkeypatch):
    Path("own.py").write_text("import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    qfleet.tune("own:make", space=SPACE, trials=1, study="study", total_steps=20_000)
    shutil.move("study", "moved")
    assert len(qfleet.tune(study="moved", resume=True, trials=2).trials) == 2, "a moved study is trusted"
    shutil.copytree("moved", "copy")
    with pytest.raises(UserError, match=r"study copy imports own:make.*--trust"):
        qfleet.tune(study="copy", resume=True, trials=3)
    assert len(qfleet.tune(study="copy", resume=True, trials=3, trust=True).trials) == 3


def test_choices_of_a_copied_study_may_name_code_too():
    tune(trials=1)
    shutil.copytree("study", "copy")
    assert len(qfleet.tune(study="copy", resume=True, trials=2).trials) == 2, "it names no code"
    file = Path("copy/study.yaml")
    content = parse_mapping(file.read_text(), "")
    content["space"]["agent.encoder"] = {"choices": ["evil:A", "evil:B"]}
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"study copy imports evil:A, evil:B"):
        qfleet.tune(study="copy", resume=True)


def test_a_study_that_another_process_works_on_is_not_changed():
    tune(trials=1)
    before = Path("study/study.yaml").read_text()
    folder = StudyFolder(Path("study"))
    folder.lock()
    try:
        with pytest.raises(UserError, match="another process works on this study"):
            qfleet.tune(study="study", resume=True, trials=9)
    finally:
        folder.unlock()
    assert Path("study/study.yaml").read_text() == before


def test_interrupted_trials_continue_in_their_runs(scripted):
    class Interrupted(Exception):
        pass

    def stop(config):
        if len(ScriptedRun.made) == 2:
            raise Interrupted
        return [1.0] * 4

    script(scripted, stop)
    with pytest.raises(Interrupted):  # as if the process of the study had died in its second trial
        tune(trials=3)
    script(scripted, lambda config: [float(config.agent.n_step)] * 4)
    result = qfleet.tune(study="study", resume=True)
    assert [(trial.number, trial.state, trial.run) for trial in result.trials] == [
        (0, "complete", "trial-000"), (2, "complete", "trial-001"), (3, "complete", "trial-003")]
    interrupted = optuna_trials()[1]
    assert interrupted.params == optuna_trials()[2].params


def optuna_trials():
    study = StudyFolder(Path("study")).optuna_study(StudySettings(), 1, 4)
    return study.get_trials()


def test_optuna_reads_the_journal_of_a_study():
    tune(trials=2)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend("study/journal.log"))
    study = optuna.load_study(study_name="qfleet", storage=storage)
    assert [trial.value for trial in study.trials] == [trial.params["agent.n_step"] for trial in study.trials]


def test_a_function_may_define_the_space_and_continue_the_study():
    def space(trial):
        kind = trial.suggest_categorical("kind", ["linear", "constant"])
        epsilon = {"epsilon": trial.suggest_float("epsilon", 0.01, 0.1)} if kind == "constant" else {}
        return {"explore": {"kind": kind, **epsilon}}

    result = tune(space=space, trials=6)
    assert {trial.settings["explore.kind"] for trial in result.trials} == {"linear", "constant"}
    with pytest.raises(UserError, match="is a function of a program"):
        qfleet.tune(study="study", resume=True)
    assert len(qfleet.tune(study="study", resume=True, space=space, trials=7).trials) == 7


def test_a_function_that_raises_later_fails_its_trial():
    def space(trial):
        return {"agent.n_step": 1 if trial.number != 5 else 1 // 0}

    result = tune(space=space, trials=7)
    assert [trial.state for trial in result.trials] == ["complete"] * 5 + ["failed", "complete"]
    assert result.trials[5].error.startswith("ZeroDivisionError")


@pytest.mark.parametrize(("name", "kind"), [
    ("tpe", optuna.samplers.TPESampler), ("random", optuna.samplers.RandomSampler),
    ("grid", optuna.samplers.RandomSampler), ("cmaes", optuna.samplers.CmaEsSampler)])
def test_samplers_by_name(name, kind, monkeypatch):
    monkeypatch.setattr("qfleet.tuning.study_settings.find_spec", lambda name: True)
    assert type(make_sampler(StudySettings(sampler=name), 2, 0)) is kind


def test_a_sampler_whose_package_is_missing_is_refused_before_the_study_starts(monkeypatch):
    monkeypatch.setattr("qfleet.tuning.study_settings.find_spec", lambda name: None if name == "cmaes" else True)
    with pytest.raises(UserError, match="pip install cmaes"):
        tune(sampler="cmaes")
    assert not Path("study").exists()


@pytest.mark.parametrize(("name", "kind"), [
    ("median", optuna.pruners.MedianPruner), ("hyperband", optuna.pruners.HyperbandPruner),
    ("halving", optuna.pruners.SuccessiveHalvingPruner), ("percentile", optuna.pruners.PercentilePruner),
    ("none", optuna.pruners.NopPruner)])
def test_pruners_by_name(name, kind):
    assert type(make_pruner(StudySettings(pruner=name), 10)) is kind
    assert len(tune(pruner=name, trials=4, study=name).trials) == 4


@pytest.mark.parametrize(("options", "text"), [
    ({"sampler": "tqe"}, "did you mean tpe?"), ({"pruner": "meridian"}, "must be"), ({"objective": "top"}, "must be"),
    ({"jobs": 0}, "jobs=0: must be an integer of at least 1"), ({"trials": 0}, "at least 1"),
    ({"space": None}, "needs a search space"),
    ({"overrides": ["run.name=x"]}, "run.name: the runs of a study are in its directory"),
    ({"sampler": "grid", "space": {"learner.learning_rate": "0.1..1"}}, "has a range")])
def test_settings_of_a_study_are_checked_before_it_starts(options, text):
    with pytest.raises(UserError) as caught:
        tune(**options)
    assert text in str(caught.value) and not Path("study").exists()


def test_objects_that_trials_cannot_import_are_refused():
    with pytest.raises(UserError, match="put a class or a function into a file"):
        tune(env=lambda: None)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("qfleet.tuning.study_settings.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'qfleet\[tune\]'"):
        tune()


def test_the_default_directory_names_environment_and_algorithm():
    result = tune(study=None, trials=1)
    assert result.directory.parent == Path("studies") and result.directory.name.startswith("CartPole-v1__dqn__1__")
    assert default_name("CartPole-v1", "dqn", 1)[:16] == result.directory.name[:16]
    assert json.loads(Path(result.directory, "journal.log").read_text().splitlines()[0])


def test_columns_of_equal_names_have_their_full_key():
    trials = [TrialSummary(0, "complete", 1.0, {"explore.steps": 5, "agent.hidden": [64]}, "trial-000", 9, 1.0, (), "")]
    assert table_rows(trials)[0] == ["trial", "state", "score", "steps", "time", "explore.steps", "hidden"]
    assert table_rows(trials)[1][-2:] == ["5", "[64]"]
