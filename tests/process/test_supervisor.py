"""Children that die, hang, refuse or loop: real processes, really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from supervised import BEAT, DEAF, QUICK, alive, all_restarts, child, children, numbers, until

from qfleet.process import supervisor as supervise
from qfleet.process.supervisor import EXIT_UNRECOVERABLE, ChildSpec, RestartPolicy, Supervisor, describe_exit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90),
              pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")]

PID = "open(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n')\n"


@pytest.fixture
def nursery():
    """Makes supervisors, and ends their children."""
    made: list[Supervisor] = []

    def start(*kids: ChildSpec, patience: RestartPolicy = QUICK) -> Supervisor:
        supervisor = Supervisor(kids, said.append, patience, on_death=lambda *death: deaths.append(death))
        supervisor.said, supervisor.deaths = said, deaths  # type: ignore[attr-defined]
        made.append(supervisor)
        return supervisor

    said: list[str] = []
    deaths: list[tuple[str, int, str]] = []
    before = children()
    yield start
    for supervisor in made:
        supervisor.terminate(0.0)
    assert children() <= before


def watch(supervisor: Supervisor, seconds: float) -> None:
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() > end, supervisor)


def beating(supervisor: Supervisor, *names: str) -> bool:
    return all((life := supervisor._states[name].handle) is not None and life.beats for name in names)


def test_a_killed_child_is_replaced_after_a_pause_and_the_others_do_not_notice(tmp_path, nursery):
    supervisor = nursery(child(tmp_path, "a"), child(tmp_path, "b"), patience=replace(QUICK, pause_s=0.6))
    until(lambda: beating(supervisor, "a", "b"), supervisor)
    first, other = supervisor.pid("a"), supervisor.pid("b")
    os.kill(first, signal.SIGKILL)
    until(lambda: supervisor.pid("a") is None, supervisor)
    pause_s = until(lambda: supervisor.pid("a") is not None, supervisor)
    assert 0.4 < pause_s < 5
    until(lambda: beating(supervisor, "a"), supervisor)
    assert supervisor.pid("a") != first and supervisor.pid("b") == other and alive(other)
    assert (supervisor.restarts("a"), supervisor.restarts("b")) == (1, 0) and supervisor.failure is None
    killed = "was killed by SIGKILL: perhaps out of memory, lower env.lanes or actors"
    assert f"a {killed}" in supervisor.said[0] and supervisor.deaths == [("a", first, killed)]
    assert str(tmp_path / "a.log") in supervisor.said[0]


def test_a_crash_loop_ends_with_the_first_traceback(tmp_path, nursery):
    loop = PID + "raise ValueError(f'life {len(open(os.environ[\"PIDS\"]).readlines())}')"
    supervisor = nursery(child(tmp_path, "looper", loop, PIDS=str(tmp_path / "pids")), child(tmp_path, "b"))
    until(lambda: supervisor.failure, supervisor)
    failure = supervisor.failure
    assert (failure.name, failure.code) == ("looper", 1)
    assert "ValueError: life 1" in failure.text and "life 2" not in failure.text
    assert "Traceback (most recent call last)" in failure.text and str(tmp_path / "looper.log") in failure.text
    assert "ended with exit code 1, and 3 restarts did not help" in failure.text
    assert len(numbers(tmp_path / "pids")) == 4 and supervisor.restarts("looper") == 3
    pauses = [line.partition(" in a row in ")[2].partition(" s;")[0] for line in supervisor.said]
    assert pauses == ["0.1", "0.2", "0.4"]
    watch(supervisor, 0.6)
    assert len(numbers(tmp_path / "pids")) == 4, "a failure is final"
    log = (tmp_path / "looper.log").read_text()
    assert [log.count(f"ValueError: life {n}") for n in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert [line for line in log.splitlines() if line.startswith("===")] == [
        f"=== looper: start {n} ===" for n in (1, 2, 3, 4)]


def test_without_a_traceback_the_last_lines_speak(tmp_path, nursery):
    once = replace(child(tmp_path, "a", "print(*range(100), sep='\\n'); sys.exit(7)"), max_restarts=0)
    supervisor = nursery(once)
    until(lambda: supervisor.failure, supervisor)
    assert supervisor.failure.code == 7 and all_restarts(supervisor) == 0
    assert supervisor.failure.text == (f"a ended with exit code 7; it wrote:\n"
                                       f"{chr(10).join(map(str, range(60, 100)))}\nIts log: {tmp_path / 'a.log'}")


def test_a_users_mistake_stops_all_without_a_second_try(tmp_path, nursery):
    supervisor = nursery(child(tmp_path, "a", "print('env.id=Pnog is unknown', file=sys.stderr); sys.exit(2)"),
                         child(tmp_path, "b"))
    until(lambda: supervisor.failure, supervisor)
    assert (supervisor.failure.name, supervisor.failure.code) == ("a", 2)
    assert "env.id=Pnog is unknown" in supervisor.failure.text and "start 1" not in supervisor.failure.text
    watch(supervisor, 0.5)
    assert all_restarts(supervisor) == 0 and supervisor.pid("a") is None


def test_who_knows_that_no_restart_helps_gets_none(tmp_path, nursery):
    text = f"print('training failed: not finite'); sys.exit({EXIT_UNRECOVERABLE})"
    supervisor = nursery(replace(child(tmp_path, "a", text), max_restarts=5))
    until(lambda: supervisor.failure, supervisor)
    assert supervisor.failure.code == EXIT_UNRECOVERABLE and "training failed: not finite" in supervisor.failure.text
    assert all_restarts(supervisor) == 0


def test_a_budget_of_its_own_is_for_life_and_its_pauses_stay_short(tmp_path, nursery):
    """However long it beats between: what fails for ever ends."""
    brief = "for _ in range(10):\n    tether.beat()\n    time.sleep(0.02)\n1/0"
    supervisor = nursery(replace(child(tmp_path, "a", brief), max_restarts=3, memory_hint="replay.capacity"),
                         patience=replace(QUICK, healthy_s=0.05, max_restarts=9))
    until(lambda: supervisor.failure, supervisor)
    assert all_restarts(supervisor) == 3 and "and 3 restarts did not help" in supervisor.failure.text
    assert [line.partition("; its")[0] for line in supervisor.said] == [
        f"a ended with exit code 1; restart {n} of at most 3 in 0.1 s" for n in (1, 2, 3)]


def test_a_child_that_ends_well_is_done(tmp_path, nursery):
    supervisor = nursery(child(tmp_path, "a", "print('bye')"), child(tmp_path, "b"))
    until(lambda: supervisor.done("a"), supervisor)
    watch(supervisor, 0.3)
    assert supervisor.restarts("a") == 0 and not supervisor.finished and supervisor.failure is None
    assert (tmp_path / "a.log").read_text() == "=== a: start 1 ===\nbye\n"


def test_what_a_child_leaves_behind_ends_with_it(tmp_path, nursery):
    leave = "p = subprocess.Popen(['sleep', '100'])\nopen(os.environ['PIDS'], 'w').write(str(p.pid))\n"
    supervisor = nursery(child(tmp_path, "a", leave, PIDS=str(tmp_path / "pids")))
    until(lambda: supervisor.finished, supervisor)
    until(lambda: not alive(*numbers(tmp_path / "pids")), within_s=5)


@pytest.mark.parametrize("fault", ["stopped", "stuck"])
def test_a_silent_child_is_replaced(fault, tmp_path, nursery):
    text = {"stopped": BEAT, "stuck": "tether.beat()\ntime.sleep(1000)"}[fault]
    supervisor = nursery(child(tmp_path, "a", text), child(tmp_path, "b"))
    until(lambda: beating(supervisor, "a", "b"), supervisor)
    first, other = supervisor.pid("a"), supervisor.pid("b")
    if fault == "stopped":
        os.kill(first, signal.SIGSTOP)
    took_s = until(lambda: supervisor.pid("a") not in (first, None), supervisor)
    assert 1 < took_s < 10 and not alive(first)
    assert supervisor.pid("b") == other
    assert "a sent no heartbeat for 1.5 s and was killed" in supervisor.said[0]
    assert "out of memory" not in supervisor.said[0]


def test_the_first_beat_may_take_longer_but_not_for_ever(tmp_path, nursery):
    late, never = child(tmp_path, "late", "time.sleep(2)\n" + BEAT), child(tmp_path, "never", "time.sleep(1000)")
    supervisor = nursery(late, never, patience=replace(QUICK, first_beat_s=6, max_restarts=0))
    until(lambda: beating(supervisor, "late"), supervisor)
    assert supervisor.failure is None
    until(lambda: supervisor.failure, supervisor)
    assert supervisor.failure.name == "never" and "no heartbeat for 6 s" in supervisor.failure.text
    assert supervisor.restarts("late") == 0


def test_a_healthy_life_is_forgiven(tmp_path, nursery):
    """Six lives that each beat for longer than `healthy_s` do not exhaust a budget of one restart in a row."""
    brief = PID + "for _ in range(40):\n    tether.beat()\n    time.sleep(0.02)\n1/0"
    patience = replace(QUICK, max_restarts=1, healthy_s=0.4)
    supervisor = nursery(child(tmp_path, "a", brief, PIDS=str(tmp_path / "pids")), patience=patience)
    until(lambda: supervisor.failure or len(numbers(tmp_path / "pids")) == 6, supervisor)
    assert supervisor.failure is None and supervisor.restarts("a") >= 4
    patience = replace(patience, healthy_s=30)
    strict = nursery(child(tmp_path, "b", brief, PIDS=str(tmp_path / "others")), patience=patience)
    until(lambda: strict.failure, strict)
    assert len(numbers(tmp_path / "others")) == 2


def test_a_program_that_is_not_there_uses_up_the_budget(tmp_path, nursery):
    supervisor = nursery(ChildSpec("a", ["/no/such/program"], {}, tmp_path / "a.log"))
    until(lambda: supervisor.failure, supervisor)
    assert "a could not be started" in supervisor.failure.text and "/no/such/program" in supervisor.failure.text
    assert all_restarts(supervisor) == 3


def test_children_come_and_go(tmp_path, nursery):
    supervisor = nursery(child(tmp_path, "a"))
    until(lambda: beating(supervisor, "a"), supervisor)
    supervisor.add(child(tmp_path, "b", DEAF + BEAT))
    with pytest.raises(ValueError, match="'b'"):
        supervisor.add(child(tmp_path, "b"))
    until(lambda: beating(supervisor, "b"), supervisor)
    a, b = supervisor.pid("a"), supervisor.pid("b")
    supervisor.remove("a")
    supervisor.remove("b", grace_s=0.3)
    until(lambda: supervisor.names == [], supervisor)
    assert not alive(a) and not alive(b)
    assert supervisor.deaths == [] and supervisor.failure is None


def test_terminate_ends_the_deaf_and_their_children(tmp_path, nursery):
    deaf = ("p = subprocess.Popen(['sh', '-c', \"trap '' TERM; sleep 100\"])\n"
            "open(os.environ['PIDS'], 'w').write(str(p.pid))\n" + DEAF + BEAT)
    orderly = ("def leave(*_): print('in order', flush=True); sys.exit(0)\n"
               "signal.signal(signal.SIGTERM, leave)\n" + BEAT)
    supervisor = nursery(child(tmp_path, "deaf", deaf, PIDS=str(tmp_path / "pids")),
                         child(tmp_path, "orderly", orderly))
    until(lambda: beating(supervisor, "deaf", "orderly"), supervisor)
    pids = [supervisor.pid("deaf"), supervisor.pid("orderly"), *numbers(tmp_path / "pids")]
    assert supervisor.terminate(1.0) == {"deaf": -signal.SIGKILL, "orderly": 0}
    until(lambda: not any(alive(pid) for pid in pids), within_s=5)
    assert "in order" in (tmp_path / "orderly.log").read_text()
    assert not supervisor.step() and supervisor.pid("deaf") is None, "nothing is started after the end"
    assert supervisor.terminate(1.0) == {}


def test_fifty_restarts_leave_nothing_behind(tmp_path, nursery):
    patience = replace(QUICK, max_restarts=1000, pause_s=0.0)
    others = children()  # of earlier tests in this process, such as a resource tracker
    supervisor = nursery(
        ChildSpec("a", ["/bin/false"], {}, tmp_path / "a.log"), child(tmp_path, "b"), patience=patience
    )
    until(lambda: beating(supervisor, "b") and supervisor.pid("a"), supervisor)
    before = len(os.listdir("/proc/self/fd"))
    until(lambda: supervisor.restarts("a") >= 50, supervisor, within_s=60)
    until(lambda: supervisor.pid("a"), supervisor)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(children() - others) <= 3  # the two, and the guard
    supervisor.terminate(1.0)
    assert children() <= others


@pytest.mark.parametrize("who", ["supervisor", "all"])
def test_after_a_sleep_nobody_is_late(who, tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from supervised import *
        home = Path({str(tmp_path)!r})
        supervisor = Supervisor([child(home, "a")], print, QUICK)
        until(lambda: (handle := supervisor._states["a"].handle) and handle.beats, supervisor)
        print(supervisor.pid("a"), flush=True)
        until((home / "end").exists, supervisor)
        print(all_restarts(supervisor), supervisor.pid("a"), flush=True)
        supervisor.terminate(1.0)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], text=True,
                          stdout=subprocess.PIPE) as process:
        try:
            pid = int(process.stdout.readline())
            sleepers = [process.pid, pid][:1 if who == "supervisor" else 2]
            for sleeper in sleepers:
                os.kill(sleeper, signal.SIGSTOP)
            time.sleep(2.5)
            for sleeper in sleepers:
                os.kill(sleeper, signal.SIGCONT)
                time.sleep(0.2)  # the supervisor looks before the child can beat
            time.sleep(0.5)
            (tmp_path / "end").touch()
            assert process.stdout.readline().split() == ["0", str(pid)]
            assert process.wait(20) == 0 and not alive(pid)
        finally:
            process.kill()


def test_an_exit_status_in_words():
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGKILL, "x.y") == "was killed by SIGKILL: perhaps out of memory, lower x.y"
    assert describe_exit(-signal.SIGTERM) == "was killed by SIGTERM"
    assert "native code" in describe_exit(-signal.SIGSEGV) and describe_exit(-250) == "was killed by signal 250"


class Simulated:
    """The life of a child that is ready a while after its start and beats from then on, by a clock of the test's."""

    process_groups, log_path = (), Path("log")

    def __init__(self, clock, ready_s):
        self.clock, self.ready = clock, clock[0] + ready_s
        self.beats, self.first_beat, self.last_beat, self.kill_reason = False, clock[0], clock[0], None
        self.pid, self.exited = 0, False

    def poll_heartbeat(self, now):
        if self.clock[0] >= self.ready:
            self.first_beat = self.first_beat if self.beats else now
            self.last_beat, self.beats = now, True

    def request_stop(self): ...

    def kill(self):
        self.exited = True

    def reap(self):
        return -signal.SIGKILL

    def log_tail(self):
        return ""


