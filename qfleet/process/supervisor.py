"""Child processes kept alive: started, watched, replaced when they die or hang, given up when that does not help.

    waiting ──▶ running ──▶ exit 0: done, for good
       ▲           │        exit 2: a user's mistake, or 70: whatever else no restart mends: the failure of the whole
       └── pause ──┴─────── any other end, or no beat in time: another start after 0.5, 1, 2 ... 30 s, or after 0.5 s
                            again if it had worked for a while; `max_restarts` times in a row without a healthy life
                            between, then the failure of the whole

What the children do is their own business: they take a `Tether`, and beat once they are ready to do so regularly. Time
is counted in the supervisor's own turns, each no longer than a quarter of the heartbeat's deadline: after a sleep of
the machine, or of this process, nobody is late.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qfleet.process.handle import ChildSpec, LocalProcess, ProcessHandle
from qfleet.process.heartbeat import ORPHAN_GRACE_S
from qfleet.process.reaper import OrphanReaper

TURN_S = 0.05
"""Children are looked at this often, however often `step` is called."""

LAST_LINES = 40
MESSAGE_LINES = 12
"""An exception's message may have several lines, and nothing marks the last one."""

EXIT_OK, EXIT_USER_ERROR, EXIT_UNRECOVERABLE, EXIT_NOT_STARTED = 0, 2, 70, 127
VERDICTS = ("error: ", "errors:", "environment failed: ", "training failed: ")
"""How the message of a process begins that ends on purpose."""

HEADER = "Traceback (most recent call last)"
LINKS = ("During handling of the above exception", "The above exception was the direct cause")


@dataclass(frozen=True)
class RestartPolicy:
    """How long children may be silent, and how often they may die."""

    heartbeat_timeout_s: float = 30.0
    first_beat_s: float = 120.0  # a start imports large libraries, from what may be a cold network disk
    healthy_s: float = 30.0  # who beats so long is healthy, and what went before is forgiven
    max_restarts: int = 5
    reset_backoff_s: float = (
        10.0  # a child that beat for so long was at work: the pauses before its restarts begin anew
    )
    pause_s: float = 0.5  # before the first restart; doubled each time
    longest_pause_s: float = 30.0


@dataclass(frozen=True)
class ChildFailure:
    """Why the whole cannot go on: which child, the exit status it ended with (-n: signal n), and a text for people."""

    name: str
    code: int
    text: str


@dataclass
class ChildState:
    """A child and what is remembered of it between its lives."""

    child: ChildSpec
    handle: ProcessHandle | None = None
    due: float = 0.0  # when to start it
    starts: int = 0
    streak: int = 0  # ends in a row without a healthy life
    doublings: int = 0  # of the pause before its next start
    ends: int = 0  # all of them
    first: tuple[int, str, str] | None = None  # the first end of the streak: code, how, what it wrote
    kill_at: float | None = None  # asked to leave for good, to be killed at that time
    done: bool = False


