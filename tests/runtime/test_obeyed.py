"""Signals become reasons to stop, and only while a run listens."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from qfleet.runtime.signals import obeyed

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def stop():
    return SimpleNamespace(reason=None)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "reason"), list(zip(ALL, ("interrupted", "preempted", "preempted"), strict=True)))
def test_the_first_signal_is_a_reason_and_nothing_else(stop, number, reason):
    before = [signal.getsignal(each) for each in ALL]
    with obeyed(stop):
        send(number)
        assert stop.reason == reason
    assert [signal.getsignal(each) for each in ALL] == before


def test_a_second_interrupt_does_not_wait_and_handlers_are_given_back(stop):
    before = [signal.getsignal(each) for each in ALL]
    with pytest.raises(KeyboardInterrupt), obeyed(stop):
        send(signal.SIGINT)
        send(signal.SIGINT)
    assert [signal.getsignal(each) for each in ALL] == before


def test_a_scheduler_may_say_it_twice(stop):
    """Slurm sends SIGTERM to those it has warned by SIGUSR1: that must not break the checkpoint off."""
    with obeyed(stop):
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            send(number)
        assert stop.reason == "preempted"


def test_a_run_that_was_over_anyway_is_not_interrupted_at_once(stop):
    stop.reason = "total_steps"
    with obeyed(stop):
        send(signal.SIGINT)
    assert stop.reason == "interrupted"


def test_outside_the_main_thread_nothing_changes(stop):
    before, seen = [signal.getsignal(each) for each in ALL], []

    def run():
        with obeyed(stop):
            seen.append([signal.getsignal(each) for each in ALL])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert seen == [before]
