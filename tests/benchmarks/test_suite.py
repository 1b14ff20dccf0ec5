"""benchmarks/suite.py: which cells are trained, how they end, and what is said of their records."""

from __future__ import annotations

import json
import sys
import time
from types import ModuleType, SimpleNamespace

import gymnasium
import pytest
import suite
import suite_tables
import torch
from suite_cells import (
    CONTENDERS,
    TASKS,
    Absent,
    Cell,
    Task,
    default_recipe,
    read_candidates,
    settings_of,
    tasks,
    train,
    tuned,
)

from qfleet.config import read_yaml
from qfleet.core.errors import UserError
from qfleet.runconfig.resolution import recipe_for, recipe_names, resolve

CARTPOLE = Task("CartPole-v1", 50_000, 475, episodes=3)


def cell(seed=1, contender="default", steps=1_000, cost=1.0, task="CartPole-v1"):
    return Cell(Task(task, steps, 475, cost=cost), contender, seed, {"total_steps": steps, "digest": "d"})


def record(task="T", contender="default", seed=1, score=500.0, at=None, digest="d", threshold=475, **more):
    steps = {"total_steps": 1_000, "digest": digest, "threshold": threshold}
    solved = None if threshold is None else score >= threshold
    return {"task": task, "contender": contender, "seed": seed, "settings": steps, "status": "done", "score": score,
            "solved": solved, "reached_at": at, "steps": 1_000, "cpu_s": 10.0 * seed, "wall_s": 20.0} | more


class FakeJob:
    """Ends after some looks at it, or never."""

    def __init__(self, looks=1, found=None):
        self.looks, self.found, self.stopped = looks, found or {"status": "done"}, False

    def result(self):
        self.looks -= 1
        return self.found if self.looks < 0 else None

    def stop(self):
        self.stopped = True


# -- tasks and settings ------------------------------------------------------------------------------------------------

def test_tuned_settings_are_of_tasks_of_the_suite_and_name_their_source():
    groups = read_yaml(TASKS)["tuned"]
    named = [task for group in groups for task in group["tasks"]]
    assert set(named) <= set(tasks()) and len(named) == len(set(named))
    assert all("https://" in tuned(task)["source"] for task in named) and tuned("Taxi-v3") is None


def test_a_task_of_several_ids_is_the_first_that_is_registered():
    assert Task("Taxi", 1, 7, ids=("NoSuchTask-v9", "CartPole-v1")).env_id() == "CartPole-v1"
    with pytest.raises(Absent, match="has none of NoSuchTask-v9"):
        Task("Taxi", 1, 7, ids=("NoSuchTask-v9",)).env_id()
    assert Task("Taxi-v3", 1, 7, ids=tasks()["Taxi-v3"].ids).env_id() in gymnasium.registry


def test_the_default_ignores_recipes_that_name_the_environment():
    assert recipe_for("CartPole-v1") == "cartpole"
    name, words = default_recipe("CartPole-v1")
    assert name in recipe_names() and words == ("env.id=CartPole-v1",)
    assert name not in {recipe_for(task) for task in tasks()}
    assert default_recipe("Acrobot-v1") == ("Acrobot-v1", ()), "where none names it, the command is that of a user"


def test_the_default_sets_the_number_of_steps_and_nothing_else():
    found = settings_of(tasks()["Acrobot-v1"], "default", {}, 5_000)
    assert (found["source"], found["overrides"]) == ("Acrobot-v1", ["total_steps=5000"])


def test_the_digest_follows_the_settings_and_the_threshold():
    def digest(contender, steps=5_000, task=CARTPOLE, words=("agent.n_step=3",)):
        return settings_of(task, contender, {"mine": words}, steps)["digest"]

    assert digest("default") == digest("default")
    same = resolve(*default_recipe("CartPole-v1")).config.agent.n_step
    assert digest("mine", words=[f"agent.n_step={same}"]) != digest("mine", words=[f"agent.n_step={same + 1}"])
    assert len({digest("default"), digest("recipe"), digest("default", 6_000),
                digest("default", task=Task("CartPole-v1", 50_000, 400))}) == 4


def test_a_candidate_that_does_not_fit_a_task_and_a_recipe_that_is_not_there_are_absent():
    with pytest.raises(Absent, match=r"does not apply: .*agent\.sigmas"):
        settings_of(CARTPOLE, "mine", {"mine": ["agent.sigmas=3"]}, 5_000)
    with pytest.raises(Absent, match="no packaged recipe suits Acrobot-v1"):
        settings_of(tasks()["Acrobot-v1"], "recipe", {}, 5_000)
    with pytest.raises(Absent, match="no_such_module is not installed"):
        Task("T", 1, None, needs=("no_such_module",)).env_id()


