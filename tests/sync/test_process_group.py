"""Ranks in processes of their own: sums, texts, the bytes that are really sent, and what a lost rank looks like."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from qfleet.optim.flat_params import Flat
from qfleet.optim.optimizer import OptimizerConfig
from qfleet.sync.gradient_sync import Solo
from qfleet.sync.process_group import RankInfo, SingleProcessGroup, first_host, process_group

pytestmark = [pytest.mark.slow]
PROBE = Path(__file__).with_name("rank_probe.py")


def started(what, size, folder, timeout_s):
    """Ranks without torchrun around them, which would end the others itself."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
                           "OMP_NUM_THREADS": "1", "QFLEET_PROBE": str(folder)}
    return [subprocess.Popen([sys.executable, str(PROBE), what, str(timeout_s)],
                             env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]


def ended(processes, folder):
    try:
        for process in processes:
            process.wait(100)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(processes))]


def test_rows_texts_and_tensors_reach_everybody(tmp_path):
    for result in ended(started("talk", 3, tmp_path, 60), tmp_path):
        assert result["said"] == ["", "rank 1", "rank 2rank 2"]
        assert result["spread"] == [0.0] * 5 and result["table"] == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]


def bytes_per_update(parameters, ranks, sharded, words):
    """Bytes that a rank sends for one update with its own vote.

    These are the gradient twice round a ring, without its own part; a row of `words` numbers to every rank; and, with a
    sharded optimizer, its slice of the new weights to every rank.
    """
    ring_bytes = 4.0 * parameters * (ranks - 1) / ranks
    return (3 if sharded else 2) * ring_bytes + 8.0 * words * (ranks - 1)


@pytest.mark.parametrize("size,what", [(2, "plain"), (3, "plain"), (2, "sharded"), (3, "sharded")])
def test_ranks_move_as_one_and_send_what_the_formula_says(tmp_path, size, what):
    results = ended(started(what, size, tmp_path, 60), tmp_path)
    assert all(result["master"] == results[0]["master"] for result in results), "bit by bit"
    expected = averaged(size)
    assert torch.allclose(torch.tensor(results[0]["master"]), expected, atol=1e-5)
    for result in results:
        formula = bytes_per_update(result["parameters"], size, what == "sharded", words=4)
        padding = 4 * 64 * size if what == "sharded" else 0  # slices end at multiples of 64 numbers
        assert formula <= result["sent"] * (1 + 1e-9) <= formula + padding + 1
        # What the kernel saw: the same, and a header for each of a few messages.
        assert result["sent"] <= result["written"] < 1.02 * result["sent"] + 2500 * size


def averaged(size):
    """The same updates by one learner that is given the mean."""
    torch.manual_seed(1)
    flat = Flat(nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 7)))
    solo = Solo(OptimizerConfig(learning_rate=0.01))
    solo.attach(flat)
    for step in range(23):
        parts = []
        for rank in range(size):
            rng = torch.Generator().manual_seed(100 * step + rank)
            parts.append([torch.randn(p.shape, generator=rng) for p in flat.parameters])
        solo.apply([sum(each) / size for each in zip(*parts, strict=True)])
    return flat.master


def test_a_killed_rank_is_noticed_at_once(tmp_path):
    processes = started("kill", 2, tmp_path, 60)
    assert processes[1].wait(60) == -signal.SIGKILL
    processes[0].wait(30)  # far less than the timeout
    result = json.loads((tmp_path / "0.json").read_text())
    assert "another rank exited" in result["lost"]


def test_a_frozen_rank_is_noticed_within_the_timeout(tmp_path):
    processes = started("freeze", 2, tmp_path, 5)
    try:
        processes[0].wait(60)
        result = json.loads((tmp_path / "0.json").read_text())
        assert "allreduce.timeout_s" in result["lost"] and result["after_s"] >= 4
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("hosts", "first"), [
    ("vm", "vm"), ("a1,b2", "a1"), ("n[3,5]", "n3"), ("gpu[007-012,15],x", "gpu007"), ("r[1-2]-ib", "r1-ib")])
def test_the_first_host_of_a_list_as_slurm_writes_it(hosts, first):
    assert first_host(hosts) == first


def test_without_torchrun_there_is_nobody_else():
    assert RankInfo.from_environment({}) is None and RankInfo.from_environment({"RANK": "1"}) is None
    given = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    assert RankInfo.from_environment(given) == RankInfo(1, 4, 0, 4)
    assert RankInfo.from_environment(given | {"LOCAL_WORLD_SIZE": "2"}) == RankInfo(1, 4, 0, 2)
    step = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "7",
            "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08],cpu1", "SLURM_STEP_TASKS_PER_NODE": "2(x2),3"}
    assert RankInfo.from_environment(step) == RankInfo(5, 7, 1, 3, 0, "tcp://gpu07:22342")
    assert RankInfo.from_environment(step | given) == RankInfo(1, 4, 0, 4), (
        "torchrun's ranks are its own, also under srun"
    )
    assert RankInfo.from_environment({**step, "SLURM_NTASKS": "1"}) is None, "one task is no crew"
    assert (
        RankInfo.from_environment({name: value for name, value in step.items() if name != "SLURM_STEP_ID"}) is None
    ), "a batch shell"
    with process_group(None, torch.device("cpu"), 1.0) as peers:
        assert (
            isinstance(peers, SingleProcessGroup)
            and peers.exchange(b"x") == [b"x"]
            and peers.all_gather([1.0]) == [[1.0]]
        )


