"""Main function of a learner that is a rank: it trains, and averages gradients with the others of its group."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from qfleet.launch.allreduce_run import RankContext, train_rank
from qfleet.launch.learner_main import exclusive_writer, exit_code
from qfleet.launch.run_request import RunRequest
from qfleet.launch.serving import GrpcServing, RunServing
from qfleet.process.heartbeat import Heartbeat, HeartbeatSender, heartbeat_thread
from qfleet.process.supervisor import EXIT_OK
from qfleet.sync.process_group import RankInfo

log = logging.getLogger(__name__)


def run_rank(private: Path, place: str, attempt: int) -> int:
    """Main function of a rank on this host; `place` is INDEX/SIZE. The ranks of an attempt meet at a file."""
    index, size = map(int, place.split("/"))
    rank_info = RankInfo(index, size, index, size, attempt, private / f"ranks-{attempt}")
    serving = GrpcServing(private, index or None, index)
    return serve_rank(RunRequest.read(private), rank_info, HeartbeatSender.from_env(), serving, log.error)


def serve_rank(run_request: RunRequest, rank_info: RankInfo, heartbeat: Heartbeat | None, serving: RunServing,
               report_error: Callable[[str], object]) -> int:
    """Train as a rank until the run ends; returns the exit code.

    Rank 0 owns directory, metrics and checkpoints, and serves the evaluator. Every rank serves its own actors, if they
    are other processes.
    """
    def work() -> int:
        with nullcontext() if rank_info.rank else exclusive_writer(run_request.run.path):
            train_rank(run_request, RankContext(rank_info, heartbeat, serving=serving))
        return EXIT_OK

    stop_heartbeat = heartbeat_thread(heartbeat, math.inf)  # ranks detect each other's hangs
    try:
        return exit_code(work, report_error)
    finally:
        stop_heartbeat.set()
