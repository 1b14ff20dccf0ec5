"""Supervisor of child processes: starts them, restarts those that die or hang, and fails when restarts do not help.

    waiting ──▶ running ──▶ exit 0: done, not restarted
       ▲           │        exit 2 (user error), 70 (unrecoverable) or 71 (a callback failed): the supervisor fails
       └── pause ──┴─────── any other exit, or no heartbeat in time: restart after 0.5, 1, 2 ... 30 s, or after 0.5 s
                            again if it had worked for a while; after `max_restarts` in a row without a healthy
                            instance between them the supervisor fails

Children read `HeartbeatSender.from_env` and beat once they can do so regularly. Time advances only in `step`, by at
most a quarter of the heartbeat timeout per call: after a suspend of the machine, or of this process, no child is late.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qfleet.core.errors import CallbackError, ProcessFault, UserError
from qfleet.process.handle import ChildSpec, LocalProcess, ProcessHandle
from qfleet.process.heartbeat import ORPHAN_GRACE_S
from qfleet.process.reaper import OrphanReaper

TURN_S = 0.05
"""Period at which children are checked, however often `step` is called."""

LAST_LINES = 40
MESSAGE_LINES = 12
"""Most lines of an exception's message that are kept: nothing marks the last one."""

EXIT_OK, EXIT_USER_ERROR, EXIT_UNRECOVERABLE, EXIT_CALLBACK_FAILED, EXIT_NOT_STARTED = 0, 2, 70, 71, 127
FINAL_EXIT_CODES = (EXIT_USER_ERROR, EXIT_UNRECOVERABLE, EXIT_CALLBACK_FAILED)
"""Exit codes of a process that failed for a reason that a restart would not cure."""

VERDICTS = ("error: ", "errors:", "environment failed: ", "training failed: ")
"""First words of the message of a process that exits on purpose."""

HEADER = "Traceback (most recent call last)"
LINKS = ("During handling of the above exception", "The above exception was the direct cause")


@dataclass(frozen=True)
class RestartPolicy:
    """Heartbeat timeouts, limits and pauses of restarts."""

    heartbeat_timeout_s: float = 30.0
    first_beat_s: float = 120.0  # a start imports large libraries, perhaps from a cold network disk
    healthy_s: float = 30.0  # a child that beats for this long is healthy: its count of failures is reset
    max_restarts: int = 5
    reset_backoff_s: float = 10.0  # a child that beat for this long had worked: its restart pauses begin again
    pause_s: float = 0.5  # before the first restart; doubled for each further one
    longest_pause_s: float = 30.0


@dataclass(frozen=True)
class ChildFailure:
    """Failure of the whole run: the child, its exit status (-n: signal n), and a text for the user."""

    name: str
    code: int
    text: str

    def error(self) -> UserError | CallbackError | ProcessFault:
        """The failure as an exception."""
        if self.code == EXIT_USER_ERROR:
            return UserError(self.text)
        return CallbackError(self.text) if self.code == EXIT_CALLBACK_FAILED else ProcessFault(self.text)


class ChildState:
    """A child across its instances: the running one, its restarts, and when it is to be started or killed."""

    def __init__(self, child: ChildSpec) -> None:
        self.child = child
        self.handle: ProcessHandle | None = None
        self.starts = self.exits = 0
        self.streak = 0  # exits in a row without a healthy instance
        self.first: tuple[int, str, str] | None = None  # first exit of the streak: code, description, output
        self.kill_at: float | None = None  # removed: killed at this time if still running
        self.kill_reason: str | None = None  # why the running instance was killed
        self.done = False
        self._doublings = 0  # of the pause before its next start
        self._start_at = 0.0

    def is_due(self, now: float) -> bool:
        return not self.done and now >= self._start_at

    def start(self, start_child: Callable[[ChildSpec, int, float], ProcessHandle], now: float) -> None:
        self.starts += 1
        self.kill_reason = None
        self.handle = start_child(self.child, self.starts, now)

    def take_handle(self) -> ProcessHandle:
        """The instance, which is not running any more."""
        handle, self.handle = self.handle, None
        assert handle is not None
        return handle

    def kill(self, reason: str) -> None:
        """Kill the instance; a later turn notices its exit."""
        assert self.handle is not None
        self.kill_reason = reason
        self.handle.kill()

    def finish(self) -> None:
        """The child exited with code 0 and is not started again."""
        self.done = True

    def kill_after(self, time: float) -> None:
        self.kill_at = time

    def reset_streak(self) -> None:
        self.streak, self.first = 0, None

    def reset_backoff(self) -> None:
        """The instance had worked: earlier failures do not lengthen the next pause."""
        self._doublings = -1

    def add_exit(self, code: int, how: str, output: str) -> tuple[int, str, str]:
        """Count an exit that was not asked for. Returns the first one of the streak."""
        self._doublings = 0 if self.streak == 0 else self._doublings + 1
        self.streak += 1
        self.exits += 1
        self.first = self.first or (code, how, output)
        return self.first

    def schedule(self, now: float, policy: RestartPolicy) -> float:
        """Schedule the next start. Returns the pause before it in seconds."""
        pause_s = min(policy.pause_s * 2.0 ** self._doublings, policy.longest_pause_s)
        self._start_at = now + pause_s
        return pause_s


