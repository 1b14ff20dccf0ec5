"""The benchmark beside the sources: its settings hold, it goes on where it was, and its pictures show what it found."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from qfleet.runconfig import resolution

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("kind", ["figures", "games"])
@pytest.mark.parametrize("game", [None, ["toy/Catch-v0"]])
def test_settings_are_taken(kind, game):
    import sources

    make, steps = sources.KINDS[kind]
    made = make(Namespace(game=game, only=None))
    assert len(made) == {"figures": 4, "games": 2 if game else 8}[kind]
    for trial in made:
        cfg = resolution.resolve(trial.recipe, [*trial.words, f"total_steps={steps}"]).config
        assert cfg.stop_at is None and (game is None) == ("NoFrameskip" in cfg.env.id)


def test_a_run_is_begun_and_then_gone_on_with(tmp_path):
    from trials import Trial

    trial, args = Trial("n=5, 8 actors", "atari", ("actors=8",)), Namespace(threads=3, overrides=["seed=2"])
    first = trial.command(tmp_path, ["total_steps=9"], args)
    assert first[3:] == ["train", "atari", "actors=8", "total_steps=9", "env.threads=3", f"run.root={tmp_path}",
                         "run.name=n5-8-actors", "seed=2", "--quiet"]
    (tmp_path / "n5-8-actors/checkpoints/step-000000000005").mkdir(parents=True)
    again = trial.command(tmp_path, ["total_steps=9"], args)
    assert again[3:] == ["resume", str(tmp_path / "n5-8-actors"), "total_steps=9", "--quiet"]


def told(root, trial, points):
    folder = trial.directory(root)
    folder.mkdir(parents=True)
    rows = [{"step": 100 * i, "updates": 10 * i, "episodes": i, "time_s": float(i), "rollout/ep_rew_mean": i - 21.0}
            for i in range(1, points + 1)]
    rows.append(rows[-1] | {"eval/mean_reward": 20.5, "eval/std_reward": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_say_how_far_a_run_went_and_are_drawn(tmp_path):
    import sources
    import trials

    made = sources.figures(Namespace(game=None, only=None))
    for trial in made:
        told(tmp_path, trial, 1000)
    rows = {trial.name: trials.row(trial, tmp_path) for trial in made}
    row = rows["n=5, 8 actors"]
    assert (row["steps"], row["updates"], row["episodes"], row["seconds"]) == (100_000, 10_000, 1000, 1000.0)
    assert row["curve"] == [[100_000, 20.5, 0.5]] and row["curve_clocks"] == [[10_000, 1000]]
    assert len(row["training"]) == len(row["training_clocks"]) <= 300 and row["training"][-1] == [100_000, 979.0]
    left, right = sources.draw_figures({"rows": rows}).axes
    assert [list(line.get_xdata()) for line in left.lines if line.get_label().endswith("ours")] == [[10]] * 3
    assert right.lines[1].get_xdata()[-1] == 1000 / 3
    del rows["Gorila, 3 clients"]
    assert len(sources.draw_figures({"rows": rows}).axes) == 1, "no picture of what was not run"
    four = sources.draw_games({"rows": {"Asterix double": row}}).axes
    assert len(four) == 4 and len(four[0].lines) == 3 and len(four[1].lines) == 2


def test_a_run_that_has_hardly_begun_is_told_as_that(tmp_path):
    import sources
    import trials

    trial = sources.games(Namespace(game=["Asterix"], only=["double"]))[0]
    row = trials.row(trial, tmp_path, games=5)
    assert row["steps"] == 0 and row["curve"] == [] and "games" not in row


def test_a_sweep_is_summed_up_by_its_seeds_and_drawn():
    import sweep

    def run(seed, reached):
        return {"seed": seed, "steps_per_cpu_s": 100.0 * seed, "updates_per_cpu_s": 10.0, "updates": 50,
                "reached": reached, "scores": [[100, 5, 0.1 * seed]]}

    runs = [run(1, [300, 20, 1.5]), run(2, None), run(3, [500, 30, 2.5])]
    found = sweep.summary(runs)
    assert found["solved"] == "2 of 3" and found["steps_per_cpu_s"] == 200 and found["best"] == pytest.approx(0.3)
    assert (found["steps_to"], found["updates_to"], found["cpu_s_to"]) == (400, 25, 2.0)
    assert "steps_to" not in sweep.summary([run(1, None)])
    axes = sweep.draw({"what": "lanes", "rows": {"1": runs, "64": [run(1, None)]}}).axes
    assert [list(axis.lines[0].get_xdata()) for axis in axes] == [[1], [1], [1, 64]]


def test_a_sweep_leaves_the_time_of_evaluations_out(monkeypatch):
    import sweep

    now = iter([1.0, 3.0, 8.0, 9.0])
    monkeypatch.setattr(sweep.time, "process_time", lambda: next(now))
    watch = sweep.Watch()
    for record in ({}, {}, {"eval/mean_reward": 0.5}, {}):
        watch.write({"step": 1, "updates": 0} | record)
    assert [row[2] for row in watch.rows] == [1.0, 3.0, 3.0, 4.0]


@pytest.mark.slow
def test_the_best_policy_of_a_run_plays_games_in_the_end(tmp_path):
    import trials

    import qfleet

    trial = trials.Trial("short", "cartpole", ("eval.epsilon=0", "total_steps=400", "replay.min_steps=200",
                                               "eval.episodes=1", "checkpoint.replay=false", "run.tensorboard=false"))
    qfleet.train(trial.recipe, [*trial.words, f"run.root={tmp_path}", "run.name=short"])
    row = trials.row(trial, tmp_path, games=3)
    assert row["steps"] >= 400 and len(row["curve"]) == 1
    assert row["games"]["episodes"] == 3 and len(row["games"]["returns"]) == 3


def test_runs_of_pong_are_drawn():
    import pong_family

    row = {"curve": [[600_000, 12.0, 3.0], [650_000, 20.3, 0.5]], "training": [[1000, -21.0], [650_000, 4.0]]}
    figure = pong_family.draw({"rows": {"iqn": row, "btr": row, "r2d2": row | {"curve": []}}})
    (axis,), (legend,) = figure.axes, figure.legends
    assert [len(line.get_xdata()) for line in axis.lines[:6]] == [2, 2, 2, 2, 2, 0]
    assert [text.get_text() for text in legend.get_texts()] == ["iqn", "btr", "r2d2"]
    (legend,) = pong_family.draw({"rows": {str(i): row for i in range(12)}}).legends
    assert len(legend.get_texts()) == 12, "however many there are"
