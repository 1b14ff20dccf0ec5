"""Other processes on the same cores."""

import itertools
import logging
import os
import subprocess
import sys
import time

import pytest
import torch

from qfleet import api, session
from qfleet.runtime import neighbours, threads
from qfleet.runtime.neighbours import PATIENCE, Courtesy, Neighbours

TICK = os.sysconf("SC_CLK_TCK")


class Machine:
    """Two cores, as /proc/stat would show them, and the time that we have had of them."""

    def __init__(self, path, monkeypatch):
        self.path, self.mine = path, 0.0
        self.busy, self.idle = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
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


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_process_that_is_busy_is_seen():
    """The real thing: as many busy processes as there are cores take what this one would have."""
    look = Neighbours()
    if threads.usable_cores() < len(os.sched_getaffinity(0)):
        assert look() is None
        return
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        deadline = time.monotonic() + 60
        while (others := look()) is None or others < 0.8 * len(processes):
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


@pytest.mark.parametrize(("threads", "cores", "others", "left"), [
    (4, 4, 0.4, []), (4, 4, 0.6, [3]), (4, 4, 2.6, [1]), (4, 4, 9.0, [1]),
    (4, 16, 4.0, []), (4, 16, 12.0, []), (4, 16, 13.0, [3]),  # there are others for the neighbours
    (8, 4, 0.0, [4]), (8, 4, 1.0, [3])])                      # more threads than cores are too many anyway
def test_torch_leaves_to_others_what_they_keep_busy(taken, threads, cores, others, left):
    clock = Clock()
    looks(Courtesy(threads, cores, True, lambda: others, clock), clock, 1)
    assert taken == left


def test_threads_are_taken_back_when_the_others_have_been_idle_for_a_while(taken, caplog):
    seen = [0.1, 0.9, 1.0, None, 0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    clock, each = Clock(), iter(seen)
    with caplog.at_level(logging.INFO):
        looks(Courtesy(4, 4, True, lambda: next(each), clock), clock, len(seen))
    assert taken == [3, 2, 4], "at once given away, after three idle looks in a row taken back"
    assert [record.levelname for record in caplog.records] == ["INFO"], "said once, however often it comes and goes"
    assert "0.9 cores busy: torch takes 3 of 4 threads" in caplog.text


def test_nobody_looks_more_often_than_once_a_second(taken):
    clock, asked = Clock(), []
    courtesy = Courtesy(2, 2, True, lambda: asked.append(1) or 0.0, clock)
    for _ in range(30):
        clock.now += 0.1
        courtesy.step()
    assert 2 <= len(asked) <= 3


def test_who_keeps_his_threads_hears_once_what_would_be_faster(taken, caplog):
    clock, busy = Clock(), [1.0]
    courtesy = Courtesy(2, 2, False, lambda: busy[0], clock)
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
    assert all(remedy in caplog.text for remedy in ("run.share_cores=true", "learner.parts=2", "run.threads=1"))


def test_parts_are_not_advised_for_more_threads_than_can_have_one_each(taken, caplog):
    clock = Clock()
    looks(Courtesy(64, 64, False, lambda: 9.0, clock), clock, 2 * PATIENCE)
    assert "run.threads=1 it is" in caplog.text and "learner.parts" not in caplog.text


SMALL = ["env.kwargs={pixels: true}", "env.lanes=2", "replay.capacity=400", "replay.min_steps=32",
         "replay.chunk_steps=8", "learner.batch_size=8", "learner.precision=fp32", "total_steps=80", "stop_at=null",
         "eval.episodes=1", "eval.period_steps=null", "checkpoint.period_steps=null", "run.tensorboard=false"]


@pytest.fixture
def met(monkeypatch):
    """Every courtesy that a run has, whose neighbours keep a core busy and who looks whenever it can."""
    made = []

    class Met(Courtesy):
        def __init__(self, *args):
            super().__init__(*args, lambda: 1.0, itertools.count(0, 2).__next__)
            made.append(args)

    monkeypatch.setattr(session, "Courtesy", Met)
    monkeypatch.setattr(session, "usable_cores", lambda: 2)
    return made


def test_a_run_gives_its_threads_away_and_the_caller_finds_his_own_again(met, tmp_path, monkeypatch):
    before, told, tell = torch.get_num_threads(), [], torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (told.append(count), tell(count)))
    api.train("toy/Catch-v0", [*SMALL, "run.threads=2", "run.share_cores=true", f"run.root={tmp_path}"])
    assert met == [(2, 2, True)]
    assert told[:2] == [2, 1] and torch.get_num_threads() == before


@pytest.mark.parametrize("words", [
    ["run.threads=1"], pytest.param(["run.threads=2", "env.isolate=true"], marks=pytest.mark.slow)])
def test_who_has_no_thread_to_give_or_children_of_his_own_meets_nobody(met, tmp_path, words):
    api.train("toy/Catch-v0", [*SMALL, *words, f"run.root={tmp_path}"])
    assert not met


def test_sharing_that_has_no_effect_is_said_and_not_written(tmp_path, caplog):
    """A vector network has one thread: the run goes on without it, and can be resumed."""
    words = ["total_steps=2000", "replay.min_steps=500", "eval.period_steps=null", "eval.episodes=1",
             "run.tensorboard=false"]
    run = api.train("cartpole", [*words, "stop_at=null", "run.share_cores=true", f"run.root={tmp_path}"])
    assert "run.share_cores=true has no effect" in caplog.text
    assert "share_cores: true" not in (run.directory / "config.yaml").read_text()
