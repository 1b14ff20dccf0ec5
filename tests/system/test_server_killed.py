"""One parameter server whose processes are killed and stopped, one after the other, and which goes on learning.

The tests share it, in this order: each leaves it alive for the next.
"""

import math
import signal
from pathlib import Path

import pytest
import torch
from fleet_runs import GENTLE, FleetRun, assert_goes_forward
from real_runs import TINY, newest, records

from qfleet.core.errors import ProcessFault, UserError
from qfleet.sync.ps_shard import Push
from qfleet.transport.address import socket_address
from qfleet.transport.shard_client import GrpcShardChannel, RemoteShard
from qfleet.transport.shard_pb2 import State

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SQUAD = [*TINY, "sync=server", "learners=2", "parameter_server.shards=2", "parameter_server.snapshot_period_updates=20",
         "device=cpu", GENTLE, "total_steps=1000000", "eval.period_steps=300", "checkpoint.period_steps=600",
         "run.log_period_steps=100", "replay.capacity=20000", "fleet.heartbeat_timeout_s=10",
         "fleet.actor_restarts=20", "run.name=x"]


@pytest.fixture(scope="module")
def squad(tmp_path_factory):
    words = [*SQUAD, "fleet.learner_restarts=3"]
    with FleetRun("train", "cartpole", *words, cwd=tmp_path_factory.mktemp("squad")) as run:
        run.until(lambda: len(((pulse := run.pulse()) and pulse.members) or ()) == 3, 120)
        run.learns()
        run.until(lambda: run.checkpoints, 120)
        yield run


def learns_on(squad, by=50, timeout=120):
    updates = squad.now().updates
    squad.until(lambda: (pulse := squad.pulse()) and pulse.updates > updates + by, timeout)


def reborn(squad, name, pid, timeout=120):
    return squad.until(lambda: (found := squad.member(name)) and found.pid != pid and found.silent_s < 2 and found,
                       timeout)


def shard_of(squad, index, token=None):
    private = next(squad.tmp.glob("qfleet-*"))
    token = token or (private / "token").read_text().strip()
    return RemoteShard(GrpcShardChannel(socket_address(private / f"shard-{index}.sock"), token), 20.0)


def figure(squad, tag):
    return next((record[tag] for record in reversed(squad.metrics()) if tag in record), 0)


def test_a_killed_learner_rejoins_with_its_replay_and_the_others_do_not_notice(squad):
    before = {each.name: (each.incarnation, each.pid) for each in squad.now().members}
    pid = squad.kill("learner/1")
    learns_on(squad)
    after = reborn(squad, "learner/1", pid)
    assert (after.index, after.incarnation) == (1, before["learner/1"][0] + 1)
    squad.until(lambda: (learner := squad.member("learner/1")) is not None and learner.steps > 50, 120)
    assert squad.pids()["learner/0"] == before["learner/0"][1]
    squad.until(lambda: figure(squad, "fleet/restarts") >= 1)
    before = squad.checkpoints[-1]
    squad.until(lambda: squad.checkpoints[-1] > before, 120)
    parts = [newest(squad.run).state(), *newest(squad.run).state()["ranks"]]
    assert len(parts) == 2 and all(part["replay"]["next"] > 0 for part in parts), "both are in the checkpoint"


def test_a_killed_shard_is_restored_and_what_was_derived_before_is_refused(squad):
    copied = State.FromString((next(squad.tmp.glob("qfleet-*")) / "shard-0.state").read_bytes()).version
    refused, pid = figure(squad, "server/refused_pushes"), squad.kill("shard/0")
    squad.until(lambda: squad.pids().get("shard/0", pid) != pid, 60)
    learns_on(squad)
    squad.until(lambda: figure(squad, "server/refused_pushes") > refused, 60)
    assert "shard/0 was killed by SIGKILL" in squad.complaints
    shelf = shard_of(squad, 0)
    assert shelf.status(30).version > copied > 0, "it went on from its copy on the disk"
    shelf.close()


def test_a_stopped_shard_and_a_killed_evaluator_are_replaced(squad):
    stopped, killed = squad.kill("shard/1", signal.SIGSTOP), squad.kill("evaluator")
    squad.until(lambda: squad.pids().get("shard/1", stopped) != stopped, 60)
    learns_on(squad)
    reborn(squad, "evaluator", killed)
    assert not Path(f"/proc/{stopped}").exists()
    assert "shard/1 sent no heartbeat for 10 s and was killed" in squad.complaints


def test_nonsense_is_refused_by_name_and_changes_nothing(squad):
    shelf = shard_of(squad, 0)
    _, shown = shelf.push_pull("stranger", None, True)()
    size = len(shown.weights)

    def push(gradient, **other):
        known = {"epoch": shown.epoch, "version": shown.version, "norm": 1.0} | other
        return shelf.push_pull(
            "stranger", Push("stranger", 1, known["epoch"], known["version"], known["norm"], gradient), False
        )()[0]

    with pytest.raises(ProcessFault, match="shard 0 rejects a gradient from stranger: it is not finite"):
        push(torch.full((size,), math.nan))
    with pytest.raises(ProcessFault, match=rf"from stranger: its shape is \({size + 1},\), not \({size},\)"):
        push(torch.zeros(size + 1))
    with pytest.raises(ProcessFault, match="the newest is"):
        push(torch.zeros(size), version=1 << 40)
    assert push(torch.zeros(size), epoch="of another life").verdict == "anew"
    with pytest.raises(UserError, match="does not know this token"):
        shard_of(squad, 0, "wrong").push_pull("stranger", None, True)()
    shelf.close()
    learns_on(squad)


def test_a_killed_coordinator_takes_all_back_to_the_checkpoint(squad):
    epoch, pids = squad.now().epoch, squad.pids()
    squad.kill("coordinator")
    squad.until(lambda: (pulse := squad.pulse()) and pulse.epoch != epoch, 120)
    reborn(squad, "learner/0", pids["learner/0"])
    reborn(squad, "learner/1", pids["learner/1"])
    assert squad.pids()["shard/0"] == pids["shard/0"], "shards are given their slices anew"
    learns_on(squad)


def test_in_the_end_all_that_is_left_is_a_run_that_can_go_on(squad):
    squad.head.send_signal(signal.SIGUSR1)
    code, result = squad.ended(120)
    squad.assert_gone()
    assert code == 75, squad.complaints
    assert result["saved_at"] == result["steps"] == newest(squad.run).manifest.step
    assert_goes_forward(squad.run)
    assert not (squad.run / "parts").exists()
    last = records(squad.run)[-1]
    assert last["step"] == result["steps"] and last["episodes"] == result["episodes"]
