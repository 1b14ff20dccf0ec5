"""When evaluations count as far below the training, and where that is said."""

from __future__ import annotations

import io
import json

import pytest
from report_kit import write_run

from qfleet.cli.commands import main
from qfleet.report.progress import ProgressView
from qfleet.report.return_gap import ReturnGapDetector, find_gap
from qfleet.report.run_report import gather
from qfleet.report.status import RunGoal

GOAL = RunGoal(10_000, eval_episodes=10)


def evaluated(step, training, score, spread=40.0, std=20.0, episodes=300):
    return {"step": step, "time_s": step / 100, "updates": step // 2, "episodes": episodes,
            "rollout/ep_rew_mean": training, "rollout/ep_rew_std": spread, "eval/mean_reward": score,
            "eval/std_reward": std}


def acrobot(low=-480.0, **more):
    """Training improves from -500 to -150, evaluations do not."""
    return [evaluated(1000 * i, training, low, **more)
            for i, training in enumerate([-500.0, -300.0, -200.0, -160.0, -150.0], start=1)]


def gap_of(records, episodes=10):
    return find_gap(records, {"eval": {"episodes": episodes}})


def test_three_evaluations_in_a_row_far_below_the_training_are_reported():
    gap = gap_of(acrobot())
    assert gap is not None and gap.evaluations == (-480, -480, -480) and gap.training == -150
    assert "returned -480, -480, -480, the last 100 training episodes -150 ± 40 (standard deviation)" in gap.evidence
    assert gap_of(acrobot()[:3]) is None, "only two of them are wide"


def test_one_good_evaluation_ends_the_report():
    assert gap_of([*acrobot(), evaluated(6000, -150.0, -140.0)]) is None


@pytest.mark.parametrize("records", [
    pytest.param([evaluated(1000 * i, 60.0 * i, 120.0 * i) for i in range(1, 6)], id="evaluations above the training"),
    pytest.param(acrobot(spread=200.0), id="within the spread of the training returns"),
    pytest.param(acrobot(std=400.0), id="within the error of the evaluations"),
    pytest.param(acrobot(episodes=19), id="too few training episodes"),
    pytest.param([evaluated(1000 * i, score, score - 2.0, 0.5, 0.5) for i, score in enumerate([-20, 0, 20, 20, 20])],
                 id="small beside what was learned"),
    pytest.param([{"step": 5, "eval/mean_reward": None}, {"step": 6, "eval/mean_reward": "x"}], id="malformed")])
def test_other_differences_are_not_reported(records):
    assert gap_of(records) is None


def test_runs_of_earlier_versions_and_shorter_evaluations_are_not_compared():
    old = [{tag: value for tag, value in record.items() if tag != "rollout/ep_rew_std"} for record in acrobot()]
    assert gap_of(old) is None
    assert find_gap(acrobot(), {"eval": {"episodes": 10, "max_episode_steps": 100}}) is None
    assert find_gap(acrobot(), {}) is None and find_gap(acrobot(), {"eval": "x"}) is None


def test_records_without_an_evaluation_change_nothing():
    detector = ReturnGapDetector(10)
    for record in acrobot():
        detector.add(record)
        detector.add({"step": record["step"] + 1, "rollout/ep_rew_mean": 1e9})
    assert detector.gap() == gap_of(acrobot())


def test_the_plain_view_says_it_once_with_reason_and_remedy():
    stream = io.StringIO()
    view = ProgressView(GOAL, stream=stream, mode="plain")
    for record in [*acrobot(), evaluated(6000, -150.0, -480.0), evaluated(7000, -150.0, -480.0)]:
        view.write(record)
    view.close()
    assert stream.getvalue().count("evaluations far below the training") == 1
    assert "greedy policy of one version" in stream.getvalue() and "docs/not-learning.md" in stream.getvalue()


def test_the_live_view_shows_it_while_it_lasts():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    view = ProgressView(GOAL, stream=stream, mode="live")
    for record in acrobot():
        view.write(record)
    view.close()
    assert "evaluations far below the training" in stream.getvalue()


def test_report_top_and_doctor_say_it_and_state_the_score(tmp_path, capsys):
    run = write_run(tmp_path, "acro", rows=acrobot())
    settings = json.loads((run / "config.yaml").read_text()) | {"eval": {"episodes": 10}}
    (run / "config.yaml").write_text(json.dumps(settings))
    score = {"mean": -480.5, "standard_error": 6.5, "episodes": 20, "seed": 1001, "checkpoint": "best-1"}
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"ended": {"reason": "total_steps", "score": score}}))
    data, _ = gather([run])
    [described], [row] = data["runs"], data["scores"]
    assert described["gap"]["training"] == -150 and described["score"] == score and described["episodes_each"] == 10
    assert row["errors"] == [pytest.approx(20 / 3)] and row["fresh"] == [score]
    assert main(["top", "acro", "--once", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "evaluations far below the training: the last 3" in out
    assert "-480.5 ± 6.5 (standard error), best policy, 20 fresh episodes" in out
    assert main(["doctor", "acro", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "score      -480.5 ± 6.5 (standard error), best policy, 20 fresh episodes" in out
    assert "warning    evaluations far below the training" in out
    assert main(["top", "acro", "--json", "--root", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["return_gap"]["training"] == -150 and document["score"] == score