class Supervisor:
    """Keeps children alive; a Worker for `drive`. `failure` is None while all goes well. End with `terminate`.

    `log` is told, a line at a time, what happens; `on_restart` gets the name of a child that was started again.
    `leavings` is a folder that goes with this process, even if it is killed. `begin` starts a child's life; the others
    are processes of this host. `on_death` gets name, process and manner of a child that should not have ended.
    """

    def __init__(self, children: Iterable[ChildSpec], log: Callable[[str], object], patience: RestartPolicy,
                 on_restart: Callable[[str], object], cleanup_dir: Path | None = None,
                 begin: Callable[[ChildSpec, int, float], ProcessHandle] = LocalProcess,
                 on_death: Callable[[str, int, str], object] = lambda name, pid, how: None) -> None:
        self.policy = patience
        self.failure: ChildFailure | None = None
        self.total_restarts = 0
        self._log, self._on_restart, self._begin, self._on_death = log, on_restart, begin, on_death
        self._states: dict[str, ChildState] = {}
        self._reaper = OrphanReaper(int(ORPHAN_GRACE_S), cleanup_dir)
        self._clock, self._turned = 0.0, time.monotonic() - TURN_S
        self._closed = False
        for child in children:
            self.add(child)

    def add(self, child: ChildSpec) -> None:
        """Start another child with the next step."""
        if child.name in self._states:
            raise ValueError(f"there is a child {child.name!r} already")
        self._states[child.name] = ChildState(child)

    def remove(self, name: str, grace_s: float = 5.0) -> None:
        """Ask a child to leave; it is forgotten when it has, killed if it has not after `grace_s`. Does not wait."""
        ward = self._states[name]
        if ward.handle is None:
            del self._states[name]
        elif ward.kill_at is None:
            ward.kill_at = self._clock + grace_s
            ward.handle.request_stop()

    def request_stop(self, name: str) -> bool:
        """Ask a child to end in order, once; whether there was one to ask."""
        life = self._states[name].handle
        if life is not None:
            life.request_stop()
        return life is not None

    @property
    def names(self) -> list[str]:
        return list(self._states)

    @property
    def finished(self) -> bool:
        """Whether all children have ended well."""
        return all(ward.done for ward in self._states.values())

    def done(self, name: str) -> bool:
        """Whether a child has ended well."""
        return self._states[name].done

    def pid(self, name: str) -> int | None:
        """The process that a child has at present, if it has one."""
        life = self._states[name].handle
        return None if life is None else life.pid

    def restarts(self, name: str) -> int:
        """How often a child was started again."""
        return max(0, self._states[name].starts - 1)

    def step(self) -> bool:
        now = time.monotonic()
        if self._closed or now - self._turned < TURN_S:
            return False
        self._clock += min(now - self._turned, max(TURN_S, self.policy.heartbeat_timeout_s / 4))
        self._turned = now
        return any([self._attend(ward) for ward in list(self._states.values())])

    def terminate(self, grace_s: float) -> dict[str, int]:
        """Ask all children to leave, kill them and all they started after `grace_s`; the exit status of each."""
        self._closed = True
        running = {ward.child.name: ward for ward in self._states.values() if ward.handle is not None}
        lives = [ward.handle for ward in running.values() if ward.handle is not None]
        try:
            for life in lives:
                life.request_stop()
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and not all([life.exited for life in lives]):
                time.sleep(0.01)
        finally:  # also when a second Ctrl-C ends the waiting
            for life in lives:
                life.kill()
            codes = {name: self._reap(ward) for name, ward in running.items()}
            self._reaper.stop()
        return codes

    def _attend(self, ward: ChildState) -> bool:
        """Do what is due for one child; whether there was anything."""
        life = ward.handle
        if life is None:
            if ward.done or self.failure is not None or self._clock < ward.due:
                return False
            self._start(ward)
            return True
        life.poll_heartbeat(self._clock)
        # Who may die a few times in all needs no proof of health to be started again soon.
        healthy_s = self.policy.healthy_s if ward.child.max_restarts is None else 0.0
        if life.beats and self._clock - life.first_beat >= healthy_s:
            ward.streak, ward.first = 0, None
        if life.exited:
            self._ended(ward, self._reap(ward), life)
            return True
        self._kill_if_overdue(ward, life)
        return False

    def _start(self, ward: ChildState) -> None:
        ward.starts += 1
        try:
            ward.handle = self._begin(ward.child, ward.starts, self._clock)
        except OSError as error:  # no such program, no memory for another process, no space for its log
            self._lost(ward, EXIT_NOT_STARTED, "could not be started", str(error))
            return
        finally:
            if ward.starts > 1:
                self.total_restarts += 1
                self._on_restart(ward.child.name)
        self._inform()

    def _kill_if_overdue(self, ward: ChildState, life: ProcessHandle) -> None:
        """Kill a child that is silent, or still here, for too long; its end is noticed in a later turn."""
        if life.kill_reason is not None:
            return
        if ward.kill_at is not None and self._clock >= ward.kill_at:
            life.kill_reason = "did not leave when asked to and was killed"
        silent_s = self._clock - life.last_beat
        between_s = ward.child.silence_s or self.policy.heartbeat_timeout_s
        limit_s = between_s if life.beats else self.policy.first_beat_s
        if silent_s > limit_s:
            life.kill_reason = f"gave no sign of life for {limit_s:g} s and was killed"
        if life.kill_reason is not None:
            life.kill()

    def _reap(self, ward: ChildState) -> int:
        """Take leave of a life that ended, and of all that it started: the group first, while the number is its own."""
        life, ward.handle = ward.handle, None
        assert life is not None
        life.kill()
        self._inform()
        return life.reap()

    def _inform(self) -> None:
        self._reaper.watch(ward.handle.pid for ward in self._states.values() if isinstance(ward.handle, LocalProcess))

    def _ended(self, ward: ChildState, code: int, life: ProcessHandle) -> None:
        name = ward.child.name
        if ward.kill_at is not None:
            del self._states[name]
        elif code == EXIT_OK:
            ward.done = True
        elif code in (EXIT_USER_ERROR, EXIT_UNRECOVERABLE):
            words = final_message(life.log_tail())
            self._fail(name, code, f"{name} cannot go on:\n{words}\nIts log: {ward.child.log_path}")
        else:
            written = life.log_tail()
            ours = life.kill_reason if code == -signal.SIGKILL else None
            how = ours or describe_exit(code, ward.child.memory_hint)
            if life.last_beat - life.first_beat >= self.policy.reset_backoff_s:
                ward.doublings = -1  # its time of work is not lost to the pauses of failures that came before
            self._on_death(name, life.pid, how)
            self._lost(ward, code, how, first_traceback(written) or last_lines(written))

    def _lost(self, ward: ChildState, code: int, how: str, words: str) -> None:
        """A child ended that should not have: plan another start, or give up."""
        name, path, own = ward.child.name, ward.child.log_path, ward.child.max_restarts
        ward.doublings = 0 if ward.streak == 0 else ward.doublings + 1
        ward.streak += 1
        ward.ends += 1
        ward.first = ward.first or (code, how, words)
        spent, most, row = (ward.streak, self.policy.max_restarts, " in a row") if own is None else (
            ward.ends, own, "")
        if spent > most:
            code, how, words = ward.first
            again = f", and {most} restart{'s' * (most != 1)} did not help; the first time" if most else ";"
            said = f" it wrote:\n{words}" if words else " it wrote nothing."
            self._fail(name, code, f"{name} {how}{again}{said}\nIts log: {path}")
            return
        pause_s = min(self.policy.pause_s * 2.0 ** ward.doublings, self.policy.longest_pause_s)
        ward.due = self._clock + pause_s
        self._log(f"{name} {how}; restart {spent} of at most {most}{row} in {pause_s:g} s; its log: {path}")

    def _fail(self, name: str, code: int, text: str) -> None:
        self.failure = self.failure or ChildFailure(name, code, text)  # what failed first is the cause


