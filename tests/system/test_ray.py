"""Runs whose roles are Ray actors, on a cluster of two nodes with real raylets. The tests share it, in this order."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import test_control_runs as control
from chain_rows import REMEMBERING
from fleet_runs import SMALL, assert_goes_forward, processes
from ray_kit import LOSSY, RayRun, RayYard, alive
from real_runs import TINY, newest, open_stores

from qfleet.core.errors import UserError
from qfleet.runconfig import resolution

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
SMALL_RAY = ["launcher=ray", *SMALL]
ENDLESS = ["launcher=ray", "actors=auto", "env.lanes=2", "stop_at=null", "total_steps=1000000", "run.threads=1",
           "run.tensorboard=false", "run.log_period_steps=100", "eval.period_steps=1000",
           "checkpoint.period_steps=1000", "fleet.actor_restarts=20", "device=cpu", "run.name=x"]


@pytest.fixture(scope="module")
def yard():
    with tempfile.TemporaryDirectory(prefix="qr", dir="/tmp") as folder, RayYard(Path(folder)) as made:
        made.add(cpus=1)
        yield made


@pytest.fixture(scope="module")
def run(yard):
    """A run that would never end; whatever is done to it, it shall learn."""
    with yard.run("train", "cartpole", *ENDLESS, "--restarts", "3", folder="endless") as made:
        made.until(lambda: members(yard).keys() == {"actor/0", "actor/1", "evaluator"})
        yield made


def members(yard) -> dict[str, dict]:
    pulse = yard.pulse()
    return {each["name"]: each for each in pulse["members"] if each["silent_s"] < 3} if pulse else {}


def updates(yard) -> int:
    pulse = yard.pulse()
    return int(pulse["updates"]) if pulse else -1


def nobody_is_left(yard) -> None:
    """Ray forgets its actors after a while."""
    deadline = time.monotonic() + 60
    while yard.actors() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not yard.actors()


def best(folder: Path) -> float:
    """Of all evaluations so far; the last line may be half written."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return max((line.get("eval/mean_reward", 0) for line in lines), default=0)


def attempts(folder: Path) -> int:
    return len(json.loads((folder / "run.json").read_text())["attempts"])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def learns(yard, run) -> None:
    before = run.until(lambda: (now := updates(yard)) >= 0 and now)
    run.until(lambda: updates(yard) > before + 10)


def test_an_actor_killed_comes_back_in_its_place_while_the_others_go_on(yard, run):
    learns(yard, run)
    before = run.until(lambda: members(yard).get("actor/0"))
    os.kill(before["pid"], signal.SIGKILL)
    learns(yard, run)
    after = run.until(lambda: (now := members(yard).get("actor/0")) and now["pid"] != before["pid"] and now)
    assert (after["index"], after["incarnation"]) == (0, before["incarnation"] + 1), "the same place, so the same arm"
    run.until(lambda: int(members(yard).get("actor/0", {"steps": 0})["steps"]) > 20)
    assert "actor/0 is gone: its process or its node died; restart 1 of at most 20 in a row" in run.complaints
    assert run.until(lambda: members(yard).get("actor/1"))["incarnation"] == 1


def test_actors_follow_the_nodes(yard, run):
    """A node dies in the middle of the run: its actor is given up; when there is room again, its place is taken, and
    another, for the new node is larger."""
    yard.remove()
    run.until(lambda: len([name for name in yard.actors() if "/actor/" in name]) == 1)
    learns(yard, run)
    before = run.until(lambda: len(now := members(yard)) == 2 and now)
    yard.add(cpus=2)
    run.until(lambda: members(yard).keys() == {"actor/0", "actor/1", "actor/2", "evaluator"})
    after = run.until(lambda: len(now := members(yard)) == 4 and now)
    assert {each["index"] for each in after.values()} == {-1, 0, 1, 2}
    assert {name: after[name]["pid"] for name in before} == {name: each["pid"] for name, each in before.items()}
    learns(yard, run)


def test_a_killed_learner_is_resumed_and_the_others_stay(yard, run):
    folder = run.cwd / "runs" / "x"
    run.until(lambda: list(folder.glob("checkpoints/step-*")))
    before = {name: each["pid"] for name, each in members(yard).items()}
    epoch = run.until(yard.pulse)["epoch"]
    os.kill(run.until(lambda: yard.pid("learner")), signal.SIGKILL)
    run.until(lambda: (pulse := yard.pulse()) and pulse["epoch"] != epoch)
    attempt = json.loads((folder / "run.json").read_text())["attempts"][-1]
    assert attempt["resumed_from"].startswith("step-")
    run.until(lambda: {name: each["pid"] for name, each in members(yard).items()} == before)
    learns(yard, run)
    assert_goes_forward(folder)


