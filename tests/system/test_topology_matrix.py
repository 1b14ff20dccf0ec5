"""The matrix of topologies: actors x learners x sync x launcher. Every valid point learns a chain's known values from
uniformly random behaviour, accounts for every step, and resumes; every other point is refused by a rule.

All points on Ray share one cluster. A run is resumed in the topology that costs least with the same sync, so that this
file also changes the numbers of actors and learners and the launcher of every run.
"""

import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

POINTS = list(product((0, 2), (1, 2), ("none", "allreduce", "server"), ("local", "ray")))
INVALID = [point for point in POINTS if point[1] > 1 and point[2] == "none"]
VALID = [point for point in POINTS if point not in INVALID]
TOTAL, FURTHER = 4000, 200
STEADY = [*TINY, *COMMON, "agent.n_step=1", "learner.target_period_updates=50", "replay.capacity=8000",
          "env.lanes=4", "device=cpu", f"total_steps={TOTAL}"]


def words_of(actors, learners, sync, launcher):
    return [f"actors={actors}", f"learners={learners}", f"sync={sync}", f"launcher={launcher}",
            *(["ray.learner_cpus=0.1", "ray.evaluator_cpus=0.1"] if launcher == "ray" else []),
            *(["ray.actor_cpus=0.1"] if launcher == "ray" and actors else []),
            *(["ray.server_cpus=0.1"] if launcher == "ray" and sync == "server" else [])]


def name_of(point):
    return "-".join(map(str, point))


def set_environment(environ):
    os.environ.update(environ)


@pytest.fixture(scope="module")
def ray_driver():
    """A process, connected to a cluster, that drives one run after the other: only it imports Ray."""
    with tempfile.TemporaryDirectory(prefix="qr", dir="/tmp") as folder, RayYard(Path(folder)) as yard:
        environ = yard.env | {"RAY_ADDRESS": yard.address}
        with ProcessPoolExecutor(1, get_context("spawn"), set_environment, (environ,)) as pool:
            yield pool


def parts_of(run):
    """What the learners of a run hold, one state each."""
    state = newest(run).state()
    return [state, *state.get("ranks", [])]


def assert_accounted(run, learners, actors):
    """All steps of the run are in what its learners have counted, and in the transitions that their actors sent."""
    checkpoint, last = newest(run), records(run)[-1]
    parts = parts_of(run)
    assert len(parts) == learners
    steps = [part["clock"]["steps"] for part in parts]
    assert sum(steps) == checkpoint.manifest.step == last["step"], steps
    assert min(steps) > 0, "every learner has experience of its own"
    assert last.get("wire/duplicates", 0) == 0 and last.get("fault/bad_messages", 0) == 0
    if actors:
        sent = [set(part["actor_registry"]["stored"]) for part in parts]
        assert all(sent) and sum(map(len, sent)) == len(set().union(*sent)), "every sender feeds one learner"


def assert_learnt(run):
    q = values_of(run)
    assert (q.argmax(1) == 1).all(), q
    np.testing.assert_allclose(q, Chain.optimal_q(LENGTH, GAMMA), atol=0.1)


@pytest.mark.parametrize("point", [point for point in VALID if point[3] == "local"], ids=name_of)
def test_a_local_topology_learns_counts_every_step_and_resumes(tmp_path, point):
    check(api.train("toy/Chain-v0", [*STEADY, *words_of(*point), f"run.root={tmp_path}"]), point)


@pytest.mark.parametrize("point", [point for point in VALID if point[3] == "ray"], ids=name_of)
def test_a_topology_on_ray_learns_counts_every_step_and_resumes(ray_driver, tmp_path, point):
    words = [*STEADY, *words_of(*point), f"run.root={tmp_path}"]
    check(ray_driver.submit(api.train, "toy/Chain-v0", words).result(200), point)


def check(result, point):
    actors, learners, _, _ = point
    run = result.directory
    assert (result.exit_code, result.reason) == (0, "total_steps")
    assert result.steps >= TOTAL and newest(run).manifest.step == result.steps
    assert_accounted(run, learners, actors)
    assert_learnt(run)
    again = api.resume(run, ["actors=0", "learners=1", "launcher=local", f"total_steps={result.steps + FURTHER}"])
    assert (again.exit_code, again.reason) == (0, "total_steps") and again.updates > result.updates
    assert result.steps + FURTHER <= again.steps == newest(run).manifest.step
    assert_accounted(run, learners=1, actors=0)
    assert_learnt(run)
    assert len(json.loads((run / "run.json").read_text())["attempts"]) == 2


@pytest.mark.parametrize("point", INVALID, ids=name_of)
def test_several_learners_without_sync_are_refused(point):
    with pytest.raises(UserError, match=r"learners=2 with sync=none: set sync=allreduce .* or sync=server"):
        resolve("toy/Chain-v0", [*STEADY, *words_of(*point)])


def test_fewer_actors_than_learners_are_refused():
    with pytest.raises(UserError, match="actors=1 with learners=2: a learner without an actor"):
        resolve("toy/Chain-v0", [*STEADY, "actors=1", "learners=2", "sync=server"])
