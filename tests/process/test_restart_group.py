"""Lives that are one: they begin when all are there, and end with the first that fails for a reason of its own."""

import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from qfleet.launch.ray_handle import GONE
from qfleet.process import restart_group as module
from qfleet.process.handle import ChildSpec, LocalProcess
from qfleet.process.restart_group import EXIT_PEER_LOST, RestartGroup
from qfleet.process.supervisor import EXIT_OK, EXIT_UNRECOVERABLE, EXIT_USER_ERROR
from qfleet.sync.process_group import network_interface


class Lived:
    """A `ProcessHandle` that says what the test wants."""

    process_groups, log_path = (), Path("log")

    def __init__(self):
        self.beats, self.first_beat, self.last_beat, self.kill_reason, self.pid = False, 0.0, 0.0, None, 7
        self.is_starting, self.is_unreachable, self.code = True, True, None
        self.killed, self.asked = None, False

    @property
    def exited(self):
        return self.code is not None

    def arrive(self):
        self.is_starting = self.is_unreachable = False

    def poll_heartbeat(self, now):
        if not self.is_starting and self.may_start():
            self.first_beat = self.first_beat if self.beats else now
            self.beats, self.last_beat = True, now

    def request_stop(self):
        self.asked = True

    def kill(self, for_good=None):
        self.killed = for_good

    def reap(self):
        return -signal.SIGKILL if self.code is None else self.code

    def log_tail(self):
        return f"code {self.code}"


@pytest.fixture
def pair():
    lives = [Lived(), Lived()]

    def start(life, may_start):
        life.may_start = may_start
        return life

    return RestartGroup([partial(start, life) for life in lives], 0.0), lives


def test_jobs_begin_when_all_are_there_and_nobody_is_silent_before(pair):
    joint, (one, two) = pair
    one.arrive()
    joint.poll_heartbeat(100.0)
    assert not one.may_start() and joint.is_unreachable
    assert not joint.beats and joint.last_beat == joint.first_beat == 100
    two.arrive()
    joint.poll_heartbeat(130.0)
    joint.poll_heartbeat(131.0)
    assert one.may_start() and joint.beats and not joint.is_starting and joint.last_beat == 131
    assert not joint.exited


def test_it_is_done_when_all_are(pair):
    joint, (one, two) = pair
    one.code = EXIT_OK
    assert not joint.exited
    two.code = EXIT_OK
    assert joint.exited and joint.reap() == EXIT_OK and joint.kill_reason is None
    joint.kill()
    assert (one.killed, two.killed) == (True, True)


def test_who_lost_another_is_not_the_cause(pair):
    joint, (one, two) = pair
    one.code = EXIT_PEER_LOST
    two.is_unreachable = True
    assert not joint.exited, "who was lost is waited for"
    two.code, two.kill_reason = -signal.SIGKILL, GONE
    assert joint.exited and joint.reap() == -signal.SIGKILL and joint.log_tail() == f"code {-signal.SIGKILL}"
    assert joint.kill_reason == f"lost its rank 1, which {GONE}"
    joint.kill()
    assert (one.killed, two.killed) == (False, False), "all are started again"


def test_if_all_lost_each_other_the_connection_is_to_blame(pair):
    joint, (one, two) = pair
    one.code = two.code = EXIT_PEER_LOST
    assert joint.exited and joint.reap() == -signal.SIGKILL and "connection between" in joint.kill_reason


def test_who_was_lost_is_not_waited_for_for_ever(pair, monkeypatch):
    joint, (one, two) = pair
    one.code, two.is_unreachable = EXIT_PEER_LOST, True
    monkeypatch.setattr(module, "CULPRIT_S", -1.0)
    assert joint.exited and joint.reap() == -signal.SIGKILL
    assert joint.kill_reason == "lost its rank 1, which does not answer"


@pytest.mark.parametrize("code", [EXIT_USER_ERROR, EXIT_UNRECOVERABLE])
def test_what_no_restart_mends_is_said_whoever_else_has_failed(pair, code):
    joint, (one, two) = pair
    one.code, two.code = 1, code
    assert joint.exited and joint.reap() == code
    joint.kill()
    assert one.killed and two.killed


def test_all_are_asked_and_then_end_for_good(pair):
    joint, (one, two) = pair
    joint.request_stop()
    one.code = -signal.SIGTERM
    assert one.asked and two.asked and joint.exited
    joint.kill()
    assert one.killed and two.killed


def test_the_one_that_was_silent_for_longest_is_named(pair):
    joint, (one, two) = pair
    one.arrive()
    two.arrive()
    one.last_beat, two.last_beat = 50.0, 20.0
    joint.kill_reason = "sent no heartbeat for 30 s and was killed"
    joint.kill()
    assert joint.exited and joint.reap() == -signal.SIGKILL and joint.log_tail() == "code None"
    assert joint._culprit() == 1


def test_one_that_has_ended_is_not_called_silent(pair):
    joint, (one, two) = pair
    one.arrive()
    two.arrive()
    joint.poll_heartbeat(1.0)
    two.code = EXIT_OK
    one.last_beat = 90.0
    joint.poll_heartbeat(100.0)
    assert joint.last_beat == 100 and joint.beats and not joint.exited


def started(folder, *programs):
    children = [ChildSpec(f"rank/{index}", [sys.executable, "-c", text], {}, folder / f"rank-{index}.log")
                for index, text in enumerate(programs)]
    return RestartGroup([lambda may_start, child=child: LocalProcess(child, 1, 0.0) for child in children], 0.0)


def until(ready):
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


FOREVER = "import time; print('here', flush=True); time.sleep(600)"


@pytest.mark.parametrize("program,code", [("raise SystemExit(4)", 4), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_processes_of_this_host_end_with_the_first_that_fails(tmp_path, program, code):
    group = started(tmp_path, FOREVER, program)
    assert len(group.process_groups) == 2 and not group.is_unreachable
    until(lambda: group.exited)
    assert group.code == code and group.log_path.name == "rank-1.log"
    group.kill()
    assert group.reap() == code and group.log_path.name == "rank-1.log", "those killed for it are not to blame"
    assert group.pid == group.process_groups[1]


def test_processes_of_this_host_are_done_when_all_are(tmp_path):
    group = started(tmp_path, "", "import time; time.sleep(0.3)")
    until(lambda: group.exited)
    group.kill()
    assert group.reap() == EXIT_OK and group.kill_reason is None


def test_processes_of_this_host_are_all_asked_to_stop(tmp_path):
    group = started(tmp_path, FOREVER, FOREVER)
    until(lambda: all("here" in path.read_text() for path in tmp_path.iterdir()))
    group.request_stop()
    until(lambda: group.exited)
    group.kill()
    assert group.reap() == -signal.SIGTERM


def test_a_group_that_cannot_start_leaves_no_member(tmp_path):
    held = []

    def fail(may_start):
        raise OSError("no memory")

    def start(may_start):
        held.append(LocalProcess(ChildSpec("rank/0", [sys.executable, "-c", FOREVER], {}, tmp_path / "log"), 1, 0.0))
        return held[0]

    with pytest.raises(OSError, match="no memory"):
        RestartGroup([start, fail], 0.0)
    assert held[0].code == -signal.SIGKILL


def test_an_interface_is_known_by_its_address():
    assert network_interface("127.0.0.1") == "lo" and network_interface("203.0.113.7") is None