def describe_exit(code: int, memory_hint: str = "") -> str:
    """An exit status in words; who is killed from outside was perhaps too large."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hints = {"SIGKILL": f"perhaps out of memory, lower {memory_hint}" if memory_hint else "perhaps out of memory",
             "SIGSEGV": "a fault in native code"}
    return f"was killed by {name}" + (f": {hints[name]}" if name in hints else "")


def last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-LAST_LINES:])


def final_message(text: str) -> str:
    """The message that a process ended with on purpose, without what it had logged before."""
    lines = last_lines(text).splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(VERDICTS)]
    return "\n".join(lines[starts[-1]:] if starts else lines)


def first_traceback(text: str) -> str | None:
    """The first traceback in a log, with what announces it and the exceptions that are chained to it."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if HEADER in line), None)
    if start is None:
        return None
    end = _after_block(lines, start)
    while end + 2 < len(lines) and lines[end + 1].startswith(LINKS):
        header = next((i for i in range(end + 2, min(end + 5, len(lines))) if HEADER in lines[i]), None)
        if header is None:
            break
        end = _after_block(lines, header)
    announced = start > 0 and lines[start - 1].endswith(":")
    return "\n".join(lines[start - announced:end])


def _after_block(lines: Sequence[str], header: int) -> int:
    """The line after a traceback: after its frames, which are indented, and its message, up to an empty line."""
    end = header + 1
    while end < len(lines) and lines[end].strip() and lines[end][0].isspace():
        end += 1
    limit = min(len(lines), end + MESSAGE_LINES)
    while end < limit and lines[end].strip() and HEADER not in lines[end]:
        end += 1
    return end
