"""Ranks in threads of one process: they begin alike, play differently, decide together, and end on the same update."""

import io
from contextlib import closing

import pytest
import torch
from test_single_process import TINY, World
from thread_peers import Roundtable

from qfleet.core.seeds import seed_for
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.resolution import resolve
from qfleet.training.learner_core import Hooks
from qfleet.training.replica import ReplicaRun, rank_segment_name, segments_by_rank
from qfleet.training.single_process import SingleProcessRun

pytestmark = pytest.mark.slow


class Crews:
    """Builds ranks one after the other, for torch's seed is shared by threads, and runs them side by side."""

    def __init__(self):
        self.casts = []

    def run(self, size, *overrides, before=lambda rank: None):
        config = resolve("cartpole", [*TINY, "gradients=allreduce", f"cells={size}", *overrides]).config
        built = [self.build(config, rank) for rank in range(size)]
        ranks, worlds = [None] * size, [world for _, world in built]

        def work(peers):
            rank = ReplicaRun(built[peers.rank][0], peers, config.allreduce)
            ranks[peers.rank] = rank
            before(rank)
            return rank.run()

        reasons = Roundtable(size).run(work)
        return ranks, worlds, reasons

    def build(self, config, rank):
        env = make_env(config.env, config.env.lanes)
        config, world = resolve_auto(config, env.spec), World()
        cast = make_acting_setup(config, env, rank)
        self.casts.append(cast)
        plan = make_plan(config)
        outside = Hooks([world], world.save, world.save_best, lambda sample, update: None)
        vars(plan)["seed"] = seed_for(plan.seed, "rank", rank) if rank else plan.seed
        return SingleProcessRun(cast, plan, outside), world

    def close(self):
        for cast in self.casts:
            cast.close()


@pytest.fixture
def crews():
    with closing(Crews()) as crews:
        yield crews


@pytest.mark.parametrize("overrides", [[], ["allreduce.shard_optimizer=true"], ["replay.alpha=0.6"]])
def test_ranks_begin_alike_play_differently_and_end_together(crews, overrides):
    ranks, _, reasons = crews.run(2, *overrides)
    assert reasons == ["total_steps"] * 2
    a, b = (rank.core for rank in ranks)
    assert a.learner.updates == b.learner.updates > 20
    assert torch.equal(a.learner.flat.master, b.learner.flat.master)
    assert torch.equal(a.learner.target.master, b.learner.target.master)
    assert a.progress() == b.progress() and 120 <= a.progress().steps <= 124
    assert a.replay.rate_limiter.steps + b.replay.rate_limiter.steps == a.progress().steps
    blocks = [b"".join(block for segment in cell.replay.segments() for block in segment.blocks()) for cell in (a, b)]
    assert blocks[0] != blocks[1], "no rank is another's twin"
    seeds = [seed for rank in ranks for actor in rank.local_run._seeds() for seed in actor]
    assert len(set(seeds)) == 4


def test_only_the_first_evaluates_and_records_for_all(crews):
    ranks, worlds, _ = crews.run(2, "eval.period_steps=40")
    assert worlds[0].tape.count("eval") >= 2 and worlds[1].tape.count("eval") == 0
    assert worlds[1].tape.count("best") == 0 and worlds[0].tape.count("save") == worlds[1].tape.count("save") == 1
    assert worlds[0].saved[-1].state["meter"]["episodes"] == ranks[0].core.meter.episodes
    assert ranks[0].core.meter.episodes > ranks[1].core.meter.episodes > 0
    assert any("comm/bytes_per_update" in record for record in worlds[0].records)


def test_updates_are_limited_exactly(crews):
    ranks, _, reasons = crews.run(3, "total_updates=13", "learner.batch_size=9", "replay.min_steps=36")
    assert reasons == ["total_updates"] * 3 and [rank.core.learner.updates for rank in ranks] == [13] * 3


def test_a_good_score_ends_all_at_once(crews):
    ranks, worlds, reasons = crews.run(2, "stop_at=1", "eval.period_steps=60")
    assert reasons == ["stop_at"] * 2 and ranks[0].core.progress() == ranks[1].core.progress()
    assert worlds[0].tape.count("eval") == 1
    judged = next(record for record in worlds[0].records if "eval/mean_reward" in record)
    assert judged["updates"] <= ranks[1].core.learner.updates <= judged["updates"] + 2, "told with the next vote"


