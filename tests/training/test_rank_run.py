"""Allreduce ranks in threads of one process: equal weights, different experience, common decisions, same end."""

import io
from contextlib import closing
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_learner_run import TINY, RunOutputs
from thread_peers import Roundtable, ThreadRank

from qfleet.core.agent import ROW_MOMENTS
from qfleet.core.clock import RunClock
from qfleet.core.seeds import seed_for
from qfleet.maths.moments import Moments
from qfleet.optim.row_moments import RowMoments
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.resolution import resolve
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_part import restore_learner, segment_name, segments_by_learner
from qfleet.training.rank_run import RankConsensus, RankRun, build_allreduce

pytestmark = pytest.mark.slow


class RankGroups:
    """Builds ranks one after the other, since threads share torch's generator, and runs them concurrently."""

    def __init__(self):
        self.setups = []

    def run(self, size, *overrides, before=lambda rank: None):
        config = resolve("cartpole", [*TINY, "sync=allreduce", f"learners={size}", *overrides]).config
        table = Roundtable(size)
        built = [self.build(config, ThreadRank(table, rank)) for rank in range(size)]
        ranks, outputs = [rank for rank, _ in built], [output for _, output in built]

        def work(peers):
            before(ranks[peers.rank])
            return ranks[peers.rank].run()

        return ranks, outputs, table.run(work)

    def build(self, config, peers, saver=lambda consensus, save: save):
        """A rank, and what it writes; `saver` wraps the function that saves its snapshots."""
        rank = peers.rank
        env = make_env(config.env, config.env.lanes)
        config, outputs = resolve_auto(config, env.spec), RunOutputs()
        setup = make_acting_setup(config, env, rank)
        self.setups.append(setup)
        plan = make_plan(config)
        vars(plan)["seed"] = seed_for(plan.seed, "rank", rank) if rank else plan.seed
        consensus = RankConsensus(peers, plan)
        hooks = Hooks([outputs], saver(consensus, outputs.save), outputs.save_best, lambda sample, update: None)
        return RankRun(setup, plan, hooks, consensus, build_allreduce(config.allreduce)), outputs

    def close(self):
        for setup in self.setups:
            setup.close()


@pytest.fixture
def groups():
    with closing(RankGroups()) as groups:
        yield groups


@pytest.mark.parametrize("overrides", [[], ["allreduce.shard_optimizer=true"], ["replay.alpha=0.6"]])
def test_ranks_keep_equal_weights_collect_different_experience_and_end_together(groups, overrides):
    ranks, _, reasons = groups.run(2, *overrides)
    assert reasons == ["total_steps"] * 2
    a, b = (rank.core for rank in ranks)
    assert a.learner.updates == b.learner.updates > 20
    assert torch.equal(a.learner.flat.master, b.learner.flat.master)
    assert torch.equal(a.learner.target.master, b.learner.target.master)
    assert a.progress() == b.progress() and 120 <= a.progress().steps <= 124
    assert a.replay.rate_limiter.steps + b.replay.rate_limiter.steps == a.progress().steps
    blocks = [b"".join(block for segment in core.replay.segments() for block in segment.blocks()) for core in (a, b)]
    assert blocks[0] != blocks[1], "ranks have different experience"
    seeds = [seed for rank in ranks for actor in rank.acting.seeds() for seed in actor]
    assert len(set(seeds)) == 4


def test_ranks_have_equal_statistics_of_the_rows_of_all(groups, monkeypatch):
    sent, take = [], RowMoments.take_row
    monkeypatch.setattr(RowMoments, "take_row", lambda moments: sent.append(take(moments)) or sent[-1])
    ranks, _, _ = groups.run(2, "normalise.observations=true", "normalise.rewards=true")
    a, b = ([rank.core.learner.flat.buffer(name) for name in ROW_MOMENTS] for rank in ranks)
    assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
    expected = reduce(Moments.merge, map(Moments.from_row, sent))
    assert float(a[0]) == expected.count > 100
    np.testing.assert_allclose(a[1], expected.mean)
    np.testing.assert_allclose(a[2], expected.square)


def test_only_rank_zero_evaluates_and_writes_records_for_all(groups):
    ranks, outputs, _ = groups.run(2, "eval.period_steps=40")
    assert outputs[0].log.count("eval") >= 2 and outputs[1].log.count("eval") == 0
    assert outputs[1].log.count("best") == 0 and outputs[0].log.count("save") == outputs[1].log.count("save") == 1
    assert outputs[0].saved[-1].state["meter"]["episodes"] == ranks[0].core.meter.episodes
    assert ranks[0].core.meter.episodes > ranks[1].core.meter.episodes > 0
    assert any("comm/bytes_per_update" in record for record in outputs[0].records)


def test_total_updates_is_exact(groups):
    ranks, _, reasons = groups.run(3, "total_updates=13", "learner.batch_size=9", "replay.min_steps=36")
    assert reasons == ["total_updates"] * 3 and [rank.core.learner.updates for rank in ranks] == [13] * 3