def simulated(monkeypatch, names, ready_s, kill, seconds):
    """Supervise children for so long, of which `kill` names one at some moments; what part of it each was at work."""
    clock, worked = [0.0], dict.fromkeys(names, 0)
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda s: None))
    supervisor = Supervisor([ChildSpec(name, [], {}, Path(f"{name}.log")) for name in names], lambda line: None,
                            RestartPolicy(max_restarts=1000),
                            start_child=lambda child, number, now: Simulated(clock, ready_s))
    turns = int(seconds / supervise.TURN_S)
    for turn in range(turns):
        clock[0] += supervise.TURN_S * 1.001
        supervisor.step()
        for name in names:
            life = supervisor._states[name].handle
            worked[name] += life is not None and life.beats and not life.exited
        if (victim := kill(turn)) and (life := supervisor._states[victim].handle):
            life.kill()
    restarts = {name: supervisor.restarts(name) for name in names}
    supervisor.terminate(0)
    return {name: count / turns for name, count in worked.items()}, restarts


def test_children_that_are_killed_every_half_minute_are_at_work_most_of_the_time(monkeypatch):
    """Ten minutes in which one of four is killed every 8 s: none lives for the 30 s that count as healthy."""
    names, every = ["learner", "actor/0", "actor/1", "evaluator"], int(8 / supervise.TURN_S)
    shares, restarts = simulated(monkeypatch, names, 3.0, lambda turn: names[turn // every % 4]
                                 if turn % every == 0 else None, 600.0)
    assert min(shares.values()) > 0.8 and min(restarts.values()) >= 17, (shares, restarts)


def test_children_that_die_soon_after_their_start_have_longer_and_longer_pauses(monkeypatch):
    every = int(2 / supervise.TURN_S)
    _, restarts = simulated(monkeypatch, ["actor/0"], 1.0, lambda turn: turn % every == 0 and "actor/0", 600.0)
    assert restarts["actor/0"] < 30, "a pause of 30 s, in the end, between lives of 2 s"


def test_the_message_that_a_child_ended_with_is_told_without_its_log(tmp_path, nursery):
    text = (
        f"print('no answer yet'); print('environment failed: x gave nan\\nat step 3'); sys.exit({EXIT_UNRECOVERABLE})"
    )
    supervisor = nursery(child(tmp_path, "a", text))
    until(lambda: supervisor.failure, supervisor)
    assert supervisor.failure.text == ("a cannot continue:\nenvironment failed: x gave nan\nat step 3\n"
                                       f"Its log: {tmp_path / 'a.log'}")
