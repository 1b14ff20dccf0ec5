"""Main function of a learner that is a rank: it trains, and averages gradients with the others of its group."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from qfleet.launch.actor_node import heartbeat_thread
from qfleet.launch.allreduce_run import RankContext, train_rank
from qfleet.launch.attempt import FINAL_ERRORS, describe_final_error
from qfleet.launch.learner_node import GrpcServing, RunRequest, Serving, exclusive_writer
from qfleet.process.heartbeat import Heartbeat, HeartbeatSender
from qfleet.process.restart_group import EXIT_PEER_LOST
from qfleet.process.supervisor import EXIT_OK, EXIT_UNRECOVERABLE
from qfleet.sync.process_group import RankInfo, RankLost

log = logging.getLogger(__name__)


def run_rank(private: Path, place: str, attempt: int) -> int:
    """Main function of a rank on this host; `place` is INDEX/SIZE. The ranks of an attempt meet at a file."""
    index, size = map(int, place.split("/"))
    rank_info = RankInfo(index, size, index, size, attempt, private / f"ranks-{attempt}")
    serving = GrpcServing(private, index or None, index)
    return serve_rank(RunRequest.read(private), rank_info, HeartbeatSender.from_env(), serving, log.error)


def serve_rank(run_request: RunRequest, rank_info: RankInfo, heartbeat: Heartbeat | None, serving: Serving,
               report_error: Callable[[str], object]) -> int:
    """Train as a rank until the run ends; returns the exit code.

    Rank 0 owns directory, metrics and checkpoints, and serves the evaluator. Every rank serves its own actors, if they
    are other processes.
    """
    first = rank_info.rank == 0
    stop_heartbeat = heartbeat_thread(heartbeat, math.inf)  # ranks detect each other's hangs
    try:
        with exclusive_writer(Path(run_request.directory)) if first else nullcontext():
            train_rank(run_request, RankContext(rank_info, heartbeat, serving=serving))
    except FINAL_ERRORS as error:
        report_error(describe_final_error(error))
        return EXIT_UNRECOVERABLE
    except RankLost as error:
        report_error(str(error))
        return EXIT_PEER_LOST
    finally:
        stop_heartbeat.set()
    return EXIT_OK
