"""Learning curves: what is on the figure, how seeds are grouped, and what is refused."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.core.errors import UserError
from qfleet.report import plots
from qfleet.report.plots import (
    RunCurve,
    RunGroup,
    draw,
    format_tick,
    group_runs,
    mean_and_range,
    plot,
    read_run,
    smoothed,
)

pytest.importorskip("matplotlib")


def records(count=20, tags=("rollout/ep_rew_mean", "eval/mean_reward")):
    return [{"step": 100 * i, "frames": 400 * i, "updates": 50 * i, "episodes": i, "time_s": 2.0 * i,
             **{tag: float(i + index) for index, tag in enumerate(tags)}} for i in range(1, count + 1)]


def write_run(root, name, seed=1, double=True, rows=None):
    directory = root / name
    directory.mkdir()
    (directory / "config.yaml").write_text(f"seed: {seed}\nenv:\n  id: CartPole-v1\nagent:\n"
                                           f"  double: {str(double).lower()}\nrun:\n  name: {name}\n"
                                           f"replay:\n  max_bytes: {10**9 + seed}\n  capacity: 1000\n")
    lines = [json.dumps(row) for row in (records() if rows is None else rows)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n" if lines else "")
    return directory


def strong_lines(axes):
    return [line for line in axes.get_lines() if not line.get_label().startswith("_")]


def test_one_run_is_drawn_into_its_own_folder(tmp_path):
    run = write_run(tmp_path, "alone")
    path = plot([run])
    assert path == run / "plots" / "learning_curve.png"
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert [file.name for file in path.parent.iterdir()] == ["learning_curve.png"]


def test_seeds_become_one_line_with_a_band_and_other_settings_another(tmp_path):
    runs = [write_run(tmp_path, f"dqn-s{seed}", seed) for seed in (1, 2, 3)]
    runs += [write_run(tmp_path, f"single-s{seed}", seed, double=False) for seed in (1, 2)]
    groups = group_runs([read_run(run) for run in runs])
    assert [(members.label, len(members.runs)) for members in groups] == [("dqn (3 seeds)", 3), ("single (2 seeds)", 2)]
    axes = draw(groups, y=["rollout/ep_rew_mean"]).axes
    assert [line.get_label() for line in strong_lines(axes[0])] == ["dqn (3 seeds)", "single (2 seeds)"]
    assert len(axes[0].get_lines()) == 2 + 5 and len(axes[0].collections) == 2
    assert plot(runs, out=tmp_path / "all.svg").read_text().lstrip().startswith("<?xml")


def test_groups_with_one_name_are_told_apart_by_their_settings():
    runs = [RunCurve("dqn__1", "E", {"agent.double": value, "env.id": "E"}, records()) for value in ("true", "false")]
    assert [members.label for members in group_runs(runs)] == ["dqn__1 agent.double=true", "dqn__1 agent.double=false"]


def test_by_default_training_and_evaluation_share_a_panel():
    (panel,) = draw([RunGroup("run", [RunCurve("run", "Env-v0", {}, records())])], smooth=3).axes
    assert [line.get_label() for line in strong_lines(panel)] == ["run: training", "run: greedy evaluation"]
    assert panel.get_ylabel() == "return" and panel.get_xlabel() == "environment steps"
    assert panel.figure.get_suptitle() == "Env-v0" and panel.get_legend() is not None


@pytest.mark.parametrize(("x", "last", "label"), [("steps", 2000, "environment steps"), ("frames", 8000, "frames"),
                                                  ("updates", 1000, "updates"), ("episodes", 20, "episodes"),
                                                  ("time", 40, "training time (s)")])
def test_every_axis_shows_its_own_figures(x, last, label):
    figure = draw(
        [RunGroup("run", [RunCurve("run", "", {}, records())])], x=x, y=["eval/mean_reward", "rollout/ep_rew_mean"]
    )
    assert len(figure.axes) == 2 and figure.axes[-1].get_xlabel() == label
    assert strong_lines(figure.axes[0])[0].get_xdata()[-1] == last


def test_long_times_are_shown_in_hours():
    rows = [{"step": 1, "time_s": 0.0, "train/loss": 1.0}, {"step": 2, "time_s": 7200.0 * 3, "train/loss": 1.0}]
    (panel,) = draw([RunGroup("run", [RunCurve("run", "", {}, rows)])], x="time", y=["train/loss"]).axes
    assert panel.get_xlabel() == "training time (h)" and strong_lines(panel)[0].get_xdata()[-1] == 6


def test_the_raw_curve_stays_faint_behind_the_smoothed_one():
    members = [RunGroup("run", [RunCurve("run", "", {}, records())])]
    for smooth, lines in ((1, 1), (5, 2)):
        (panel,) = draw(members, y=["rollout/ep_rew_mean"], smooth=smooth).axes
        assert len(panel.get_lines()) == lines
    raw, strong = panel.get_lines()
    assert raw.get_alpha() < 0.5 and strong.get_linewidth() > raw.get_linewidth()


def test_of_two_records_at_one_step_the_later_counts_and_nulls_do_not():
    rows = [{"step": 1, "train/loss": 5.0}, {"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": None},
            {"step": 3}]
    xs, ys = RunCurve("run", "", {}, rows).curve("steps", "train/loss")
    assert xs.tolist() == [1] and ys.tolist() == [3]


def test_no_seed_leaves_the_band_however_smooth_its_middle_is():
    steps = np.arange(100, 2100, 100)
    rows = [[{"step": int(step), "time_s": 1.0, "frames": 4, "rollout/ep_rew_mean": sign * 10.0 * (i % 2)}
             for i, step in enumerate(steps)] for sign in (1, -1)]
    seeds = [RunCurve(f"s{i}", "Env-v0", {}, each) for i, each in enumerate(rows)]
    (panel,) = draw([RunGroup("both", seeds)], y=["rollout/ep_rew_mean"], smooth=5).axes
    (area,) = panel.collections
    reached = area.get_paths()[0].vertices[:, 1]
    assert (reached.min(), reached.max()) == (-10, 10)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40), st.integers(1, 60))
def test_smoothing_equals_a_naive_window(values, width):
    half = (width - 1) // 2
    naive = [np.mean(values[max(0, i - half):i + half + 1]) for i in range(len(values))]
    assert smoothed(np.array(values), width) == pytest.approx(naive, abs=1e-9)


def test_a_band_covers_only_what_all_seeds_cover():
    short = (np.array([0.0, 10.0]), np.array([0.0, 10.0]))
    long = (np.array([5.0, 20.0]), np.array([25.0, 40.0]))
    grid, mean, low, high = mean_and_range([short, long], points=3)
    assert grid.tolist() == [5, 7.5, 10] and low.tolist() == [5, 7.5, 10] and high.tolist() == [25, 27.5, 30]
    assert mean.tolist() == [15, 17.5, 20]


def test_mistakes_name_the_remedy(tmp_path):
    run = write_run(tmp_path, "run")
    with pytest.raises(UserError, match=r"over steps: did you mean eval/mean_reward"):
        plot([run], y=["eval/mean_rewad"])
    with pytest.raises(UserError, match=r"did you mean rollout/ep_rew_mean\?$"):
        plot([run], y=["ep_rew_mean"])
    with pytest.raises(UserError, match=r"there are \d+ tags in .*rollout.*, such as rollout/ep_rew_mean") as caught:
        plot([run], y=["zzz"])
    assert len(str(caught.value)) < 250 and "`qfleet top RUN --json` lists them" in str(caught.value)
    with pytest.raises(UserError, match=r"must end in \.png, \.svg, \.pdf"):
        plot([run], out=tmp_path / "curve.txt")
    with pytest.raises(UserError, match="at least 1"):
        plot([run], smooth=0)
    with pytest.raises(UserError, match="choose one of steps, frames"):
        plot([run], x="hours")
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        plot([tmp_path])
    with pytest.raises(UserError, match="has no metric records"):
        plot([write_run(tmp_path, "empty", rows=[])])
    with pytest.raises(UserError, match="cannot write"):
        plot([run], out=run / "config.yaml" / "a.png")


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    run = write_run(tmp_path, "run")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'qfleet\[plot\]'"):
        plot([run])


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.25, "0.25"), (-300, "-300"), (20_000, "20k"), (1.5e6, "1.5M"),
                                             (2e9, "2G")])
def test_ticks(value, text):
    assert format_tick(value) == text


def test_colours_repeat_rather_than_run_out():
    members = [RunGroup(f"run {i}", [RunCurve(f"run {i}", "", {}, records())]) for i in range(len(plots.COLOURS) + 2)]
    (panel,) = draw(members, y=["eval/mean_reward"]).axes
    assert len(strong_lines(panel)) == len(members)