def test_cartpole_is_learnt_on_two_nodes(yard, run):
    run.until(lambda: best(run.cwd / "runs" / "x") >= 150, 300)
    assert {name for name in members(yard) if name != "evaluator"} == {"actor/0", "actor/1", "actor/2"}


def test_told_to_stop_it_saves_and_leaves_the_cluster_and_a_killed_driver_leaves_nobody(yard, run):
    folder = run.cwd / "runs" / "x"
    run.head.send_signal(signal.SIGTERM)
    code, result = run.ended()
    assert code == 75 and result["saved_at"] == result["steps"] == newest(folder).manifest.step, run.complaints
    nobody_is_left(yard)
    with yard.run("resume", "x", folder="endless") as again:
        again.until(lambda: updates(yard) > result["updates"])
        pids = [again.until(lambda: yard.pid("learner")), *(each["pid"] for each in members(yard).values())]
        again.head.kill()
        again.head.wait()
        deadline = time.monotonic() + 60
        while (alive(pids) or yard.actors()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not alive(pids) and not yard.actors()
    assert_goes_forward(folder)


def test_though_replies_are_lost_each_message_counts_once(yard):
    """Some calls of the node's workers are lost, others made and their answers lost: what is told is stored once."""
    yard.add(cpus=2, env=LOSSY)
    found = yard.flood(3)
    yard.remove()
    assert found["code"] == 0, found["told"]
    assert found["repeats"] >= 3 and found["stored"] == list(range(int(found["told"]) + 1)), found


def test_a_parameter_server_on_ray_survives_the_death_of_a_shard_and_a_learner(yard):
    cpus = [f"ray.{role}_cpus=0.5" for role in ("learner", "evaluator", "server")]
    words = [word for word in SMALL_RAY if not word.startswith("replay.capacity")]
    with yard.run("train", "cartpole", *words, *cpus, "sync=server", "learners=2",
                  "total_steps=1000000", "checkpoint.period_steps=500", "run.name=x", folder="server") as run:
        run.until(lambda: updates(yard) > 50)
        killed = {name: run.until(lambda name=name: yard.pid(name)) for name in ("shard/0", "learner/1")}
        for pid in killed.values():
            os.kill(pid, signal.SIGKILL)
        run.until(lambda: (now := members(yard).get("learner/1")) and now["pid"] != killed["learner/1"]
                  and now["index"] == 1)
        run.until(lambda: yard.pid("shard/0") not in (None, killed["shard/0"]))
        learns(yard, run)
        run.head.send_signal(signal.SIGTERM)
        code, result = run.ended()
    assert code == 75 and result["saved_at"] == result["steps"], run.complaints
    assert not (run.cwd / "runs" / "x" / ".shards").exists()
    nobody_is_left(yard)


def test_ranks_on_two_nodes_begin_anew_together_when_one_dies_or_its_node(yard):
    """Gradients cross from node to node; whoever goes takes the attempt with it, and not the evaluator."""
    room = ["ray.learner_any_node=true", "ray.learner_cpus=2"]  # of the first node's three CPUs, and of the other's two
    with yard.run("train", "cartpole", *SMALL_RAY, *room, "sync=allreduce", "learners=2", "total_steps=1000000",
                  "checkpoint.period_steps=400", "eval.period_steps=300", "run.name=x", folder="ranks") as run:
        folder = run.cwd / "runs" / "x"
        run.until(lambda: list(folder.glob("checkpoints/step-*")) and members(yard).get("evaluator"))
        ranks = [run.until(lambda rank=rank: yard.pid(f"learner/{rank}")) for rank in range(2)]
        assert len({parent_of(pid) for pid in ranks}) == 2, "each has a raylet of its own"
        assert open_stores(run.head.pid) == [], "who has no token of Ray's finds no store"
        judge = members(yard)["evaluator"]["pid"]
        os.kill(ranks[1], signal.SIGKILL)
        run.until(lambda: attempts(folder) == 2)
        learns(yard, run)
        assert "learners lost its rank 1, which is gone: its process or its node died; restart 1 of at most 3" in (
            run.complaints)
        assert run.until(lambda: yard.pid("learner/0")) != ranks[0]
        yard.remove()
        run.until(lambda: "restart 2 of at most 3" in run.complaints)
        yard.add(cpus=2)
        run.until(lambda: attempts(folder) == 3)
        learns(yard, run)
        assert run.until(lambda: members(yard).get("evaluator"))["pid"] == judge
        run.head.send_signal(signal.SIGTERM)
        code, result = run.ended()
    assert code == 75 and result["saved_at"] == result["steps"], run.complaints
    nobody_is_left(yard)
    assert_goes_forward(folder)
    state = newest(folder).state()
    assert state["clock"]["steps"] + state["ranks"][0]["clock"]["steps"] == result["steps"]
    assert not (folder / "parts").exists()


def test_agents_of_other_kinds_learn_on_ray(yard):
    """Both at once: continuous actions with a distribution of returns, and a memory; each as well as in processes."""
    place = ["launcher=ray", "run.threads=1", "run.tensorboard=false", "stop_at=null", "device=cpu", "run.name=x",
             *(f"ray.{role}_cpus=0.5" for role in ("learner", "evaluator", "actor"))]
    lqr = [*control.words_of("d4pg"), *control.ROUGH, "normalise.observations=true", "actors=2", "env.lanes=2"]
    agents = {"d4pg": ["toy/LQR-v0", *lqr], "r2d2": ["toy/Chain-v0", *TINY, *REMEMBERING, "actors=1"]}
    with ExitStack() as stack:
        runs = {name: stack.enter_context(yard.run("train", *words, *place, folder=name))
                for name, words in agents.items()}
        ends = {name: run.ended(300) for name, run in runs.items()}
    assert {name: code for name, (code, _) in ends.items()} == dict.fromkeys(agents, 0), ends
    found = {name: run.cwd / "runs" / "x" for name, run in runs.items()}
    assert newest(found["d4pg"]).manifest.updates > 1500 and control.cost_over_best(found["d4pg"]) < 2
    assert ends["r2d2"][1]["best"] == 1 and newest(found["r2d2"]).manifest.updates > 800
    nobody_is_left(yard)


def test_a_ray_of_its_own_asks_for_a_token_and_goes_with_its_driver(tmp_path):
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TMPDIR": "/tmp"}
    words = ["train", "cartpole", *SMALL_RAY, "actors=1", "total_steps=1000000", "run.name=x"]
    with RayRun(words, tmp_path, env) as run:
        run.until(lambda: list((tmp_path / "runs" / "x" / "checkpoints").glob("step-*"))
                  or (tmp_path / "runs" / "x" / "metrics.jsonl").exists())
        token = tmp_path / ".cache" / "qfleet" / "ray_token"
        assert token.stat().st_mode & 0o777 == 0o600 and not (tmp_path / ".ray").exists()
        folder = Path(re.search(r"/tmp/qfleet-\w+", " ".join(word for _, words in processes(run.head.pid)
                                                           for word in words))[0])
        mine = [pid for pid, words in processes() if any(str(folder) in word for word in words)]
        assert len(mine) > 2 and folder.is_dir()
        run.head.kill()
        deadline = time.monotonic() + 60
        while (alive(mine) or folder.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not alive(mine) and not folder.exists(), [words for pid, words in processes() if pid in mine]


@pytest.mark.parametrize(("words", "remedy"), [
    (["actors=auto"], "actors=auto needs launcher=ray"),
    (["launcher=ray", "actors=1", "device=cuda:1"], "set device=cuda"),
    (["launcher=ray", "actors=1", "fleet.listen=0.0.0.0:4440"], "nodes join the cluster"),
    (["ray.actor_cpus=2"], "unless launcher=ray"),
    (["launcher=ray", "sync=server", "learners=2", "ray.actor_cpus=2"], "every learner steps its own environments"),
    (["launcher=ray", "sync=allreduce", "learners=2", "actors=auto"], "give the number of actors"),
    (["launcher=ray", "sync=allreduce", "learners=2", "fleet.learner_restarts=2"], "allreduce.max_restarts")])
def test_what_cannot_be_is_refused_with_its_remedy(words, remedy):
    with pytest.raises(UserError, match=remedy):
        resolution.resolve("cartpole", words)
