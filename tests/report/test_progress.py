"""The progress view: live under a terminal, lines elsewhere, silent on demand, unharmed by a reader who leaves."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.report.bottleneck import SPEEDUPS
from qfleet.report.progress import ProgressView, SafeStream
from qfleet.report.status import SHOWN_METRICS, RunGoal, RunStatus, format_duration, format_number, format_size


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Broken(io.StringIO):
    def __init__(self, error, terminal):
        super().__init__()
        self.error, self.terminal, self.attempts = error, terminal, 0

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.attempts += 1
        raise self.error


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch):
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def record(step, **tags):
    figures = {tag.replace("__", "/"): value for tag, value in tags.items()}
    counts = {"step": step, "frames": step, "updates": step // 2, "episodes": step // 10}
    return {**counts, "time_s": step / 1000, **figures}


def escapes(text):
    return re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]", text)


def test_a_terminal_gets_a_bar_and_every_figure():
    stream = Terminal()
    view = ProgressView(RunGoal(10_000), stream=stream)
    figures = [row for row in SHOWN_METRICS if not row[1].startswith("fleet/")]
    tags = {tag.replace("/", "__"): 7.25 for _, tag, _ in figures}
    for step in (1000, 2000, 4000):
        view.write(record(step, **tags))
    view.close()
    text = stream.getvalue()
    assert "4,000 / 10,000 steps" in text and "40%" in text and "0:06 left" in text and "━" in text
    for label, _, form in figures:
        assert label in text and form(7.25) in text
    assert "1,000" in text and "steps/s" in text and "updates/s" in text
    assert "\x1b[?25h" in text, "the cursor was hidden and must come back"


def test_no_color_drops_colours_but_keeps_the_live_view(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    view = ProgressView(RunGoal(100), stream=stream)
    view.write(record(50, train__loss=1.0))
    view.close()
    coloured = [code for code in escapes(stream.getvalue()) if re.match(r"\x1b\[(3|4|9)[0-9]|\x1b\[[34]8;", code)]
    assert "50%" in stream.getvalue() and coloured == []


@pytest.mark.parametrize("columns", ["20", "40", "80", "200"])
def test_no_line_is_wider_than_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal()
    view = ProgressView(RunGoal(10_000_000), stream=stream)
    view.write(record(1_234_567, **{tag.replace("/", "__"): 123456.0 for _, tag, _ in SHOWN_METRICS}))
    view.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n").split("\n")
    assert "1,234,567" in stream.getvalue() and max(map(len, lines)) <= int(columns)


@pytest.mark.parametrize("child_environment", [{"TERM": "dumb"}, {"CI": "true"}])
def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch, child_environment):
    for name, value in child_environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    view = ProgressView(RunGoal(100), stream=stream)
    view.write(record(50))
    view.close()
    assert escapes(stream.getvalue()) == [] and stream.getvalue().count("\n") == 1


def test_elsewhere_lines_come_every_five_seconds_and_at_each_evaluation():
    stream, now = io.StringIO(), Clock()
    view = ProgressView(RunGoal(100_000), stream=stream, now=now)
    for tenth in range(100):
        now.now = tenth / 10
        tags = {"eval__mean_reward": 99.5} if tenth == 33 else {}
        view.write(record(1 + tenth * 100, rollout__ep_rew_mean=float(tenth), **tags))
    view.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" ")[0] for line in lines] == ["1", "3,301", "8,301", "9,901"]
    assert "eval 99.5" in lines[1] and "return 33" in lines[1] and "eval" not in lines[0]
    assert escapes(stream.getvalue()) == []


def test_the_last_record_is_shown_once():
    stream = io.StringIO()
    view = ProgressView(RunGoal(100), stream=stream)
    view.write(record(100))
    view.close()
    view.close()
    assert stream.getvalue().splitlines() == ["100 / 100 steps  100%"]


def test_silent_shows_nothing():
    stream = Terminal()
    view = ProgressView(RunGoal(100), stream=stream, mode="silent")
    view.plan([("steps", "100")])
    view.write(record(50))
    view.close()
    assert stream.getvalue() == ""


def test_the_plan_is_a_table_of_names_and_texts():
    stream = io.StringIO()
    ProgressView(RunGoal(100), stream=stream).plan([("steps", "100"), ("memory", "3 MB of [bold]8 GB")])
    assert stream.getvalue() == "steps   100\nmemory  3 MB of [bold]8 GB\n"


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file"), OSError(5, "EIO")])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_reader_who_leaves_does_not_disturb(error, terminal):
    stream = Broken(error, terminal)
    view = ProgressView(RunGoal(100), stream=stream)
    view.plan([("steps", "100")])
    for step in range(1, 50):
        view.write(record(step, eval__mean_reward=1.0))
    view.close()
    assert stream.attempts == 1, "after the first failure nothing more is tried"


def test_letters_the_stream_cannot_encode_are_replaced():
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    SafeStream(text).write("ε 0.1\n")
    assert raw.getvalue() == b"? 0.1\n"


def test_rates_and_time_left_come_from_the_last_records():
    tally = RunStatus(RunGoal(steps=100_000))
    assert tally.rates() == (None, None) and tally.seconds_left() is None
    for index in range(30):  # the first 15 seconds at 100 steps/s, then 1000 steps/s
        step = 100 * index if index < 15 else 1500 + 1000 * (index - 15)
        tally.add({"step": step, "updates": step // 4, "time_s": float(index)})
    assert tally.rates() == (1000.0, pytest.approx(250.0))
    assert tally.seconds_left() == pytest.approx((100_000 - 15_500) / 1000)


def test_whichever_limit_comes_first_counts():
    goal = RunGoal(steps=1000, updates=100)
    assert goal.fraction({"step": 100, "updates": 50}) == 0.5
    assert goal.fraction({"step": 2000, "updates": 0}) == 1.0
    tally = RunStatus(RunGoal(None, 100))
    tally.add({"step": 7, "updates": 25, "time_s": 1.0})
    assert tally.headline() == "25 / 100 updates  25%"


def test_a_null_never_replaces_a_figure():
    tally = RunStatus(RunGoal(10))
    tally.add({"step": 1, "train/loss": 0.5})
    tally.add({"step": 2, "train/loss": None})
    assert dict(tally.metrics())["loss"] == "0.5"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (11220, "3:07:00"),
                                               (183_600, "2 d 03:00")])
def test_clock(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (3.2e6, "3.2 MB"),
                                             (5e12, "5.0 TB")])
def test_size(count, text):
    assert format_size(count) == text


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30))
def test_an_amount_is_short_and_near_its_value(value):
    text = format_number(value)
    assert len(text) <= 12
    assert float(text.replace(",", "")) == pytest.approx(value, rel=6e-3, abs=1e-30)


# ---- A fleet ----

def of_fleet(step, **tags):
    """A record as the learner's process of a fleet writes it."""
    busy = {"actor__env_ms": 1.0, "actor__act_ms": 2.0, "actor__store_ms": 0.0, "actor__wait_ms": 7.0,
            "train__sample_ms": 0.5, "train__update_ms": 2.0, "time__learner_share": 0.9, "time__inbox_share": 0.05,
            "time__save_share": 0.01, "time__idle_share": 0.04, "fleet__backpressure_share": 0.8, "fleet__actors": 3.0,
            "fleet__policy_lag": 42.0, "replay__samples_per_insert": 7.9}
    return record(step, **busy | tags)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_fleet_shows_its_roles_and_what_limits_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    view = ProgressView(RunGoal(10_000, ratio=8.0), stream=stream)
    view.write(of_fleet(1000, eval__mean_reward=12.5, eval__best_reward=13.0))
    view.write(of_fleet(3000))
    view.close()
    lines = plain(stream.getvalue()).splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert "actors 3 alive 1,000 steps/s env 10 %, inference 20 %, wire 0 %, waiting 70 % policy lag 42" in rows
    assert "learner 500 updates/s 7.9/8 samples/insert learning 90 %, receiving 5 %, saving 1 %, idle 4 %" in rows
    assert "evaluator 12.5 best 13 0:02 ago" in rows
    assert "limited by learner: actors are held back 80 % of the time; the learner spends 72 % on updates" in rows


