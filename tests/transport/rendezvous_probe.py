"""Ranks in tasks of a Ray that asks for a token, for test_meeting; prints what they found, as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 64, "RAY_USAGE_STATS_ENABLED": "0"}

import ray
import torch
from real_runs import open_stores

from qfleet.sync.process_group import RankInfo, RankLost, RendezvousStore, process_group
from qfleet.transport.ray_rendezvous import RayRendezvous, start_rendezvous


def rank(place: RankInfo) -> list[list[float]]:
    with process_group(place, torch.device("cpu"), 60.0) as peers:
        vector = torch.full((3,), float(peers.rank + 1))
        peers.start_allreduce(vector)()
        return [*peers.all_gather([float(peers.rank)]), vector.tolist()]


def alone(place: RankInfo) -> str:
    try:
        with process_group(place, torch.device("cpu"), 1.0):
            return "met"
    except RankLost as error:
        return str(error)


def store(meeting: RayRendezvous) -> dict[str, object]:
    """What torch's own stores would answer."""
    found = RendezvousStore(meeting, 5.0)
    found.set("a", b"\x00\xff")
    found.set("b", "text")
    found.wait(["a", "b"])
    return {"a": list(found.get("a")), "b": found.get("b").decode(), "check": [found.check(["a"]), found.check(["c"])]}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="qfm-", dir="/tmp") as folder:
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder,
                 log_to_driver=False, configure_logging=False)
        meeting = start_rendezvous()
        task = ray.remote(num_cpus=0)
        result = {"store": ray.get(task(store).remote(meeting))}
        for attempt in (1, 2):  # one store serves all attempts
            places = [RankInfo(number, 2, 0, 2, attempt, meeting) for number in range(2)]
            result[f"attempt{attempt}"] = ray.get([task(rank).remote(place) for place in places], timeout=100)
        result["alone"] = ray.get(task(alone).remote(RankInfo(0, 2, 0, 2, 3, meeting)))
        result["open"] = open_stores(os.getpid())
        ray.shutdown()
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
