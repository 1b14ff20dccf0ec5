"""The nodes of a run, for every valid combination of actors, learners, sync and launcher, as rows of a table."""

from pathlib import Path

import pytest

from qfleet import api
from qfleet.core.errors import UserError
from qfleet.launch.topology import ActorAssignment, Role, actor_assignment, count, topology
from qfleet.runconfig.resolution import resolve

TINY = ["agent.hidden=[8]", "env.lanes=2", "replay.min_steps=64", "learner.batch_size=8", "device=cpu"]
ONE, MANY = "replay.capacity or learner.batch_size", "learners, env.lanes or replay.capacity"
ACTING, WEIGHTS = "env.lanes or actors", "agent.hidden"


def config(*overrides):
    return resolve("cartpole", [*TINY, *overrides]).config


def row(node):
    return (node.name, node.main, node.calls, node.log_path(Path()).name, node.child_name, node.max_restarts,
            node.heartbeat_timeout_s, node.memory_hint)


def learner(restarts=0):
    return ("learner", "learner", (), "learner.log", "learner", restarts, None, ONE)


def actor(index):
    return (f"actor/{index}", "actor", ("learner",), f"actor-{index}.log", f"actor/{index}", None, 30.0, ACTING)


def evaluator(of="learner", hint=ACTING):
    return ("evaluator", "evaluator", (of,), "evaluator.log", "evaluator", None, 30.0, hint)


def rank(index, restarts=3):
    name = f"learner/{index}"
    return (name, "rank", (), f"learner-{index}.log", "learners", restarts, None, ONE)


def alone(restarts=3):
    return ("learner", "rank", (), "learner.log", "learner", restarts, None, ONE)


def coordinator(shards, restarts=0):
    return ("coordinator", "coordinator", shards, "coordinator.log", "coordinator", restarts, None, WEIGHTS)


def shard(index):
    return (f"shard/{index}", "shard", (), f"shard-{index}.log", f"shard/{index}", None, None, WEIGHTS)


def worker(index, shards):
    return (f"learner/{index}", "worker", ("coordinator", *shards), f"learner-{index}.log", f"learner/{index}", None,
            30.0, MANY)


TWO = ("shard/0", "shard/1")
SERVER = [coordinator(TWO), shard(0), shard(1), worker(0, TWO), worker(1, TWO), evaluator("coordinator", MANY)]
ROWS = [
    ([], [alone()]),
    (["eval.process=true"], [alone(), evaluator()]),
    (["sync=allreduce"], [alone()]),
    (["actors=1"], [learner(), actor(0), evaluator()]),
    (["actors=3", "fleet.learner_restarts=2"], [learner(2), actor(0), actor(1), actor(2), evaluator()]),
    (["actors=3", "fleet.listen=127.0.0.1:0", "fleet.local_actors=false"], [learner(), evaluator()]),
    (["sync=allreduce", "learners=2"], [rank(0), rank(1), evaluator("learner/0")]),
    (["sync=allreduce", "learners=3", "allreduce.max_restarts=1"],
     [rank(0, 1), rank(1, 1), rank(2, 1), evaluator("learner/0")]),
    (["sync=server", "parameter_server.shards=1"],
     [coordinator(("shard/0",)), shard(0), worker(0, ("shard/0",)), evaluator("coordinator", MANY)]),
    (["sync=server", "learners=2", "parameter_server.shards=2"], SERVER),
    (["launcher=ray"], [alone(), evaluator()]),
    (["launcher=ray", "eval.process=false"], [alone()]),
    (["launcher=ray", "sync=allreduce"], [alone(), evaluator()]),
    (["launcher=ray", "actors=2"], [learner(), actor(0), actor(1), evaluator()]),
    (["launcher=ray", "actors=auto"], [learner(), actor(0), evaluator()]),
    (["launcher=ray", "sync=allreduce", "learners=2"], [rank(0), rank(1), evaluator("learner/0")]),
    (["launcher=ray", "sync=server", "learners=2", "parameter_server.shards=2"], SERVER),
]


