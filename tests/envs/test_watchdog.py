"""An environment that hangs ends the process with all stacks; one that is merely used slowly does not."""

import io
import threading
import time

import numpy as np
import pytest
from fakes import TapeEnv

from qfleet.envs import watchdog
from qfleet.envs.watchdog import WatchdogEnv

pytestmark = pytest.mark.timeout(60)


class Stuck(TapeEnv):
    """Waits in `recv` or `reset` until it is released."""

    def __init__(self, where):
        super().__init__([3, 5])
        self.where, self.release = where, threading.Event()

    def reset(self, seeds):
        if self.where == "reset":
            self.release.wait()
        return super().reset(seeds)

    def recv(self):
        if self.where == "recv":
            self.release.wait()
        return super().recv()


@pytest.fixture
def ended(monkeypatch):
    """Instead of ending the process, say so."""
    codes, event = [], threading.Event()

    def leave(code):
        codes.append(code)
        event.set()

    monkeypatch.setattr(watchdog.os, "_exit", leave)
    return codes, event


def play(env):
    env.reset([1, 2])
    env.send(np.zeros(2, np.int64))
    return env.recv()


@pytest.mark.parametrize("where", ["reset", "recv"])
def test_a_hang_ends_the_process_with_every_stack(where, ended, capfd):
    codes, event = ended
    inner = Stuck(where)
    env = WatchdogEnv(inner, limit_s=0.05)
    player = threading.Thread(target=play, args=(env,))
    player.start()
    assert event.wait(30) and set(codes) == {1}
    inner.release.set()
    player.join(30)
    env.close()
    err = capfd.readouterr().err
    assert "the environment tape has not answered for 0.05 s" in err and "run.stall_timeout_s" in err
    assert f"in {where}" in err and "Thread 0x" in err


def test_the_end_comes_even_without_a_stderr(ended, monkeypatch):
    codes, event = ended
    broken = io.StringIO()
    broken.close()
    monkeypatch.setattr(watchdog.sys, "stderr", broken)
    inner = Stuck("recv")
    env = WatchdogEnv(inner, limit_s=0.05)
    player = threading.Thread(target=play, args=(env,))
    player.start()
    assert event.wait(30) and set(codes) == {1}
    inner.release.set()
    player.join(30)
    env.close()


def test_time_between_calls_does_not_count(ended):
    """A learner may train, or a checkpoint be written, as long as it takes: nobody waits for the environment then."""
    codes, event = ended
    env = WatchdogEnv(TapeEnv([3, 5]), limit_s=0.05)
    env.reset([1, 2])
    env.send(np.zeros(2, np.int64))
    assert not event.wait(0.3)
    env.recv()
    assert not event.wait(0.3) and codes == []
    env.close()


class Clock:
    """Stands for the event that a watcher waits on: the world's clock jumps by each gap, and then all is over."""

    def __init__(self, gaps):
        self.gaps, self.now = list(gaps), 0.0

    def wait(self, seconds):
        if not self.gaps:
            return True
        self.now += self.gaps.pop(0)
        return False


@pytest.mark.parametrize(("gaps", "codes"), [([1] * 8, []), ([1] * 10, [1, 1]), ([1, 1, 600, 1, 1], [])])
def test_a_process_that_was_stopped_is_no_environment_that_hangs(gaps, codes, ended, monkeypatch):
    env = WatchdogEnv(TapeEnv([3, 5]), limit_s=8)
    env.close()
    env._closed = clock = Clock(gaps)
    env._call = object()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock.now)
        env._watch()
    assert ended[0] == codes


@pytest.mark.parametrize("where", ["reset", "recv"])
def test_a_call_that_raises_is_over(where, ended):
    inner = TapeEnv([3, 5])
    env = WatchdogEnv(inner, limit_s=0.05)

    def fail(*args):
        raise RuntimeError("not today")

    setattr(inner, where, fail)
    with pytest.raises(RuntimeError, match="not today"):
        play(env)
    assert not ended[1].wait(0.3) and env._call is None
    env.close()


def test_it_passes_everything_on_and_its_thread_ends_with_it():
    inner, before = TapeEnv([3, 5]), set(threading.enumerate())
    env = WatchdogEnv(inner, limit_s=0.4)
    (mine,) = set(threading.enumerate()) - before
    assert env.spec is inner.spec and env.lanes == 2 and env.faults() == 0 and env.render() is None
    outcome = play(env)
    assert outcome.reward.tolist() == [1, 1] and inner.tape == ["reset", "send", "recv"]
    assert mine.is_alive()
    env.close()
    mine.join(30)
    assert inner.tape[-1] == "close" and not mine.is_alive()
