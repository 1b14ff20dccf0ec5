"""The line between a child and its parent; and what becomes of children whose parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from supervised import BEAT, DEAF, TAKE, alive, numbers, until

from qfleet.process.heartbeat import VARIABLE, HeartbeatReceiver, HeartbeatSender
from qfleet.process.reaper import OrphanReaper

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(os.name != "posix", reason="needs POSIX pipes")]

PID = "open(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n')\n"
WATCH = "tether.on_orphan(lambda: print('alone', flush=True))\n"
ORPHANS = {
    "orderly": "import threading\nalone = threading.Event()\ntether.on_orphan(alone.set)\n" + PID
               + "while not alone.wait(0.02):\n    tether.beat()\nprint('left in order')\n",
    "deaf": DEAF + WATCH + PID + BEAT,
    "stuck": DEAF + WATCH + "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n" + PID
             + "signal.pause()\n",
    "hogs the lock": "import ctypes\n" + DEAF + WATCH + PID + "ctypes.PyDLL(None).sleep(1000)\n",
    "stopped": WATCH + PID + "os.kill(os.getpid(), signal.SIGSTOP)\n",
    "no tether yet": PID + "time.sleep(1000)\n",
    "has a child": "grandchild = 'import os, time\\n' + os.environ['SAY'] + 'time.sleep(1000)'\n"
                   "subprocess.Popen([sys.executable, '-c', grandchild])\n" + WATCH + PID + BEAT,
}


@pytest.fixture
def line():
    leash = HeartbeatReceiver()
    before = os.environ.get(VARIABLE)
    os.environ.update(leash.environment)
    yield leash, HeartbeatSender.from_env()
    assert os.environ.get(VARIABLE) == before
    leash.close()


def test_no_variable_no_tether(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert HeartbeatSender.from_env() is None


@pytest.mark.parametrize("fds", ["900,901", "closed", "file", "3"])
def test_a_variable_without_its_pipes_was_for_somebody_else(fds, monkeypatch, tmp_path):
    with open(tmp_path / "file", "w") as file:
        monkeypatch.setenv(VARIABLE, f"{file.fileno()},{file.fileno()}" if fds == "file" else fds.replace("closed", ""))
        assert HeartbeatSender.from_env() is None
        assert VARIABLE not in os.environ


def test_beats_arrive_at_a_limited_rate(line):
    leash, tether = line
    assert not leash.received()
    tether.beat()
    tether.beat()
    assert leash.received() and not leash.received()
    time.sleep(0.25)
    tether.beat()
    assert leash.received()


def test_a_beat_is_cheap_and_nothing_stops_it(line, monkeypatch):
    leash, tether = line
    began = time.perf_counter()
    for _ in range(10_000):
        tether.beat()
    assert time.perf_counter() - began < 0.5
    for _ in range(1 << 17):  # more than the pipe holds
        tether._next = 0.0
        tether.beat()
    assert leash.received()
    os.close(leash._beats)
    tether._next = 0.0
    tether.beat()
    leash._beats = os.open(os.devnull, os.O_RDONLY)


def test_grandchildren_do_not_inherit_the_line(line):
    leash, _ = line
    code = f"import os; os.fstat({leash.child_fds[0]})"
    done = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, timeout=30)
    assert b"Bad file descriptor" in done.stderr


@pytest.mark.slow
def test_no_child_outlives_a_killed_parent_by_ten_seconds(tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from supervised import *
        from test_heartbeat import ORPHANS, PID
        home = Path({str(tmp_path)!r})
        kids = [child(home, name, text, PIDS=str(home / "pids"), SAY=PID) for name, text in ORPHANS.items()]
        supervisor = Supervisor(kids, print, RestartPolicy())
        until(lambda: False, supervisor, 1000)
    """
    pids = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.DEVNULL) as parent:
        try:
            until(lambda: len(numbers(pids)) == len(ORPHANS) + 1)
            time.sleep(0.5)  # all of them are where they are to be found
            direct = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
            assert len(direct) == len(ORPHANS) + 1  # the guard is one of them
            assert all(alive(pid) for pid in numbers(pids))
        finally:
            parent.kill()
    try:
        until(lambda: not any(alive(pid) for pid in {*numbers(pids), *direct}), within_s=10)
    finally:
        for pid in filter(alive, numbers(pids)):
            os.kill(pid, signal.SIGKILL)
    assert "left in order" in (tmp_path / "orderly.log").read_text()
    for name in ("deaf", "stuck"):
        log = (tmp_path / f"{name}.log").read_text()
        assert "is gone; this process exits within 8 s" in log and "alone" in log and 'File "<string>"' in log


@pytest.mark.slow
def test_the_hard_end_does_not_wait_for_the_callback(tmp_path):
    leash = HeartbeatReceiver()
    code = TAKE + "tether.on_orphan(lambda: time.sleep(1000), grace_s=0.3)\ntether.beat()\ntime.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=leash.child_fds, stderr=subprocess.DEVNULL,
                               env={**os.environ, **leash.environment})
    leash.close_child_fds()
    until(leash.received)
    assert process.poll() is None
    leash.close()
    try:
        assert process.wait(10) == 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_guard_ignores_what_ends_a_job_and_one_that_was_killed_is_replaced():
    guard = OrphanReaper(8)
    try:
        guard.watch([])
        first = guard._shell
        time.sleep(0.3)  # until its trap is set
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            first.send_signal(number)
        time.sleep(0.2)
        guard.watch([])
        assert first.poll() is None and guard._shell is first
        first.kill()
        first.wait()
        guard.watch([])
        assert guard._shell is not first and guard._shell.poll() is None
    finally:
        guard.stop()
