"""The matrix of topologies: actors x learners x sync x launcher. Every valid point learns a chain's known values from
uniformly random behaviour, accounts for every step, and is resumed; every other point is refused by a rule.

The points with one sync share one run, in this order: each resumes from an early checkpoint of the point before it,
which has other numbers of processes and another launcher, and learns from there. All points on Ray share one cluster.
"""

import os
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from chain_rows import COMMON, GAMMA, LENGTH, values_of
from ray_kit import RayYard
from real_runs import TINY, newest, records

from qfleet import api
from qfleet.core.errors import UserError
from qfleet.envs.toy import Chain
from qfleet.runconfig.resolution import resolve
from qfleet.transport.registry import ACTOR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ALL = set(product((0, 2), (1, 2), ("none", "allreduce", "server"), ("local", "ray")))
REFUSED = sorted(point for point in ALL if point[1:3] == (2, "none"))
NUMBERS = [(0, 1, "local"), (2, 2, "ray"), (0, 2, "local"), (2, 1, "ray"), (2, 2, "local"), (0, 1, "ray"),
           (2, 1, "local"), (0, 2, "ray"), (0, 1, "local")]
SEQUENCE = [(actors, learners, sync, launcher) for sync in ("none", "allreduce", "server")
            for actors, learners, launcher in NUMBERS if (actors, learners, sync, launcher) not in REFUSED]
TOTAL, EARLY = 4000, 400
WORDS = [*TINY, *COMMON, "agent.n_step=1", "learner.target_period_updates=50", "replay.capacity=8000",
         "env.lanes=4", "device=cpu", f"total_steps={TOTAL}", f"checkpoint.period_steps={EARLY}", "checkpoint.keep=99"]
CPUS = [f"ray.{role}_cpus=0.1" for role in ("learner", "evaluator", "actor", "server")]
TOLERANCE = 0.1


def words_of(actors, learners, sync, launcher):
    own = {"ray.actor_cpus=0.1": actors > 0, "ray.server_cpus=0.1": sync == "server"}
    return [f"actors={actors}", f"learners={learners}", f"launcher={launcher}",
            *(word for word in CPUS if launcher == "ray" and own.get(word, True))]


def name_of(point):
    return "-".join(map(str, point))


def set_environment(environ):
    os.environ.update(environ)


@pytest.fixture(scope="module")
def on_ray():
    """Calls a function in a process that is connected to a cluster, always the same one: only it imports Ray."""
    with tempfile.TemporaryDirectory(prefix="qr", dir="/tmp") as folder, RayYard(Path(folder)) as yard:
        environ = yard.env | {"RAY_ADDRESS": yard.address}
        with ProcessPoolExecutor(1, get_context("spawn"), set_environment, (environ,)) as pool:
            yield lambda *call: pool.submit(*call).result(200)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the runs are, and the newest one by sync."""
    return {"root": tmp_path_factory.mktemp("runs")}


def copied(run, to):
    """A copy of a run as it was at its first checkpoint."""
    shutil.copytree(run, to)
    _, *later = sorted((to / "checkpoints").glob("step-*"))
    for path in later:
        shutil.rmtree(path)
    return to


def error_of(run):
    return np.abs(values_of(run) - Chain.optimal_q(LENGTH, GAMMA)).max()


def parts_of(run):
    """What the learners of a run hold, one state each."""
    state = newest(run).state()
    return [state, *state.get("ranks", [])]


def senders(run):
    """Actors that each learner has stored something of."""
    registries = [part.get("actor_registry", {"lives": [], "stored": {}}) for part in parts_of(run)]
    return [{session for *_, session, role, _ in registry["lives"] if role == ACTOR and session in registry["stored"]}
            for registry in registries]


def assert_accounted(run, result, learners, actors, known):
    """All steps of the run are in what its learners have counted, and in what their actors have sent."""
    checkpoint, last = newest(run), records(run)[-1]
    steps = [part["clock"]["steps"] for part in parts_of(run)]
    assert len(steps) == learners and min(steps) > 0, "every learner has experience of its own"
    assert sum(steps) == checkpoint.manifest.step == last["step"] == result.steps
    assert last.get("wire/duplicates", 0) == 0 and last.get("fault/bad_messages", 0) == 0
    new = [found - known for found in senders(run)]
    assert sum(map(len, new)) == actors == len(set().union(*new)), "every actor feeds one learner"
    assert all(new) or not actors


@pytest.mark.parametrize("point", SEQUENCE, ids=[f"{place} {name_of(point)}" for place, point in enumerate(SEQUENCE)])
def test_a_topology_resumes_learns_and_counts_every_step(runs, point, request):
    actors, learners, sync, launcher = point
    call = request.getfixturevalue("on_ray") if launcher == "ray" else lambda function, *args: function(*args)
    words, known = words_of(*point), set()
    if sync in runs:
        early = copied(runs[sync], runs["root"] / request.node.name)
        first, known = newest(early).manifest.moment, set().union(*senders(early))
        assert first[0] < TOTAL / 2 and error_of(early) > 2 * TOLERANCE, "it does not know the values yet"
        result = call(api.resume, early, words)
    else:
        first = (0, 0)
        result = call(partial(api.train, "toy/Chain-v0"), [*WORDS, f"sync={sync}", *words, f"run.root={runs['root']}"])
    run = runs[sync] = result.directory
    assert (result.exit_code, result.reason) == (0, "total_steps") and result.updates > first[1]
    assert_accounted(run, result, learners, actors, known)
    assert error_of(run) < TOLERANCE and (values_of(run).argmax(1) == 1).all()


def test_the_sequence_has_every_point_that_is_not_refused():
    assert set(SEQUENCE) == ALL - set(REFUSED) and len(ALL) == 24


@pytest.mark.parametrize("point", REFUSED, ids=name_of)
def test_several_learners_without_sync_are_refused(point):
    with pytest.raises(UserError, match=r"learners=2 with sync=none: set sync=allreduce .* or sync=server"):
        resolve("toy/Chain-v0", [*WORDS, f"sync={point[2]}", *words_of(*point)])


def test_fewer_actors_than_learners_are_refused():
    with pytest.raises(UserError, match="actors=1 with learners=2: a learner without an actor"):
        resolve("toy/Chain-v0", [*WORDS, "actors=1", "learners=2", "sync=server"])