class Supervisor:
    """Keeps children running; a Worker for `drive`. `failure` is None unless the run failed. End with `terminate`.

    `log` receives a line for each event. `cleanup_dir` is a folder that is removed when this process is killed.
    `start_child` starts an instance, a process of this host by default. `on_death` gets name, pid and exit text of a
    child that exited unexpectedly.
    """

    def __init__(self, children: Iterable[ChildSpec], log: Callable[[str], object], policy: RestartPolicy,
                 cleanup_dir: Path | None = None,
                 start_child: Callable[[ChildSpec, int, float], ProcessHandle] = LocalProcess,
                 on_death: Callable[[str, int, str], object] = lambda name, pid, how: None) -> None:
        self.policy = policy
        self.failure: ChildFailure | None = None
        self._log, self._start_child, self._on_death = log, start_child, on_death
        self._states: dict[str, ChildState] = {}
        self._reaper = OrphanReaper(int(ORPHAN_GRACE_S), cleanup_dir)
        self._clock, self._turned = 0.0, time.monotonic() - TURN_S
        self._closed = False
        for child in children:
            self.add(child)

    def add(self, child: ChildSpec) -> None:
        """Add a child; the next step starts it."""
        if child.name in self._states:
            raise ValueError(f"a child {child.name!r} exists already")
        self._states[child.name] = ChildState(child)

    def remove(self, name: str, grace_s: float = 5.0) -> None:
        """Ask a child to exit, and forget it when it has; kill it after `grace_s`. Does not wait."""
        state = self._states[name]
        if state.handle is None:
            del self._states[name]
        elif state.kill_at is None:
            state.kill_after(self._clock + grace_s)
            state.handle.request_stop()

    def request_stop(self, name: str) -> bool:
        """Ask a child to stop in order, once. Returns False if it has no running instance."""
        handle = self._states[name].handle
        if handle is not None:
            handle.request_stop()
        return handle is not None

    @property
    def names(self) -> list[str]:
        return list(self._states)

    @property
    def finished(self) -> bool:
        """True if all children exited with code 0."""
        return all(state.done for state in self._states.values())

    def done(self, name: str) -> bool:
        """True if a child exited with code 0."""
        return self._states[name].done

    def pid(self, name: str) -> int | None:
        """Process id of the running instance of a child, or None."""
        handle = self._states[name].handle
        return None if handle is None else handle.pid

    def is_unreachable(self, name: str) -> bool:
        """True if the running instance of a child does not answer at present."""
        handle = self._states[name].handle
        return handle is not None and handle.is_unreachable

    def restarts(self, name: str) -> int:
        """Number of restarts of a child."""
        return max(0, self._states[name].starts - 1)

    def step(self) -> bool:
        now = time.monotonic()
        if self._closed or now - self._turned < TURN_S:
            return False
        self._clock += min(now - self._turned, max(TURN_S, self.policy.heartbeat_timeout_s / 4))
        self._turned = now
        return any([self._attend(state) for state in list(self._states.values())])

    def terminate(self, grace_s: float) -> dict[str, int]:
        """Ask all children to stop; kill them and everything they started after `grace_s`. Returns exit statuses."""
        self._closed = True
        running = {state.child.name: state for state in self._states.values() if state.handle is not None}
        handles = [state.handle for state in running.values() if state.handle is not None]
        try:
            for handle in handles:
                handle.request_stop()
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and not all([handle.exited for handle in handles]):
                time.sleep(0.01)
        finally:  # also when a second Ctrl-C ends the waiting
            for handle in handles:
                handle.kill()
            codes = {name: self._reap(state) for name, state in running.items()}
            self._reaper.stop()
        return codes

    def _attend(self, state: ChildState) -> bool:
        """Start, check or reap one child. Returns True if anything was done."""
        handle = state.handle
        if handle is None:
            if self.failure is not None or not state.is_due(self._clock):
                return False
            self._start(state)
            return True
        handle.poll_heartbeat(self._clock)
        # With a limit on all restarts, a child need not be healthy first to be restarted soon.
        healthy_s = self.policy.healthy_s if state.child.max_restarts is None else 0.0
        if handle.beats and self._clock - handle.first_beat >= healthy_s:
            state.reset_streak()
        if handle.exited:
            self._handle_exit(state, self._reap(state), handle)
            return True
        self._kill_if_overdue(state, handle)
        return False

    def _start(self, state: ChildState) -> None:
        try:
            state.start(self._start_child, self._clock)
        except OSError as error:  # no such program, no memory for a process, or no disk space for its log
            self._restart_or_fail(state, EXIT_NOT_STARTED, "could not be started", str(error),
                                  state.child.log_path)
            return
        self._update_reaper()

    def _kill_if_overdue(self, state: ChildState, handle: ProcessHandle) -> None:
        """Kill a child that sent no heartbeat, or has not exited, in time."""
        if (state.kill_reason or handle.kill_reason) is not None:
            return
        silent_s = self._clock - handle.last_beat
        between_s = state.child.silence_s or self.policy.heartbeat_timeout_s
        limit_s = between_s if handle.beats else self.policy.first_beat_s
        if silent_s > limit_s:
            state.kill(f"sent no heartbeat for {limit_s:g} s and was killed")
        elif state.kill_at is not None and self._clock >= state.kill_at:
            state.kill("did not exit when asked to and was killed")

    def _reap(self, state: ChildState) -> int:
        """Reap an exited instance. Its process group is killed first, while the process id cannot be reused."""
        handle = state.take_handle()
        handle.kill()
        self._update_reaper()
        return handle.reap()

    def _update_reaper(self) -> None:
        handles = [state.handle for state in self._states.values()]
        self._reaper.watch(group for handle in handles if handle is not None for group in handle.process_groups)

    def _handle_exit(self, state: ChildState, code: int, handle: ProcessHandle) -> None:
        name = state.child.name
        if state.kill_at is not None:
            del self._states[name]
        elif code == EXIT_OK:
            state.finish()
        elif code in FINAL_EXIT_CODES:
            words = final_message(handle.log_tail())
            self._fail(name, code, f"{name} cannot continue:\n{words}\nIts log: {handle.log_path}")
        else:
            written = handle.log_tail()
            ours = (handle.kill_reason or state.kill_reason) if code == -signal.SIGKILL else None
            how = ours or describe_exit(code, state.child.memory_hint)
            if handle.last_beat - handle.first_beat >= self.policy.reset_backoff_s:
                state.reset_backoff()
            self._on_death(name, handle.pid, how)
            self._restart_or_fail(state, code, how, first_traceback(written) or last_lines(written), handle.log_path)

    def _restart_or_fail(self, state: ChildState, code: int, how: str, words: str, path: Path) -> None:
        """Schedule a restart of a child that exited unexpectedly, or fail. `path` is the log of the failed process."""
        name, own = state.child.name, state.child.max_restarts
        first = state.add_exit(code, how, words)
        spent, most, row = (state.streak, self.policy.max_restarts, " in a row") if own is None else (
            state.exits, own, "")
        if spent > most:
            code, how, words = first
            again = f", and {most} restart{'s' * (most != 1)} did not help; the first time" if most else ";"
            said = f" it wrote:\n{words}" if words else " it wrote nothing."
            self._fail(name, code, f"{name} {how}{again}{said}\nIts log: {path}")
            return
        pause_s = state.schedule(self._clock, self.policy)
        self._log(f"{name} {how}; restart {spent} of at most {most}{row} in {pause_s:g} s; its log: {path}")

    def _fail(self, name: str, code: int, text: str) -> None:
        self.failure = self.failure or ChildFailure(name, code, text)  # the first failure is the cause


def describe_exit(code: int, memory_hint: str = "") -> str:
    """Exit status in words. A SIGKILL from outside may be the OOM killer, so `memory_hint` is added."""
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
    """Message of a process that exited on purpose, without its earlier log lines."""
    lines = last_lines(text).splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(VERDICTS)]
    return "\n".join(lines[starts[-1]:] if starts else lines)


def first_traceback(text: str) -> str | None:
    """First traceback in a log, with the line that announces it and the exceptions chained to it."""
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
    """Index of the line after a traceback: after its indented frames and its message, which ends at an empty line."""
    end = header + 1
    while end < len(lines) and lines[end].strip() and lines[end][0].isspace():
        end += 1
    limit = min(len(lines), end + MESSAGE_LINES)
    while end < limit and lines[end].strip() and HEADER not in lines[end]:
        end += 1
    return end