def test_a_score_of_stop_at_ends_all_ranks_on_the_same_update(groups):
    ranks, outputs, reasons = groups.run(2, "stop_at=1", "eval.period_steps=60")
    assert reasons == ["stop_at"] * 2 and ranks[0].core.progress() == ranks[1].core.progress()
    assert outputs[0].log.count("eval") == 1
    evaluation = next(record for record in outputs[0].records if "eval/mean_reward" in record)
    assert evaluation["updates"] <= ranks[1].core.learner.updates <= evaluation["updates"] + 2, "at the next vote"


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_stop_proposed_by_one_rank_ends_all(groups, signalled):
    def before(rank):
        step, rounds = rank.core.learner.step, []

        def counting():
            rounds.append(0)
            if len(rounds) == 20 and rank.group.rank == signalled:
                rank.core.stop.reason = "preempted"  # as a signal handler does, at any time
            return step()

        rank.core.learner.step = counting

    ranks, outputs, reasons = groups.run(2, "total_steps=5000", before=before)
    assert reasons == ["preempted"] * 2
    assert ranks[0].core.progress() == ranks[1].core.progress() and ranks[0].core.progress().steps < 200
    assert [output.log.count("save") for output in outputs] == [1, 1]


def test_a_rank_without_batches_delays_the_others_without_a_deadlock(groups):
    def before(rank):
        if rank.group.rank == 1:
            sample, calls = rank.core.replay.sample, []

            def late(n):
                calls.append(n)
                return sample(n) if len(calls) > 40 else None

            rank.core.replay.sample = late

    ranks, _, reasons = groups.run(2, "total_steps=400", before=before)
    assert reasons == ["total_steps"] * 2 and ranks[0].core.learner.updates == ranks[1].core.learner.updates > 10


def test_a_failed_evaluation_ends_all_ranks(groups):
    def before(rank):
        def fail():
            raise RuntimeError("evaluator failed")

        rank.evaluator.evaluator.evaluate = fail

    with pytest.raises(RuntimeError, match="evaluator failed"):
        groups.run(2, "eval.period_steps=40", before=before)


def merged(outputs):
    """State and segments of a common checkpoint, as `ShardedCheckpointWriter` writes it."""
    snapshots = [output.saved[-1] for output in outputs]
    own = ("actors", "replay", "clock", "torch_rng", "begin")
    parts = [{name: snapshot.state[name] for name in own} | {"learner": {"rng": snapshot.state["learner"]["rng"]}}
             for snapshot in snapshots[1:]]
    segments = [(segment_name(rank, segment.name), b"".join(segment.blocks()))
                for rank, snapshot in enumerate(snapshots) for segment in snapshot.segments]
    return snapshots[0].state | ({"ranks": parts} if parts else {}), segments


@pytest.mark.parametrize("first,then", [(2, 2), (2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_any_number_of_ranks_resumes_from_a_checkpoint_of_any_number(groups, first, then, alpha):
    extra = ["learner.batch_size=12", "replay.min_steps=36", f"replay.alpha={alpha}"]
    ranks, outputs, _ = groups.run(first, *extra)
    state, segments = merged(outputs)
    progress = ranks[0].core.progress()
    sizes = sum(rank.core.replay.metrics()["replay/size"] for rank in ranks)
    seen = []

    def before(rank):
        rank.restore(state, [(name, io.BytesIO(data)) for name, data in segments])
        seen.append((rank.core.progress(), rank.core.replay.metrics()["replay/size"]))
        rank.core.replay.check_valid()
        assert torch.equal(rank.core.learner.flat.master, ranks[0].core.learner.flat.master)

    others, _, reasons = groups.run(then, *extra, "total_steps=300", before=before)
    assert {found for found, _ in seen} == {progress} and reasons == ["total_steps"] * then
    # Restored ranks close the chunks of running episodes, which adds rows; redistribution moves complete chunks.
    assert sum(size for _, size in seen) >= sizes
    assert len({rank.core.progress() for rank in others}) == 1 and others[0].core.progress().steps >= 300
    assert others[0].core.learner.updates > progress.updates
    assert all(torch.equal(rank.core.learner.flat.master, others[0].core.learner.flat.master) for rank in others)
    assert others[0].core.meter.episodes > ranks[0].core.meter.episodes


def test_segment_names_encode_the_rank():
    given = [(segment_name(rank, "replay-1-2-ab"), rank) for rank in (0, 1, 12)]
    assert [name for name, _ in given] == ["replay-1-2-ab", "rank0001-replay-1-2-ab", "rank0012-replay-1-2-ab"]
    assert segments_by_learner(given) == {rank: [("replay-1-2-ab", rank)] for rank in (0, 1, 12)}


@pytest.mark.parametrize("first,then", [(1, 2), (2, 3), (3, 1)])
def test_learners_that_resume_in_another_number_share_the_saved_steps_and_no_later_ones(first, then):
    """The learners of a parameter server begin one after the other: the first ones have taken steps by then."""
    parts = [{"clock": {"steps": 100 + rank}, "replay": None, "actors": [], "actor_registry": {
        "lives": [[f"actor/{rank}", rank, 1, "s" * 32]], "stored": {}}} for rank in range(first)]
    saved = sum(part["clock"]["steps"] for part in parts)
    state, restored, clocks = {**parts[0], "ranks": parts[1:]}, [], []
    for rank in range(then):
        clocks.append(RunClock())
        core = SimpleNamespace(clock=clocks[-1], replay=SimpleNamespace(rate_limiter=SimpleNamespace(min_steps=9)))
        restore_learner(core, lambda own, segments: restored.append(own), state, [], rank, then, saved + 10 * rank)
    assert sum(own["clock"]["steps"] for own in restored) == saved
    for rank, own in enumerate(restored):
        assert own["clock"]["steps"] + clocks[rank].remote_steps == saved + 10 * rank, "all know the steps of the run"
        assert len(own["actor_registry"]["lives"]) == first, "all know all members"