def test_a_fleet_that_was_not_judged_says_so():
    tally = RunStatus(RunGoal(100))
    tally.add(of_fleet(10))
    assert dict(tally.roles())["evaluator"] == "no evaluation yet"
    assert RunStatus(RunGoal(100)).roles() == []


def test_lines_say_who_acts_and_what_limits():
    stream = io.StringIO()
    view = ProgressView(RunGoal(10_000, ratio=8.0), stream=stream)
    view.write(of_fleet(1000))
    view.close()
    assert stream.getvalue().endswith("samples/insert 7.9/8  actors 3  limited by learner\n")


@pytest.mark.parametrize("columns", ["20", "40", "80", "200"])
def test_no_line_of_a_fleet_is_wider_than_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal()
    view = ProgressView(RunGoal(10_000_000, ratio=8.0), stream=stream)
    view.write(of_fleet(1_234_567))
    view.close()
    lines = plain(stream.getvalue()).replace("\r", "\n").split("\n")
    assert "limited" in stream.getvalue() and max(map(len, lines)) <= int(columns)


def test_silence_is_told_when_it_is_unusual():
    stream, now = Terminal(), Clock()
    view = ProgressView(RunGoal(10_000), stream=stream, now=now)
    panel = view._renderer.panel

    def shown():
        from rich.console import Console
        out = io.StringIO()
        Console(file=out, width=120).print(panel())
        return out.getvalue().splitlines()[0]

    for second in (1, 2, 3):
        now.now = second
        view.write(record(1000 * second))
    now.now = 20.0
    assert "no record" not in shown() and "0:20 elapsed" in shown()
    now.now = 63.0
    assert "no record for 1:00" in shown()
    view.close()


def test_what_went_before_is_caught_up_with_at_once():
    stream = io.StringIO()
    view = ProgressView(RunGoal(10_000), stream=stream)
    view.catch_up(record(1000 * i, eval__mean_reward=float(i)) for i in range(1, 5))
    view.catch_up([])
    view.close()
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().startswith("4,000 / 10,000 steps  40%")


@pytest.mark.parametrize(("settings", "goal"), [
    ({"total_steps": 100, "total_updates": None, "replay": {"samples_per_insert": 8.0}}, RunGoal(100, None, 8.0)),
    ({"total_steps": 2e5, "total_updates": 7}, RunGoal(200_000, 7)),
    ({"total_steps": "many", "replay": [1]}, RunGoal(None)), ({}, RunGoal(None))])
def test_the_goal_is_read_from_a_config_whatever_is_in_it(settings, goal):
    without_capture = tuple(word for word in SPEEDUPS if "capture" not in word)  # of no use on a CPU
    assert RunGoal.from_settings(settings) == dataclasses.replace(goal, faster=without_capture)
