"""Other processes on the same cores."""

import logging
import os
import subprocess
import sys
import time

import pytest
import torch

from qfleet.runtime import neighbours, threads
from qfleet.runtime.neighbours import PATIENCE, Courtesy, Neighbours

TICK = os.sysconf("SC_CLK_TCK")


class Machine:
    """Two cores, as /proc/stat would show them, and the time that we have had of them."""

    def __init__(self, path, monkeypatch):
        self.path, self.mine = path, 0.0
        self.busy, self.idle = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        monkeypatch.setattr(neighbours.os, "sched_getaffinity", lambda pid: {0, 1})
        monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: {0, 1})
        monkeypatch.setattr(threads, "_quota", lambda: 1 << 30)
        monkeypatch.setattr(neighbours.time, "process_time", lambda: self.mine)
        self.write()

    def write(self):
        lines = [f"cpu{core} {int(busy * TICK)} 0 0 {int(idle * TICK)} 0 0 0 0 0 0"
                 for core, (busy, idle) in enumerate(zip(self.busy, self.idle, strict=True))]
        self.path.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 12"]))

    def second(self, shares, mine):
        """One second in which the cores were busy for such shares of it."""
        for core, share in enumerate(shares):
            self.busy[core] += share
            self.idle[core] += 1 - share
        self.mine += mine
        self.write()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path / "stat", monkeypatch)


@pytest.mark.parametrize(("shares", "mine", "others"), [
    ([1, 1, 0], 2.0, 0.0),      # all of it is ours
    ([1, 1, 0], 1.0, 1.0),      # one of two
    ([0.5, 0.25, 0], 0.5, 0.25),
    ([0, 0, 1], 0.0, 0.0),      # a core that we may not use
    ([1, 0, 0], 1.1, 0.0)])     # clocks of different grain
def test_what_is_busy_and_not_for_us_is_busy_for_others(machine, shares, mine, others):
    look = Neighbours(machine.path)
    machine.second(shares, mine)
    assert look() == pytest.approx(others, abs=0.02)


def test_it_counts_from_the_last_look(machine):
    look = Neighbours(machine.path)
    machine.second([1, 1, 0], 0.0)
    assert look() == pytest.approx(2)
    machine.second([1, 1, 0], 2.0)
    assert look() == pytest.approx(0)
    assert look() is None, "no time has passed"


def test_where_nothing_can_be_known_nothing_is_said(machine, monkeypatch):
    assert Neighbours(machine.path.with_name("none"))() is None
    machine.path.write_text("cpu0 nonsense\ncpu1 1 2\n")
    assert Neighbours(machine.path)() is None
    machine.write()
    monkeypatch.setattr(threads, "_quota", lambda: 1)
    look = Neighbours(machine.path)
    machine.second([1, 1, 0], 0.0)
    assert look() is None, "a quota says how much of the cores is ours, and not which"


@pytest.mark.timeout(60)
def test_a_process_that_is_busy_is_seen():
    """The real thing: every core that we may use is kept busy by somebody else for a second."""
    look = Neighbours()
    if threads.usable_cores() < len(os.sched_getaffinity(0)):
        assert look() is None
        return
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        deadline = time.monotonic() + 30
        while (others := look()) is None or others < 0.5:
            assert time.monotonic() < deadline, others
            time.sleep(0.5)
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def taken(monkeypatch):
    """The numbers of threads that torch is told."""
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    return told


def looks(courtesy, clock, count):
    for _ in range(count):
        clock.now += 1.1
        assert not courtesy.step(), "looking is not work: the loop may nap"


def test_threads_are_given_away_and_taken_back(taken, caplog):
    clock, seen = Clock(), iter([0.1, 0.9, 1.0, None, 2.6, 9.0, 0.4, 0.0])
    courtesy = Courtesy(4, True, lambda: next(seen), clock)
    with caplog.at_level(logging.INFO):
        looks(courtesy, clock, 8)
    assert taken == [3, 1, 4], "four, less those whose core is gone, but one; told when it changes"
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    assert "0.9 cores busy: torch takes 3 of 4 threads" in caplog.text


def test_nobody_looks_more_often_than_once_a_second(taken):
    clock, asked = Clock(), []
    courtesy = Courtesy(2, True, lambda: asked.append(1) or 0.0, clock)
    for _ in range(30):
        clock.now += 0.1
        courtesy.step()
    assert 2 <= len(asked) <= 3


def test_who_keeps_his_threads_hears_once_what_would_be_faster(taken, caplog):
    clock, busy = Clock(), [1.0]
    courtesy = Courtesy(2, False, lambda: busy[0], clock)
    looks(courtesy, clock, PATIENCE - 1)
    busy[0] = 0.1
    looks(courtesy, clock, 1)
    busy[0] = 1.0
    looks(courtesy, clock, PATIENCE - 1)
    assert not caplog.records, "only what lasts is worth a word"
    looks(courtesy, clock, 2 * PATIENCE)
    busy[0] = 0.0
    looks(courtesy, clock, 1)
    busy[0] = 1.0
    looks(courtesy, clock, 2 * PATIENCE)
    assert not taken and len(caplog.records) == 1
    assert "run.share_cores=true" in caplog.text and "run.threads=1" in caplog.text
