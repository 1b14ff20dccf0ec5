"""The progress view: live under a terminal, lines elsewhere, silent on demand, unharmed by a reader who leaves."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.runs.progress import FIGURES, Forgiving, Goal, ProgressView, Tally, amount, clock, size


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
    view = ProgressView(10_000, stream=stream)
    tags = {tag.replace("/", "__"): 7.25 for _, tag, _ in FIGURES}
    for step in (1000, 2000, 4000):
        view.write(record(step, **tags))
    view.close()
    text = stream.getvalue()
    assert "4,000 / 10,000 steps" in text and "40%" in text and "0:06 left" in text and "━" in text
    for label, _, form in FIGURES:
        assert label in text and form(7.25) in text
    assert "1,000" in text and "steps/s" in text and "updates/s" in text
    assert "\x1b[?25h" in text, "the cursor was hidden and must come back"


def test_no_color_drops_colours_but_keeps_the_live_view(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    view = ProgressView(100, stream=stream)
    view.write(record(50, train__loss=1.0))
    view.close()
    coloured = [code for code in escapes(stream.getvalue()) if re.match(r"\x1b\[(3|4|9)[0-9]|\x1b\[[34]8;", code)]
    assert "50%" in stream.getvalue() and coloured == []


@pytest.mark.parametrize("columns", ["20", "40", "80", "200"])
def test_no_line_is_wider_than_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal()
    view = ProgressView(10_000_000, stream=stream)
    view.write(record(1_234_567, **{tag.replace("/", "__"): 123456.0 for _, tag, _ in FIGURES}))
    view.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n").split("\n")
    assert "1,234,567" in stream.getvalue() and max(map(len, lines)) <= int(columns)


@pytest.mark.parametrize("surroundings", [{"TERM": "dumb"}, {"CI": "true"}])
def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch, surroundings):
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    view = ProgressView(100, stream=stream)
    view.write(record(50))
    view.close()
    assert escapes(stream.getvalue()) == [] and stream.getvalue().count("\n") == 1


def test_elsewhere_lines_come_every_five_seconds_and_at_each_evaluation():
    stream, now = io.StringIO(), Clock()
    view = ProgressView(100_000, stream=stream, now=now)
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
    view = ProgressView(100, stream=stream)
    view.write(record(100))
    view.close()
    view.close()
    assert stream.getvalue().splitlines() == ["100 / 100 steps  100%"]


def test_silent_shows_nothing():
    stream = Terminal()
    view = ProgressView(100, stream=stream, mode="silent")
    view.plan([("steps", "100")])
    view.write(record(50))
    view.close()
    assert stream.getvalue() == ""


def test_the_plan_is_a_table_of_names_and_texts():
    stream = io.StringIO()
    ProgressView(100, stream=stream).plan([("steps", "100"), ("memory", "3 MB of [bold]8 GB")])
    assert stream.getvalue() == "steps   100\nmemory  3 MB of [bold]8 GB\n"


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file"), OSError(5, "EIO")])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_reader_who_leaves_does_not_disturb(error, terminal):
    stream = Broken(error, terminal)
    view = ProgressView(100, stream=stream)
    view.plan([("steps", "100")])
    for step in range(1, 50):
        view.write(record(step, eval__mean_reward=1.0))
    view.close()
    assert stream.attempts == 1, "after the first failure nothing more is tried"


def test_letters_the_stream_cannot_encode_are_replaced():
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    Forgiving(text).write("ε 0.1\n")
    assert raw.getvalue() == b"? 0.1\n"


def test_rates_and_time_left_come_from_the_last_records():
    tally = Tally(Goal(steps=100_000))
    assert tally.rates() == (None, None) and tally.seconds_left() is None
    for index in range(30):  # the first 15 seconds at 100 steps/s, then 1000 steps/s
        step = 100 * index if index < 15 else 1500 + 1000 * (index - 15)
        tally.add({"step": step, "updates": step // 4, "time_s": float(index)})
    assert tally.rates() == (1000.0, pytest.approx(250.0))
    assert tally.seconds_left() == pytest.approx((100_000 - 15_500) / 1000)


def test_whichever_limit_comes_first_counts():
    goal = Goal(steps=1000, updates=100)
    assert goal.fraction({"step": 100, "updates": 50}) == 0.5
    assert goal.fraction({"step": 2000, "updates": 0}) == 1.0
    tally = Tally(Goal(None, 100))
    tally.add({"step": 7, "updates": 25, "time_s": 1.0})
    assert tally.headline() == "25 / 100 updates  25%"


def test_a_null_never_replaces_a_figure():
    tally = Tally(Goal(10))
    tally.add({"step": 1, "train/loss": 0.5})
    tally.add({"step": 2, "train/loss": None})
    assert dict(tally.figures())["loss"] == "0.5"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (11220, "3:07:00"),
                                               (183_600, "2 d 03:00")])
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (3.2e6, "3.2 MB"),
                                             (5e12, "5.0 TB")])
def test_size(count, text):
    assert size(count) == text


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30))
def test_an_amount_is_short_and_near_its_value(value):
    text = amount(value)
    assert len(text) <= 12
    assert float(text.replace(",", "")) == pytest.approx(value, rel=6e-3, abs=1e-30)
