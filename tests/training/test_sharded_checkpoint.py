"""Checkpoints of several ranks: each adds its replay, unchanged files are hard links, and a full disk of one rank
costs one checkpoint, not the run."""

from contextlib import closing

import pytest
from test_learner_run import TINY
from test_rank_run import RankGroups
from thread_peers import Roundtable, ThreadRank

from qfleet.runconfig.resolution import resolve
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints
from qfleet.runs.checkpoint_parts import StagingArea, pack_state, unpack_state
from qfleet.training.learner_part import segments_by_learner
from qfleet.training.sharded_checkpoint import ShardedCheckpointWriter

pytestmark = pytest.mark.slow

SCHEDULE = [*TINY, "sync=allreduce", "total_steps=4000", "checkpoint.period_steps=1000", "replay.capacity=60000"]


@pytest.fixture
def groups():
    with closing(RankGroups()) as groups:
        yield groups


def run(groups, tmp_path, size, *overrides, prepare=lambda writer: None, checkpoint=None):
    """Run `size` ranks with checkpoints on disk; returns the ranks and the checkpoints."""
    config = resolve("cartpole", [*SCHEDULE, f"learners={size}", *overrides]).config
    store = Checkpoints(tmp_path / "checkpoints", 9)
    table = Roundtable(size)

    def write(snapshot):
        meta = CheckpointMeta("seed: 1\n", built[0].setup.spec)
        store.save(*snapshot.progress, snapshot.policy, snapshot.state, snapshot.segments, meta)

    def saver(consensus, save):
        writer = ShardedCheckpointWriter(consensus, tmp_path / "parts", checkpoint)
        prepare(writer)
        return writer.saver(write)

    built = [groups.build(config, ThreadRank(table, rank), saver)[0] for rank in range(size)]

    def work(peers):
        rank = built[peers.rank]
        if checkpoint is not None:
            rank.restore(checkpoint.state(), checkpoint.segments())
            if peers.rank == 0:
                store.resume_from(checkpoint)
        rank.run()
        return rank

    return table.run(work), store


def test_every_rank_adds_its_part_and_unchanged_files_are_linked(groups, tmp_path):
    ranks, store = run(groups, tmp_path, 2)
    folders = store.series()
    assert len(folders) == 4 and not (tmp_path / "parts").exists()
    last = store.newest()
    assert set(segments_by_learner(last.segments())) == {0, 1} and len(last.state()["ranks"]) == 1
    shared = [file.name for file in folders[-1].glob("*.seg") if (folders[-2] / file.name).exists()]
    assert {name.startswith("rank0001") for name in shared} == {True, False}, "from both ranks"
    assert all((folders[-1] / name).stat().st_ino == (folders[-2] / name).stat().st_ino for name in shared)
    others, _ = run(groups, tmp_path, 4, "total_steps=4400", checkpoint=last)
    assert all(rank.core.progress().steps >= 4400 for rank in others)
    assert others[0].core.learner.updates > ranks[0].core.learner.updates
    assert len(store.newest().state()["ranks"]) == 3


def test_a_rank_that_cannot_write_costs_one_checkpoint_and_not_the_run(groups, tmp_path):
    calls = []

    def fill_disk_once(writer):
        if writer.peers.rank == 1:
            write = writer.stage.write

            def write_or_fail(segments):
                calls.append(1)
                if len(calls) == 2:
                    raise OSError(28, "No space left on device")
                write(segments)

            writer.stage.write = write_or_fail

    ranks, store = run(groups, tmp_path, 2, prepare=fill_disk_once)
    assert len(store.series()) == 3 and store.newest().manifest.step >= 4000
    assert ranks[0].core.meter.counters["fault/checkpoints_failed"] == 1, "once, not once per rank"
    assert not (tmp_path / "parts").exists()
    run(groups, tmp_path, 2, "total_steps=4400", checkpoint=store.newest())


def test_packed_states_round_trip_and_other_bytes_are_rejected():
    import torch

    state = {"a": torch.arange(3), "b": (1, None, float("inf")), 5: "x"}
    back = unpack_state(pack_state(state))
    assert torch.equal(back.pop("a"), state.pop("a")) and back == state
    for bad in (b"", b"1234567", pack_state({})[:-1] + b"x" * 9):
        with pytest.raises(ValueError):
            unpack_state(bad)


def test_a_cleared_staging_area_leaves_no_files(tmp_path):
    stage = StagingArea(tmp_path / "parts", 3)
    stage.write([])
    assert stage.folder.is_dir()
    stage.clear()
    stage.clear()
    assert not (tmp_path / "parts").exists()
