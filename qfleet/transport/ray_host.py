"""What lives in the process of a Ray actor: a job in a thread of its own, and calls that are answered beside it.

    Ray's threads:  begin, look, leave, call      none of them waits, and each may come twice: Ray may say that a call
    the job's:      whatever it was asked for     failed that was made

So who watches asks again whenever it is in doubt. A process that has no job has lost it together with its predecessor.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qfleet.core.errors import BadOutput, UserError
from qfleet.process.supervisor import EXIT_OK, EXIT_UNRECOVERABLE, EXIT_USER_ERROR


@dataclass(frozen=True)
class HostStatus:
    """How a host is: who it is, the number of its job (0: none yet), signs of life so far, what it said last, and how
    the job ended. Another `self` is another process, whatever its number."""

    process_token: str
    pid: int
    number: int
    beats: int
    message: str
    code: int | None


class HostHeartbeat:
    """The `Tie` of a job."""

    def __init__(self) -> None:
        self.beats = 0
        self._asked = False
        self._leave: Callable[[], object] | None = None

    def beat(self) -> None:
        self.beats += 1

    def on_orphan(self, callback: Callable[[], object]) -> None:
        self._leave = callback
        if self._asked:
            callback()

    def leave(self) -> None:
        self._asked = True
        if self._leave is not None:
            self._leave()


class CallHandler(Protocol):
    """Whoever answers the calls of others in this process: bytes, or the name of a gRPC status and a text."""

    def answer(self, method: str, data: bytes) -> Any: ...


class RayHost:
    """The Ray actor. `reception` answers calls while there is one; `word` is kept for whoever looks.

    `number` is the job's: of a role that was started for the third time, 3.
    """

    def __init__(self, log_path: str, paths: Sequence[str]) -> None:
        self.heartbeat = HostHeartbeat()
        self.message = ""
        self.call_handler: CallHandler | None = None
        self._self, self.number = secrets.token_hex(8), 0
        self._code: int | None = None
        self._starting = threading.Lock()
        sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
        _write_to(log_path)

    def begin(self, number: int, job: Callable[..., int], *args: Any) -> None:
        """Start a job, unless it is under way: while its first call still imports the job, more of them come."""
        with self._starting:
            if self.number == number:
                return
            self.number = number
        threading.Thread(target=self._run, args=(job, args), name="job", daemon=True).start()

    def look(self) -> HostStatus:
        return HostStatus(self._self, os.getpid(), self.number, self.heartbeat.beats, self.message, self._code)

    def leave(self) -> None:
        """Ask the job to end in order."""
        self.heartbeat.leave()

    def call(self, method: str, data: bytes) -> Any:
        if self.call_handler is None:
            return "UNAVAILABLE", "the learner is not ready"
        return self.call_handler.answer(method, data)

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


def _write_to(log_path: str) -> None:
    """What this process prints belongs to the run's logs, if this node shares its disk; else Ray keeps it."""
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
