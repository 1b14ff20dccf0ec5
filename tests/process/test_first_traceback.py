"""The first traceback of a log, found among other output."""

import subprocess
import sys

import pytest

from qfleet.process.supervisor import first_traceback

SIMPLE = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
  File "a.py", line 3, in f
    raise ValueError("no")
ValueError: no"""
CHAIN = SIMPLE + """

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 1, in <module>
OSError: worse"""
LONG = SIMPLE + "\nhint: one\nhint: two"


@pytest.mark.parametrize("text", ["", "all is well\n", "Traceback, said the log"])
def test_none_where_there_is_none(text):
    assert first_traceback(text) is None


@pytest.mark.parametrize("block", [SIMPLE, CHAIN, CHAIN.replace(
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:"), LONG])
def test_the_first_one_alone(block):
    other = SIMPLE.replace("no", "another")
    assert first_traceback(block) == block
    assert first_traceback(f"starting\n\n{block}\n\nretrying\n{other}\n") == block
    assert first_traceback(f"{block}\n{other}") == block if block != CHAIN else True


def test_a_header_behind_a_prefix_and_an_unfinished_block():
    assert first_traceback("ERROR:root:" + SIMPLE + "\n\nmore") == "ERROR:root:" + SIMPLE
    half = "\n".join(SIMPLE.splitlines()[:3])
    assert first_traceback(half) == half


def test_what_announces_it_comes_along():
    assert first_traceback(f"starting\nPong failed 3 times; the last:\n{SIMPLE}\n\n") == (
        f"Pong failed 3 times; the last:\n{SIMPLE}")


def test_a_message_without_end_is_cut():
    assert len(first_traceback(SIMPLE + "\nchatter" * 100).splitlines()) < 30


@pytest.mark.timeout(30)
def test_what_python_really_writes():
    code = "try:\n    1/0\nexcept Exception as e:\n    raise ExceptionGroup('two', [e, OSError('x')])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20).stderr
    assert first_traceback("before\n" + said + "\nafter").rstrip() in said
    assert "ZeroDivisionError" in first_traceback(said)