@pytest.mark.parametrize(("text", "problem"), [("default: [a=1]", "default is the name of a contender"),
                                               ("soft: a=1", "soft: must be a list"), ("soft: [a]", "key=value")])
def test_wrong_candidates_are_refused(tmp_path, text, problem):
    path = tmp_path / "candidates.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=problem):
        read_candidates(path)


# -- training ----------------------------------------------------------------------------------------------------------

def test_a_cell_is_trained_and_scored_by_fresh_episodes():
    words = ["eval.period_steps=300", "eval.episodes=2", "replay.min_steps=200", "run.tensorboard=false"]
    settings = settings_of(CARTPOLE, "tiny", {"tiny": words}, 600)
    found = train(Cell(CARTPOLE, "tiny", 3, settings))
    assert found["status"] == "done" and found["episodes"] == 3 and found["steps"] >= 600
    assert found["solved"] is (found["score"] >= 475) and found["cpu_s"] > 0 and len(found["curve"]) >= 2
    json.dumps(found)


def test_the_time_of_a_training_ends_with_its_last_record(monkeypatch):
    import suite_cells

    monkeypatch.setattr(suite_cells.Stopwatch, "_cpu_now", iter([10.0, 10.0, 12.5, 99.0]).__next__)
    watch = suite_cells.TimedEvaluations()
    watch.write({"step": 100, "eval/mean_reward": 3.0})
    assert (watch.cpu_s, watch.curve) == (2.5, [(100, 3.0)])


def test_the_first_evaluation_at_the_threshold_is_noted(monkeypatch):
    import suite_cells

    trained = suite_cells.Trained([470.0, 490.0], [(100, 20.0), (200, 480.0), (300, 500.0)], 310, 1.0, 2.0)
    monkeypatch.setattr(suite_cells, "train_ours", lambda cell: trained)
    found = train(Cell(CARTPOLE, "default", 1, {"library": "qfleet"}))
    assert (found["score"], found["std"], found["solved"], found["reached_at"]) == (480.0, 10.0, True, 200)


def test_the_costliest_cells_start_first_and_never_more_than_asked(monkeypatch):
    monkeypatch.setattr(suite, "POLL_S", 0)
    cells = [cell(seed, cost=seed) for seed in (1, 3, 2, 4)]
    started, running, most = [], 0, 0

    class Counted(FakeJob):
        def result(self):
            nonlocal running
            found = super().result()
            running -= found is not None
            return found

    def start(each):
        nonlocal running, most
        started.append(each.seed)
        running += 1
        most = max(most, running)
        return Counted(looks=each.seed)

    ended = []
    left = suite.train_cells(cells, 2, time.monotonic() + 60, lambda each: 0, start,
                             lambda each, found: ended.append(each.seed))
    assert started == [4, 3, 2, 1] and sorted(ended) == [1, 2, 3, 4] and left == [] and most == 2


def test_when_the_time_is_over_cells_in_training_are_stopped_and_left(monkeypatch):
    monkeypatch.setattr(suite, "POLL_S", 0.01)
    jobs = {1: FakeJob(looks=10**9), 2: FakeJob(looks=0)}
    ended = {}
    left = suite.train_cells([cell(1, cost=3), cell(2, cost=2), cell(3, cost=1)], 2, time.monotonic() + 0.3,
                             lambda each: 100 * (each.seed == 3), lambda each: jobs[each.seed],
                             lambda each, found: ended.update({each.seed: found}))
    assert {seed: found["status"] for seed, found in ended.items()} == {2: "done", 1: "stopped"}
    assert jobs[1].stopped and not jobs[2].stopped and 0.2 < ended[1]["wall_s"] < 30
    assert [each.seed for each in left] == [3, 1], "3 would not have been done in time, and was not begun"


def test_an_interrupt_stops_what_runs(monkeypatch, capsys):
    job = FakeJob(looks=10**9)
    monkeypatch.setattr(suite.time, "sleep", lambda s: (_ for _ in ()).throw(KeyboardInterrupt))
    left = suite.train_cells([cell()], 1, time.monotonic() + 60, lambda each: 0, lambda each: job, lambda *_: None)
    assert left == [cell()]
    assert job.stopped and "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("script", "found"), [
    ("print('noise'); print('{\"status\": \"done\"}')", {"status": "done"}),
    ("import sys; sys.exit('out of luck')", {"status": "failed", "reason": "exit code 1: out of luck"})])