@pytest.mark.parametrize(("overrides", "expected"), ROWS, ids=[" ".join(words) or "default" for words, _ in ROWS])
def test_the_nodes_of_a_run(overrides, expected):
    assert [row(node) for node in topology(config(*overrides))] == expected


@pytest.mark.parametrize("overrides", [
    ["learners=2"], ["learners=2", "sync=allreduce", "actors=1"], ["sync=server", "learners=3", "actors=2"],
    ["actors=1", "eval.process=false"], ["actors=auto"]])
def test_the_combinations_that_are_not_in_the_table_are_refused(overrides):
    with pytest.raises(UserError):
        config(*overrides)


@pytest.mark.parametrize("sync", ["allreduce", "server"])
def test_actor_i_feeds_learner_i_mod_k(sync):
    nodes = topology(config(f"sync={sync}", "learners=2", "actors=5"))
    feeds = [node.calls for node in nodes if node.role is Role.ACTOR]
    assert feeds == [("learner/0",), ("learner/1",), ("learner/0",), ("learner/1",), ("learner/0",)]
    assert count(nodes, Role.LEARNER) == 2 and count(nodes, Role.EVALUATOR) == 1


def test_actors_are_divided_among_learners_and_the_first_learner_has_the_main_service_without_a_coordinator():
    ranks = actor_assignment(config("sync=allreduce", "learners=2", "actors=5"))
    assert ranks == ActorAssignment(5, 2, has_coordinator=False) and ranks.actors_per_learner == 3
    assert [ranks.learner_of(actor) for actor in range(5)] == [0, 1, 0, 1, 0]
    assert [ranks.own_service(learner) for learner in range(2)] == [None, 1]
    workers = actor_assignment(config("sync=server", "learners=2", "actors=5"))
    assert [workers.own_service(learner) for learner in range(2)] == [0, 1]
    alone = actor_assignment(config())
    assert (alone.actors_per_learner, alone.own_service(0)) == (0, None)


def test_every_called_node_exists_and_names_are_unique():
    for overrides, _ in ROWS:
        nodes = topology(config(*overrides))
        names = [node.name for node in nodes]
        assert len(set(names)) == len(names) and {name for node in nodes for name in node.calls} <= set(names)


def test_isolated_environments_get_the_time_in_which_a_hung_one_is_replaced():
    nodes = topology(config("actors=1", "env.isolate=true", "env.step_timeout_s=7"))
    assert [node.heartbeat_timeout_s for node in nodes] == [None, 157.0, 157.0]


def test_nodes_name_the_resources_that_a_cluster_reserves():
    words = ["launcher=ray", "ray.learner_cpus=3", "ray.evaluator_cpus=0.5"]
    found = {node.role: dict(node.resources) for node in topology(config(*words, "actors=1", "ray.actor_cpus=2"))}
    assert found == {Role.LEARNER: {"CPU": 3.0}, Role.ACTOR: {"CPU": 2.0}, Role.EVALUATOR: {"CPU": 0.5}}
    words += ["ray.server_cpus=0.25", "sync=server"]
    found = {node.role: dict(node.resources) for node in topology(config(*words))}
    assert found[Role.COORDINATOR] == found[Role.SHARD] == {"CPU": 0.25} and found[Role.LEARNER] == {"CPU": 3.0}


def test_ranks_of_torchrun_have_no_actors_and_as_many_learners_as_the_config_says(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for overrides, told in ((["actors=4"], "actors=4 with ranks that torchrun or srun started: set actors=0"),
                            (["learners=3"], "learners=3, but 2 ranks were started")):
        with pytest.raises(UserError, match=told):
            api.train("cartpole", ["sync=allreduce", *overrides])
    assert list(tmp_path.iterdir()) == [], "no run directory is created"
