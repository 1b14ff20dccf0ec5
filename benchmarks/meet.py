"""What a learner's push and pull to its shard takes: a gradient pushed, the step, the weights pulled, shared or sent.

    OMP_NUM_THREADS=1 python benchmarks/meet.py [--parameters 3293863] [--meetings 40] [--rounds 5] [--out FILE]

A shard in a process of its own, as a run has it, and one learner that does nothing else; 3,293,863 parameters are those
of Nature's dueling network. Shared: both see the numbers (`transport/shared_memory.py`). Sent: they travel through a
unix socket, as to a shard that cannot share them. Rounds alternate; milliseconds of one meeting, medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from speed import describe_machine

from qfleet.optim.optimizer import OptimizerConfig
from qfleet.process.memory import retain_freed_memory
from qfleet.sync.ps_shard import ParameterServerConfig, Push, Shard
from qfleet.transport.address import socket_address
from qfleet.transport.shard_client import GrpcShardChannel, RemoteShard
from qfleet.transport.shard_service import ShardServer, ShardService

TOKEN = "benchmark"
MOST_BYTES = 1 << 30


def serve(socket: str, parameters: int) -> None:
    """Be a shard until killed."""
    retain_freed_memory()
    torch.set_num_threads(1)

    def build(state: Mapping[str, Any]) -> Shard:
        shard = fresh(parameters)
        shard.load_state_dict(state)
        return shard

    with ShardServer(ShardService(build, lambda state: None), Path(socket), TOKEN, MOST_BYTES):
        threading.Event().wait()


def fresh(parameters: int) -> Shard:
    return Shard("shard 0", torch.zeros(parameters), OptimizerConfig(), ParameterServerConfig())


def measure(shelf: RemoteShard, gradient: torch.Tensor, meetings: int, sequence: int) -> float:
    """Milliseconds of one meeting."""
    _, shown = shelf.push_pull("learner", None, True)()
    assert shown is not None
    begin = time.perf_counter()
    for number in range(1, meetings + 1):
        push = Push("learner", sequence + number, shown.epoch, shown.version, 1.0, gradient)
        answer, shown = shelf.push_pull("learner", push, True)()
        assert answer is not None and shown is not None and answer.verdict == "applied"
    return 1000 * (time.perf_counter() - begin) / meetings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=3_293_863)
    parser.add_argument("--meetings", type=int, default=40, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/meet.json"))
    parser.add_argument("--serve", metavar="SOCKET", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.parameters)
    retain_freed_memory()
    torch.set_num_threads(1)
    gradient, found = torch.randn(args.parameters) / 1000, {"shared": [], "sent": []}
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "shard.sock"
        words = [sys.executable, __file__, "--serve", str(socket), "--parameters", str(args.parameters)]
        with subprocess.Popen(words) as shard:
            shard_clients = {
                way: RemoteShard(GrpcShardChannel(socket_address(socket), TOKEN), 30.0, share=way == "shared")
                for way in found
            }
            shard_clients["sent"].load(fresh(args.parameters).state_dict())
            for number in range(args.rounds + 1):
                for place, (way, shelf) in enumerate(shard_clients.items()):
                    spent = measure(shelf, gradient, args.meetings, (2 * number + place) * args.meetings)
                    if number:  # the first is for getting warm
                        found[way].append(round(spent, 2))
            for way, shelf in shard_clients.items():
                assert (shelf._buffer is not None) == (way == "shared")
                shelf.close()
            shard.kill()
    medians = {way: statistics.median(rounds) for way, rounds in found.items()}
    document = {"ms": medians, "rounds": found, "ratio": medians["sent"] / medians["shared"],
                "parameters": args.parameters, "machine": describe_machine()}
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: document[key] for key in ("ms", "rounds", "ratio")}, indent=1))


if __name__ == "__main__":
    main()
