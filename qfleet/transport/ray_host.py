"""Ray actor that hosts one role: a job in its own thread, and RPCs that are answered in parallel.

    Ray's threads:  begin, look, leave, call      none of them blocks, and each may arrive twice: Ray may report a
    job thread:     the role's main function      call as failed that was executed

The supervisor therefore repeats a call whenever its outcome is unknown. A process without a job replaced one that
died.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from qfleet.core.errors import BadOutput, UserError
from qfleet.process.supervisor import EXIT_OK, EXIT_UNRECOVERABLE, EXIT_USER_ERROR


@dataclass(frozen=True)
class HostStatus:
    """Status of a host: identity, job number (0: none yet), heartbeats so far, last message, and the job's exit code.

    Another `process_token` is another process, whatever its job number.
    """

    process_token: str
    pid: int
    number: int
    beats: int
    message: str
    code: int | None


class HostHeartbeat:
    """`Heartbeat` of a job in a Ray actor."""

    def __init__(self) -> None:
        self.beats = 0
        self._stop_requested = False
        self._on_stop: Callable[[], object] | None = None

    def beat(self) -> None:
        self.beats += 1

    def on_orphan(self, callback: Callable[[], object]) -> None:
        self._on_stop = callback
        if self._stop_requested:
            callback()

    def leave(self) -> None:
        self._stop_requested = True
        if self._on_stop is not None:
            self._on_stop()


class CallHandler(Protocol):
    """Answers RPCs in this process: returns bytes, or the name of a gRPC status and a text."""

    def answer(self, method: str, data: bytes) -> Any: ...


class RayHost:
    """The Ray actor. `message` is reported by `look`.

    `number` counts the starts of the role: 3 for a role that was started for the third time.
    """

    def __init__(self, log_path: str, paths: Sequence[str]) -> None:
        self.heartbeat = HostHeartbeat()
        self.message = ""
        self._call_handler: CallHandler | None = None
        self._process_token, self.number = secrets.token_hex(8), 0
        self._code: int | None = None
        self._start_lock = threading.Lock()
        sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
        _redirect_output(log_path)

    @contextmanager
    def answering(self, handler: CallHandler) -> Iterator[None]:
        """While inside, `handler` answers calls."""
        self._call_handler = handler
        try:
            yield
        finally:
            self._call_handler = None

    def report(self, message: str) -> None:
        """Set the message that `look` returns."""
        self.message = message

    def begin(self, number: int, job: Callable[..., int], *args: Any) -> None:
        """Start a job, unless it has been started: repeated calls arrive while the first one still imports the job."""
        with self._start_lock:
            if self.number == number:
                return
            self.number = number
        threading.Thread(target=self._run, args=(job, args), name="job", daemon=True).start()

    def look(self) -> HostStatus:
        return HostStatus(self._process_token, os.getpid(), self.number, self.heartbeat.beats, self.message, self._code)

    def leave(self) -> None:
        """Ask the job to stop in order."""
        self.heartbeat.leave()

    def call(self, method: str, data: bytes) -> Any:
        if self._call_handler is None:
            return "UNAVAILABLE", "the learner is not ready"
        return self._call_handler.answer(method, data)

    def _run(self, job: Callable[..., int], args: Sequence[Any]) -> None:
        code: int | None = EXIT_OK
        try:
            code = job(self, *args)
        except UserError as error:
            code, self.message = EXIT_USER_ERROR, f"error: {error}"
        except BadOutput as error:
            code, self.message = EXIT_UNRECOVERABLE, f"environment failed: {error}"
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
            self.message = "".join(traceback.format_exception(error))
        finally:
            if code != EXIT_OK:
                print(self.message, file=sys.stderr, flush=True)
            self._code = code


def _redirect_output(log_path: str) -> None:
    """Append stdout and stderr to the run's log if this node shares its disk; otherwise Ray keeps them."""
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
