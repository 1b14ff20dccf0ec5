"""Threads that work side by side answer in order, and none is left at work after a failure."""

import threading

import pytest

from qfleet.replay.thread_team import ThreadTeam


def test_hands_work_at_once_and_answer_in_order():
    meeting = threading.Barrier(3, timeout=30)

    def job(name):
        meeting.wait()  # which needs all three
        return name, threading.current_thread().name

    found = ThreadTeam(3)([lambda name=name: job(name) for name in "abc"])
    assert [name for name, _ in found] == ["a", "b", "c"] and found[0][1] == "MainThread"


def test_nobody_is_left_at_work_after_a_failure():
    done = []

    def slow():
        threading.Event().wait(0.2)
        done.append(1)

    def fails():
        raise RuntimeError("no")

    for jobs in ([fails, slow], [slow, fails]):
        done.clear()
        with pytest.raises(RuntimeError, match="no"):
            ThreadTeam(2)(jobs)
        assert done == [1]