def test_a_process_ends_with_its_last_line_or_with_its_errors(tmp_path, monkeypatch, script, found):
    (tmp_path / "child.py").write_text(script)
    monkeypatch.setattr(suite, "__file__", str(tmp_path / "child.py"))
    job = suite.CellProcess(cell(task="Name/Space-v1"), str(tmp_path))
    deadline = time.monotonic() + 30
    while (result := job.result()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert result == found


def test_a_process_that_is_stopped_takes_its_children_along(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(inner.pid))\n"
        "time.sleep(60)\n")
    monkeypatch.setattr(suite, "__file__", str(tmp_path / "child.py"))
    monkeypatch.setattr(suite, "STOP_S", 0.2)
    job = suite.CellProcess(cell(), str(tmp_path))
    deadline = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    inner = int((tmp_path / "pid").read_text())
    job.stop()
    while alive(inner) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(inner) and job.result()["status"] == "failed"


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_training_that_was_ended_is_not_scored(monkeypatch):
    import suite_cells

    ended = SimpleNamespace(exit_code=75, reason="interrupted", steps=1_234)
    monkeypatch.setattr(suite_cells.qfleet, "train", lambda *args, **more: ended)
    with pytest.raises(UserError, match="ended early: interrupted, after 1,234 steps"):
        train(Cell(CARTPOLE, "default", 1, {"library": "qfleet", "source": "cartpole", "overrides": []}))


@pytest.mark.parametrize(("error", "found"), [
    (ModuleNotFoundError("No module named 'pandas'", name="pandas"), {"status": "absent",
                                                                     "reason": "pandas is not installed"}),
    (UserError("set env.id"), {"status": "failed", "reason": "set env.id"}),
    (ValueError("NaN"), {"status": "failed", "reason": "ValueError: NaN"})])