@pytest.mark.parametrize("told", [0, 1])
def test_a_wish_of_one_is_the_end_of_all(crews, told):
    def before(rank):
        step, rounds = rank.core.learner.step, []

        def counting():
            rounds.append(0)
            if len(rounds) == 20 and rank.group.rank == told:
                rank.core.stop.reason = "preempted"  # as a signal does, at any moment
            return step()

        rank.core.learner.step = counting

    ranks, worlds, reasons = crews.run(2, "total_steps=5000", before=before)
    assert reasons == ["preempted"] * 2
    assert ranks[0].core.progress() == ranks[1].core.progress() and ranks[0].core.progress().steps < 200
    assert [world.tape.count("save") for world in worlds] == [1, 1]


def test_a_rank_without_anything_to_sample_delays_and_does_not_hang(crews):
    def before(rank):
        if rank.group.rank == 1:
            sample, calls = rank.core.replay.sample, []

            def late(n):
                calls.append(n)
                return sample(n) if len(calls) > 40 else None

            rank.core.replay.sample = late

    ranks, _, reasons = crews.run(2, "total_steps=400", before=before)
    assert reasons == ["total_steps"] * 2 and ranks[0].core.learner.updates == ranks[1].core.learner.updates > 10


def test_a_failing_evaluation_ends_all(crews):
    def before(rank):
        def fail():
            raise RuntimeError("of the evaluator's")

        rank.local_run.evaluator.evaluator.evaluate = fail

    with pytest.raises(RuntimeError, match="of the evaluator's"):
        crews.run(2, "eval.period_steps=40", before=before)


def merged(worlds):
    """What the first rank saves, as Archive puts it together."""
    taken = [world.saved[-1] for world in worlds]
    own = ("actors", "replay", "clock", "torch_rng", "begin")
    parts = [{name: each.state[name] for name in own} | {"learner": {"rng": each.state["learner"]["rng"]}}
             for each in taken[1:]]
    pieces = [(rank_segment_name(rank, segment.name), b"".join(segment.blocks())) for rank, each in enumerate(taken)
              for segment in each.segments]
    return taken[0].state | ({"ranks": parts} if parts else {}), pieces


@pytest.mark.parametrize("first,then", [(2, 2), (2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_any_number_of_ranks_goes_on_from_a_checkpoint_of_any_number(crews, first, then, alpha):
    extra = ["learner.batch_size=12", "replay.min_steps=36", f"replay.alpha={alpha}"]
    ranks, worlds, _ = crews.run(first, *extra)
    state, pieces = merged(worlds)
    progress = ranks[0].core.progress()
    sizes = sum(rank.core.replay.metrics()["replay/size"] for rank in ranks)
    seen = []

    def before(rank):
        rank.restore(state, [(name, io.BytesIO(data)) for name, data in pieces])
        seen.append((rank.core.progress(), rank.core.replay.metrics()["replay/size"]))
        rank.core.replay.check_valid()
        assert torch.equal(rank.core.learner.flat.master, ranks[0].core.learner.flat.master)

    others, _, reasons = crews.run(then, *extra, "total_steps=300", before=before)
    assert {at for at, _ in seen} == {progress} and reasons == ["total_steps"] * then
    # Those who go on as they were close the chunks of the episodes that were running; shares are of whole chunks.
    assert sum(size for _, size in seen) >= sizes
    assert len({rank.core.progress() for rank in others}) == 1 and others[0].core.progress().steps >= 300
    assert others[0].core.learner.updates > progress.updates
    assert all(torch.equal(rank.core.learner.flat.master, others[0].core.learner.flat.master) for rank in others)
    assert others[0].core.meter.episodes > ranks[0].core.meter.episodes


def test_names_of_segments_tell_whose_they_are():
    given = [(rank_segment_name(rank, "replay-1-2-ab"), rank) for rank in (0, 1, 12)]
    assert [name for name, _ in given] == ["replay-1-2-ab", "rank0001-replay-1-2-ab", "rank0012-replay-1-2-ab"]
    assert segments_by_rank(given) == {rank: [("replay-1-2-ab", rank)] for rank in (0, 1, 12)}
