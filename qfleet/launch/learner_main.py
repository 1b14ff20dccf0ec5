"""What the main functions of learners and coordinator share: lock, loop around an `Attempt`, and exit code."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from qfleet.core.env import EnvSpec
from qfleet.core.errors import CallbackError
from qfleet.launch.actor_service import ActorService
from qfleet.launch.attempt import (
    FINAL_ERRORS,
    Attempt,
    TrainingRun,
    advise_on_oom,
    describe_final_error,
    initial_weights,
)
from qfleet.launch.run_request import RunRequest
from qfleet.launch.serving import RunServing
from qfleet.process.heartbeat import ORPHAN_GRACE_S, Heartbeat, heartbeat_thread
from qfleet.process.restart_group import EXIT_PEER_LOST
from qfleet.process.supervisor import EXIT_CALLBACK_FAILED, EXIT_OK, EXIT_UNRECOVERABLE
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoints
from qfleet.sync.process_group import RankLost
from qfleet.training.learner_core import Hooks

BuildRun = Callable[[RunConfig, RunRequest, ActorService, Hooks], TrainingRun]
"""Creates the roles of a run whose members are served by an `ActorService`."""


def exit_code(work: Callable[[], int], report_error: Callable[[str], object]) -> int:
    """Exit code of a learner that does `work`, also if that fails for good or loses another rank."""
    try:
        return work()
    except FINAL_ERRORS as error:
        report_error(describe_final_error(error))
        return EXIT_CALLBACK_FAILED if isinstance(error, CallbackError) else EXIT_UNRECOVERABLE
    except RankLost as error:
        report_error(str(error))
        return EXIT_PEER_LOST


def serve_run(run_request: RunRequest, heartbeat: Heartbeat | None, serving: RunServing, build: BuildRun,
              takes_experience: bool = True) -> int:
    """Train until the run ends, with members in other processes, and report the result; returns the exit code.

    `takes_experience`: members send transitions, so the number of those that wait is limited.
    """
    directory, spec = run_request.run, EnvSpec.from_json(run_request.spec)
    with ExitStack() as stack:
        stack.enter_context(exclusive_writer(directory.path))
        config = run_request.config()
        service = ActorService(config, spec, takes_experience=takes_experience)
        published, stall_s = service.published, config.run.stall_timeout_s
        # Loading and saving a replay takes long, so a thread beats; it stops if the main loop hangs.
        stop_heartbeat = heartbeat_thread(
            heartbeat, math.inf, lambda: time.monotonic() - published.status.updated_at < stall_s)
        stack.enter_context(advise_on_oom(config))
        checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest()
        attempt = Attempt(config, spec, directory, (), lambda hooks: build(config, run_request, service, hooks),
                          checkpoint)
        source = initial_weights(config, spec) if checkpoint is None else None
        stack.enter_context(attempt.opened(run_request.origin, source))
        stack.enter_context(serving(published, service.registry, service.inbox, config))
        if heartbeat is not None:
            heartbeat.on_orphan(lambda: attempt.core.stop.request("preempted"))
        stack.callback(stop_heartbeat.set)
        result = attempt.execute()
        serving.report_result(result)
        service.end()
        return EXIT_OK


@contextmanager
def exclusive_writer(run: Path) -> Iterator[None]:
    """Wait until no other process writes to the run: the learner of a killed driver may be saving its last checkpoint.

    The system releases the lock when its holder dies; on file systems without folder locks there is no wait.
    """
    fd = os.open(run, os.O_RDONLY)
    try:
        deadline = time.monotonic() + ORPHAN_GRACE_S + 2
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(fd)
