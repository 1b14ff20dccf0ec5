"""Signals become reasons to stop, and only while a run listens."""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from qfleet.process.signals import stop_on_signal

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture
def stop():
    return SimpleNamespace(reason=None)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "reason"), list(zip(
    ALL, ("interrupted", "preempted", "preempted", "preempted"), strict=True)))
def test_the_first_signal_is_a_reason_and_nothing_else(stop, number, reason):
    before = [signal.getsignal(each) for each in ALL]
    with stop_on_signal(stop):
        send(number)
        assert stop.reason == reason
    assert [signal.getsignal(each) for each in ALL] == before


def test_a_second_interrupt_does_not_wait_and_handlers_are_given_back(stop):
    before = [signal.getsignal(each) for each in ALL]
    with pytest.raises(KeyboardInterrupt), stop_on_signal(stop):
        send(signal.SIGINT)
        send(signal.SIGINT)
    assert [signal.getsignal(each) for each in ALL] == before


def test_a_scheduler_may_say_it_twice(stop):
    """Slurm sends SIGTERM to those it has warned by SIGUSR1: that must not break the checkpoint off."""
    with stop_on_signal(stop):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            send(number)
        assert stop.reason == "preempted"


@pytest.mark.parametrize(("first", "later", "reason"), [
    (signal.SIGTERM, signal.SIGINT, "preempted"), (signal.SIGINT, signal.SIGHUP, "interrupted"),
    (signal.SIGINT, signal.SIGTERM, "interrupted")])
def test_the_first_signal_decides_the_exit_code(stop, first, later, reason):
    """A terminal that is closed after Ctrl-C, or Ctrl-C while a preempted run saves."""
    with stop_on_signal(stop):
        send(first)
        send(later)
        assert stop.reason == reason


def test_a_run_that_was_over_anyway_is_not_interrupted_at_once(stop):
    stop.reason = "total_steps"
    with stop_on_signal(stop):
        send(signal.SIGINT)
    assert stop.reason == "interrupted"


def test_outside_the_main_thread_nothing_changes(stop):
    before, seen = [signal.getsignal(each) for each in ALL], []

    def run():
        with stop_on_signal(stop):
            seen.append([signal.getsignal(each) for each in ALL])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert seen == [before]


def test_a_hangup_that_was_ignored_at_the_start_stays_ignored(stop):
    """`nohup` starts a process so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal(stop):
            send(signal.SIGHUP)
            assert stop.reason is None
            send(signal.SIGTERM)
        assert stop.reason == "preempted" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


PROCESS = """
import os, signal, sys
from types import SimpleNamespace
from qfleet import __main__ as command
from qfleet.process.signals import stop_on_signal

first, *later = map(int, sys.argv[1:])

class AtTheVeryEnd:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        for number in later:
            kill(pid, number)

def main():
    stop = SimpleNamespace(reason=None)
    with stop_on_signal(stop):
        if first:
            os.kill(os.getpid(), first)
    for number in later:
        os.kill(os.getpid(), number)
    sys.kept_until_the_interpreter_ends = AtTheVeryEnd()
    return {"interrupted": 130, "preempted": 75, None: 0}[stop.reason]

command.main = main
getattr(command, "run", lambda: command.leave(main()))()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("first", "later", "code"), [
    (signal.SIGINT, [signal.SIGINT], 130), (signal.SIGTERM, [signal.SIGTERM] * 3, 75),
    (signal.SIGHUP, [signal.SIGHUP, signal.SIGTERM], 75), (0, [signal.SIGTERM], -signal.SIGTERM)])
def test_signals_after_the_one_that_ended_a_run_do_not_change_the_exit_code(first, later, code):
    done = subprocess.run([sys.executable, "-c", PROCESS, *map(str, map(int, [first, *later]))], timeout=30)
    assert done.returncode == code