def test_a_failure_becomes_the_record_of_its_cell(monkeypatch, capsys, error, found):
    monkeypatch.setattr(suite, "train", lambda each: (_ for _ in ()).throw(error))
    asked = {"task": "CartPole-v1", "contender": "default", "seed": 1, "settings": {}}
    assert suite.main(["cell", json.dumps(asked)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found


# -- the file of records -----------------------------------------------------------------------------------------------

@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the script with jobs that end at once, and returns what it trained, its exit code and its output."""
    out, trained = tmp_path / "out.jsonl", []
    found = {"status": "done", "score": 480.0, "solved": True, "reached_at": 100, "episodes": 100, "steps": 1_000,
             "cpu_s": 1.0, "wall_s": 1.0}

    def start(each, folder):
        trained.append((each.task.name, each.contender, each.seed))
        return FakeJob(0, found | answers.get(each.seed, {}))

    answers: dict[int, dict] = {}
    monkeypatch.setattr(suite, "CellProcess", start)
    monkeypatch.setattr(suite, "POLL_S", 0)
    monkeypatch.setattr(suite, "describe_machine", lambda: {"command": "suite.py"})

    def call(*words, failing=()):
        trained.clear()
        answers.update({seed: {"status": "failed", "reason": "bad luck"} for seed in failing})
        code = suite.main(["run", "--out", str(out), "--steps", "2000", *words])
        answers.clear()
        return list(trained), code, capsys.readouterr(), suite_tables.read(out)

    return call


def test_only_missing_cells_are_trained_and_no_record_is_lost(run, tmp_path):
    words = ["--tasks", "CartPole-v1", "--contenders", "default", "--seeds", "1", "2"]
    trained, code, said, records = run(*words, failing=[2])
    assert code == 1 and len(trained) == len(records) == 2 and "failed: bad luck" in said.out
    assert {each["status"] for each in records} == {"done", "failed"} and "command" in records[0]["machine"]
    trained, code, said, records = run(*words, "3")
    assert code == 0 and sorted(trained) == [("CartPole-v1", "default", seed) for seed in (2, 3)] and len(records) == 4
    candidates = tmp_path / "candidates.yaml"
    for value in (2, 4):  # changed settings are another contender of the same name
        candidates.write_text(f"mine: [agent.n_step={value}]")
        trained, code, said, records = run("--tasks", "CartPole-v1", "--seeds", "1", "--contenders", "mine",
                                           "--candidates", str(candidates))
        assert trained == [("CartPole-v1", "mine", 1)]
    assert run("--tasks", "CartPole-v1", "--seeds", "1", "2", "3", "--contenders", "default")[0] == []


def test_cells_that_are_not_there_are_recorded_once_with_the_reason(run, monkeypatch):
    import suite_cells

    monkeypatch.setattr(suite_cells, "find_spec", lambda module: None)
    for _ in range(2):
        _, code, said, records = run("--tasks", "CartPole-v1", "MiniGrid-Empty-8x8-v0", "--seeds", "1",
                                     "--contenders", "sb3", "default")
        assert code == 0 and "absent: minigrid is not installed" in said.out
        missing = {(each["task"], each["contender"]): each["reason"] for each in records if each["status"] == "absent"}
        assert missing == {("CartPole-v1", "sb3"): "stable_baselines3 is not installed",
                           ("MiniGrid-Empty-8x8-v0", "sb3"): "minigrid is not installed",
                           ("MiniGrid-Empty-8x8-v0", "default"): "minigrid is not installed"}
        assert len(records) == 4


def test_wrong_words_end_with_2_and_without_a_traceback(run, capsys, tmp_path):
    assert run("--contenders", "defualt")[1] == 2
    assert suite.main(["rank", str(tmp_path / "none.jsonl")]) == 2
    assert "has no records" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        suite.main(["run", "--tasks", "CartPole-v9"])


def test_an_earlier_cell_says_how_long_the_next_takes():
    expected = suite.expectation([record("CartPole-v1", wall_s=50.0), record("CartPole-v1", seed=2, wall_s=70.0)])
    stopped = {"status": "stopped", "wall_s": 90.0}
    assert suite.expectation([record("CartPole-v1"), record("CartPole-v1") | stopped])(cell(3)) == suite.MARGIN * 90
    assert expected(cell(3)) == suite.MARGIN * 70 and expected(cell(3, "sb3")) == expected(cell(3, steps=2_000)) == 0


def test_a_line_that_was_cut_off_does_not_count(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"task": "T"}\n{"task": "U", "sett')
    assert suite_tables.read(tmp_path / "x.jsonl") == [{"task": "T"}]


# -- ranking and table -------------------------------------------------------------------------------------------------

def test_the_newest_settings_count_and_a_trained_seed_before_a_failed_one():
    failed = {"status": "failed", "reason": "x"}
    found = suite_tables.groups([record(digest="old", seed=7), record(seed=1), record(seed=2) | failed,
                                 record(seed=1) | failed, record(seed=3, score=9.0),
                                 record(seed=4) | {"status": "stopped"},
                                 {"task": "T", "contender": "default", "status": "absent", "reason": "x"}])
    group = found["T", "default"]
    assert [(run["seed"], run["status"]) for run in group.runs] == [(1, "done"), (2, "failed"), (3, "done")]
    assert (group.solved, group.share, group.steps) == (1, 1 / 3, 1_000)
    assert group.effort == 1, "the solved seed needed all its steps, the others count as that"


def test_contenders_are_ranked_by_solved_seeds_then_by_steps():
    records = [record(task, name, seed, score, at) for task in ("A", "B") for name, seed, score, at in [
        ("slow", 1, 500, 800), ("slow", 2, 500, 600), ("fast", 1, 500, 200), ("fast", 2, 500, 400),
        ("half", 1, 500, 100), ("half", 2, 10, None)]]
    records += [record("C", "half"), record("D", "half", threshold=None, score=12.345)]
    lines = suite_tables.ranking(records).splitlines()
    assert lines[-4:] == ["on the tasks that all of them were trained at: A, B",
                          "1. fast: 100% of the seeds solved, 30% of the steps used",
                          "2. slow: 100% of the seeds solved, 70% of the steps used",
                          "3. half: 50% of the seeds solved, 55% of the steps used"]
    assert lines[1].split("  ")[0] == "A" and "2 of 2, 500, 700 steps" in lines[1] and "12.3 (1 seed)" in lines[4]
    assert suite_tables.ranking(records, ["half"]).splitlines()[-2].endswith("A, B, C")
    absent = {"task": "D", "contender": "fast", "status": "absent", "reason": "no such module"}
    assert "\nnot trained:\nD, fast: no such module\n" in suite_tables.ranking([*records, absent])
    assert "there is no ranking" in suite_tables.ranking([record("D", threshold=None)])


def test_the_table_shows_every_column_and_what_is_missing():
    absent = {"task": "T", "contender": "sb3-zoo", "status": "absent", "reason": "x"}
    refused = {"task": "T", "contender": "sb3", "status": "failed", "reason": "x"}
    lines = suite_tables.table([record(seed=seed, at=300 * seed, score=475.2 + seed) for seed in (1, 2, 3)]
                               + [absent, refused, record("T", "mine"), record("U", score=-0.0432, threshold=None)]
                               ).splitlines()
    assert [line.split()[1] for line in suite_tables.table(
        [record(task) for task in ("HalfCheetah-v5", "New-v0", "CartPole-v1")]).splitlines()[2:]] == [
            "CartPole-v1", "HalfCheetah-v5", "New-v0"], "in the order of the suite"
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") == 8
    assert lines[2:] == ["| T | 1,000 | 475 | **3/3**, 477, 20\N{NO-BREAK SPACE}s | not run | failed | – |",
                         "| U | 1,000 | – | 1 seed, −0.043, 10\N{NO-BREAK SPACE}s | not run | not run | not run |"]
    assert suite_tables.table([record(seed=1), record(seed=2, score=9.0)]).endswith(
        "| 1/2, 254, 15\N{NO-BREAK SPACE}s | not run | not run | not run |"), "bold if all seeds solved it"


def test_the_table_shows_no_time_of_another_machine():
    here, elsewhere = {"machine": {"cpu": "A"}}, {"machine": {"cpu": "B"}}
    line = suite_tables.table([record(**here), record(contender="recipe", **elsewhere),
                               record(contender="sb3", **here)]).splitlines()[-1]
    assert line.count("500, 10\N{NO-BREAK SPACE}s") == 2 and "| **1/1**, 500 |" in line


# -- Stable-Baselines3 -------------------------------------------------------------------------------------------------

@pytest.fixture
def peer(monkeypatch):
    """The module for Stable-Baselines3, with a stand-in for the library, which tests do without."""
    class Features(torch.nn.Module):
        def __init__(self, observation_space, features_dim):
            super().__init__()
            self.features_dim = features_dim

    def noise(name):
        return lambda mean, sigma: (name, list(mean), list(sigma))

    names = {"callbacks": {"EvalCallback": None}, "env_util": {"make_vec_env": None},
             "evaluation": {"evaluate_policy": None}, "torch_layers": {"BaseFeaturesExtractor": Features},
             "noise": {"NormalActionNoise": noise("normal"), "OrnsteinUhlenbeckActionNoise": noise("ou")}}
    for path, content in [("", {}), (".common", {}), *((f".common.{name}", each) for name, each in names.items())]:
        module = ModuleType(f"stable_baselines3{path}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "suite_sb3", raising=False)
    import suite_sb3

    yield suite_sb3
    sys.modules.pop("suite_sb3")


def env_of(observation, action=None):
    return SimpleNamespace(observation_space=observation, action_space=action)


def test_tuned_settings_become_arguments_of_the_library(peer):
    vector, force = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Box(-1, 1, (2,))
    assert peer.arguments(env_of(vector), {}, 100) == {}
    assert peer.arguments(env_of(vector), {"gamma": 0.9, "net_arch": [8]}, 100) == {
        "gamma": 0.9, "policy_kwargs": {"net_arch": [8]}}
    assert peer.arguments(env_of(vector, force), {"noise_type": "ornstein-uhlenbeck", "noise_std": 0.5}, 100) == {
        "action_noise": ("ou", [0, 0], [0.5, 0.5])}
    found = peer.arguments(env_of(vector), tuned("MinAtar/Breakout-v1")["settings"], 300_000)
    assert found["exploration_fraction"] == pytest.approx(1 / 3)
    assert found["policy_kwargs"] == {"optimizer_class": torch.optim.RMSprop, "optimizer_kwargs": {
        "centered": True, "alpha": 0.95, "momentum": 0.95, "eps": 0.01}}


def test_boards_are_seen_by_the_network_of_the_minatar_paper(peer):
    board = gymnasium.spaces.Box(0.0, 1.0, (10, 10, 4), bool)
    policy = peer.arguments(env_of(board), {}, 100)["policy_kwargs"]
    assert policy == {"features_extractor_class": peer.BoardFeatures, "net_arch": [128]}
    features = peer.BoardFeatures(board)
    out = features(torch.zeros(2, 10, 10, 4))
    assert out.shape == (2, features.features_dim) == (2, 1024)


def test_evaluations_of_the_library_end_where_the_environment_has_no_limit(peer):
    assert peer.make_env("CliffWalking-v1").spec.max_episode_steps is None
    assert peer.make_env("CliffWalking-v1", limited=True).spec.max_episode_steps == peer.UNLIMITED_EVAL_STEPS
    assert peer.make_env("CartPole-v1", limited=True).spec.max_episode_steps == 500
    assert peer.make_env("Blackjack-v1").observation_space.shape == (32 + 11 + 2,)


def test_the_columns_of_the_table_are_the_contenders():
    assert list(suite_tables.COLUMNS) == list(CONTENDERS)
