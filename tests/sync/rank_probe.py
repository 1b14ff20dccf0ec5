"""What a rank does in the tests of runtime/ranks; run by torchrun. Results go to the folder in QFLEET_PROBE."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from qfleet.optim.flat_params import Flat
from qfleet.optim.optimizer import OptimizerConfig
from qfleet.sync.allreduce import AllReduce, RankLink
from qfleet.sync.process_group import RankInfo, RankLost, process_group

WARM, COUNTED = 3, 20


def flat():
    torch.manual_seed(1)
    return Flat(nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 7)))


def gradients(net, step, rank):
    rng = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=rng) for p in net.parameters]


def written():
    """Bytes that this process has written so far: to sockets, for nothing else is open."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def averaging(peers, sharded):
    net = flat()
    rule = AllReduce(OptimizerConfig(learning_rate=0.01), RankLink(peers, lambda: [1.0, 2.0]), sharded)
    rule.attach(net)
    counted = sent = 0.0
    for step in range(WARM + COUNTED):
        if step == WARM:
            counted, sent = written(), peers.sent_bytes
        rule.agree(1.0)
        rule.apply(gradients(net, step, peers.rank))
    return {"written": (written() - counted) / COUNTED, "sent": (peers.sent_bytes - sent) / COUNTED,
            "parameters": len(net.master), "master": net.master.tolist()}


def main():
    torch.set_num_threads(1)
    what, timeout_s = sys.argv[1], float(sys.argv[2])
    place = RankInfo.from_environment()
    result = {}
    started = time.monotonic()
    try:
        with process_group(place, torch.device("cpu"), timeout_s) as peers:
            started = time.monotonic()
            if what in ("plain", "sharded"):
                result = averaging(peers, what == "sharded")
            elif what == "talk":
                said = peers.exchange(f"rank {peers.rank}".encode() * peers.rank)
                vector = torch.full((5,), float(peers.rank))
                peers.broadcast(vector)
                result = {"said": [text.decode() for text in said], "spread": vector.tolist(),
                          "table": peers.all_gather([peers.rank, 0.5])}
            elif peers.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            else:
                peers.all_gather([1.0])
    except RankLost as error:
        result = {"lost": str(error), "after_s": time.monotonic() - started}
    Path(os.environ["QFLEET_PROBE"], f"{place.rank}.json").write_text(json.dumps(result))


main()
