"""Who may use which cores."""

import pytest

from qfleet.runtime import threads
from qfleet.runtime.threads import thread_plan, usable_cores


@pytest.mark.parametrize(("images", "wish", "torch"), [
    (False, "", 1), (False, "4", 1), (True, "", 8), (True, "3", 3), (True, "64", 8), (True, "0", 8), (True, "many", 8)])
def test_convolutions_take_all_cores_that_the_user_leaves_them(monkeypatch, images, wish, torch):
    monkeypatch.setenv("OMP_NUM_THREADS", wish)
    plan = thread_plan(images, cores=8)
    assert plan.torch == torch and plan.env == 8


def test_a_quota_counts_as_cores(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(threads, "_quota", lambda: 3)
    assert usable_cores() == 3
    monkeypatch.setattr(threads, "_quota", lambda: 1 << 30)
    assert usable_cores() == 16


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 2), ("max 100000", 1 << 30), ("nonsense", 1 << 30)])
def test_the_quota_is_read_from_the_control_group(monkeypatch, text, cores):
    monkeypatch.setattr(threads.Path, "read_text", lambda self: text)
    assert threads._quota() == cores
