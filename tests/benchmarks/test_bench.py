"""benchmarks/bench.py: its table, contenders that are left out, wrong arguments, and a comparison with test peers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import bench
import pytest
import torch
from speed import Throughput, ThroughputMeter, describe_machine, rounds, tables
from speed.peers import PEERS, Peer, peer_of
from speed.rounds import Contender
from speed.throughput import measure_throughput
from speed.workloads import DEFAULT, WORKLOADS, RoundSpec

import qfleet
from qfleet.core.errors import UserError
from qfleet.runconfig.resolution import resolve

PEER = """
import sys, time
from speed import Throughput

def steady(work, spec):
    return Throughput(10.0 * spec.lanes, 20.0 * spec.lanes)

def broken(work, spec):
    raise ValueError("no such thing as a free lunch")

def silent(work, spec):
    sys.stdout.flush()
    import os
    os._exit(0)

def endless(work, spec):
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "bench_peer.py").write_text(PEER)
    yield tmp_path
    sys.modules.pop("bench_peer", None)


def entry(who, variant="", lanes=8, *rates, problem=None, work="pong"):
    return Contender(work, who, variant, lanes, problem, [Throughput(*rate) for rate in rates])


FIELD = [entry("qfleet", "bf16", 8, (200, 100), (300, 110), (240, 90)),
         entry("sb3", "", 8, (100, 50), (80, 40), (120, 60)),
         entry("tianshou", problem="not installed: pip install tianshou")]


def test_a_rate_is_work_over_time_and_a_warm_up_is_left_out():
    meter = ThroughputMeter([(0.0, 0.0, 0), (10.0, 5.0, 100), (12.0, 6.0, 300)])
    assert meter.throughput(50) == Throughput(100.0, 200.0)
    with pytest.raises(ValueError, match="300 steps leave nothing to measure"):
        meter.throughput(200)


def test_evaluations_are_not_recorded():
    meter = ThroughputMeter()
    meter.write({"step": 5})
    meter.write({"step": 5, "eval/mean_reward": 1.0})
    assert [mark[2] for mark in meter.marks] == [5]


def test_measuring_repeats_until_the_work_is_done():
    calls = []

    def do():
        calls.append(1)
        time.sleep(0.01)
        return sum(range(10_000)) * 0 + 2

    assert measure_throughput(do, 5).per_s < 2 / 0.01
    assert len(calls) == 3


def test_a_machine_is_described_with_its_load_and_versions():
    found = describe_machine("a command")
    assert found["command"] == "a command" and len(found["load"]) == 3 and found["versions"]["torch"]
    assert found["versions"]["qfleet"] == qfleet.__version__


def test_a_machine_is_described_with_the_commit_of_the_code(tmp_path, monkeypatch):
    tree, package = tmp_path / "tree", tmp_path / "tree" / "qfleet"

    def git(*args):
        done = subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *args], cwd=tree,
                              check=True, capture_output=True, text=True)
        return done.stdout.strip()

    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(qfleet, "__file__", str(package / "__init__.py"))
    monkeypatch.delenv("QFLEET_COMMIT", raising=False)
    assert describe_machine()["commit"] is None
    monkeypatch.setenv("QFLEET_COMMIT", "abc1234")
    assert describe_machine()["commit"] == "abc1234", "a tree that travels without its .git"
    monkeypatch.delenv("QFLEET_COMMIT")
    git("init", "-q")
    (tree / "other").write_text("")
    git("add", "other")
    git("commit", "-q", "-m", "x")
    assert describe_machine()["commit"] is None, "a copy that was installed inside another repository"
    git("add", "qfleet")
    git("commit", "-q", "-m", "x")
    commit = git("rev-parse", "--short", "HEAD")
    assert describe_machine()["commit"] == commit
    (tree / "other").write_text("a result that has just been written")
    assert describe_machine()["commit"] == commit
    (package / "new.yaml").write_text("")
    assert describe_machine()["commit"] == f"{commit}+"
    monkeypatch.setenv("PATH", "/nonexistent")
    assert describe_machine()["commit"] is None


def test_medians_and_ratios():
    assert FIELD[0].median == Throughput(240, 100)
    assert tables.ratios(FIELD) == {"qfleet, bf16, 8 lanes / sb3, 8 lanes": {"per_s": 2.4, "per_cpu_s": 2.0}}


def test_ratios_are_of_equal_lanes_only():
    assert tables.ratios([entry("qfleet", "", 1, (4, 4)), entry("sb3", "", 8, (2, 2))]) == {}


def test_the_table_names_all_contenders():
    text = "\n".join(tables.render(FIELD, {"rounds": 3, "threads": 1, "device": "cpu", "load": 0.1}))
    assert text.splitlines() == [
        f"pong: {WORKLOADS['pong'].what}",
        "  contender              steps/s  per CPU s  ÷ sb3  per CPU s",
        "  qfleet, bf16, 8 lanes      240        100   2.40       2.00",
        "  sb3, 8 lanes               100         50",
        "  tianshou, 8 lanes      not installed: pip install tianshou",
        "",
        "median of 3 rounds, 1 thread, on cpu"]


def test_libraries_that_cannot_be_measured_are_named_under_the_table():
    settings = {"rounds": 1, "threads": 1, "device": "cpu", "load": 0.0, "absent": {"cleanrl": "it is scripts"}}
    assert tables.render(FIELD, settings)[-1] == "cleanrl is not measured: it is scripts"


@pytest.mark.parametrize(("words", "named"), [(["cartpole"], True), (["cartpole", "--peers"], False)])
def test_they_are_named_only_where_peers_are_measured(words, named, place, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *given: None)
    assert bench.main([*words, "--out", "here"]) == 0
    assert ("cleanrl is not measured: CleanRL is" in capsys.readouterr().out) == named
    assert bool(json.loads((place / "here" / "bench.json").read_text())["absent"]) == named


def test_the_report_says_that_the_machine_was_busy(monkeypatch):
    monkeypatch.setattr(tables.os, "cpu_count", lambda: 8)
    quiet, busy = (tables.render(FIELD, {"rounds": 1, "threads": 2, "device": "cpu", "load": load})[-1]
                   for load in (1.5, 3.5))
    assert "a load of 3.5 on 8 cores" in busy and "per CPU second" in busy
    assert quiet.startswith("median of 1 round")


def test_the_plot(place):
    pytest.importorskip("matplotlib")
    assert tables.draw(FIELD, place / "bench.png").stat().st_size > 5_000
    assert tables.draw(FIELD[2:], place / "none.png") is None


def test_no_plot_without_matplotlib(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert tables.draw(FIELD, place / "bench.png") is None


def test_contenders_alternate_and_one_that_fails_is_not_measured_again(monkeypatch):
    tape, told = [], []
    field = [entry("qfleet"), entry("sb3"), entry("tianshou", problem="not installed")]

    def in_process(one, spec, timeout_s):
        tape.append(one.who)
        return "failed: out of luck" if one.who == "sb3" else Throughput(1, 2)

    monkeypatch.setattr(rounds, "_measure_in_process", in_process)
    rounds.measure(field, RoundSpec(10, 0, 1, "cpu"), 3, 60, told.append)
    assert tape == ["qfleet", "sb3", "qfleet", "qfleet"]
    assert len(field[0].rounds) == 3 and field[1].problem == "failed: out of luck" and field[1].median is None
    assert told[1] == "pong, round 1 of 3: sb3, 8 lanes: failed: out of luck"


def test_all_contenders_make_the_same_updates_in_any_number_of_lanes():
    for work in WORKLOADS.values():
        for lanes in (*work.lanes, 1, 2, 16):
            cycle, updates = work.phase(lanes)
            assert updates / cycle == work.updates / work.cycle and cycle >= lanes
        assert work.mark % work.cycle == 0 and all(work.mark % lanes == 0 for lanes in work.lanes if work.algo)
        assert work.steps >= work.least > work.warm_up


def test_all_contenders_learn_before_the_warm_up_is_over():
    for work in (work for work in WORKLOADS.values() if work.algo and work.unit == "steps"):
        for lanes, overrides in [(lanes, overrides) for lanes in work.lanes for overrides in work.ours.values()]:
            replay = resolve(work.recipe, [*overrides, f"env.lanes={lanes}"]).config.replay
            assert max(work.starts, lanes * replay.chunk_steps) < work.warm_up, work.name


def test_a_missing_peer_names_its_package():
    absent = Peer("x", "a_module_that_nobody_has", "x-rl", {"steps": lambda work, spec: Throughput(1, 1)})
    assert absent.problem(WORKLOADS["cartpole"]) == "not installed: pip install x-rl"
    assert absent.problem(WORKLOADS["updates"]) == "does not measure updates"
    assert all(peer_of("bench_peer:steady").problem(WORKLOADS[name]) is None for name in ("cartpole", "updates"))


def test_peers_do_what_they_can_do(monkeypatch):
    absent = replace(PEERS["sb3"], module="a_module_that_nobody_has")
    monkeypatch.setitem(PEERS, "sb3", absent)
    found = rounds.contenders(WORKLOADS["pong"], ["sb3"])
    assert [(one.name, one.problem) for one in found] == [
        ("qfleet, bf16, 8 lanes", None), ("qfleet, fp32, 8 lanes", None),
        ("sb3, 8 lanes", "not installed: pip install stable-baselines3")]
    assert {one.lanes for one in rounds.contenders(WORKLOADS["acting"], [])} == {16}
    assert {one.lanes for one in rounds.contenders(WORKLOADS["acting"], [], "cuda:0")} == {128}
    assert {one.lanes for one in rounds.contenders(WORKLOADS["pong"], [], "cuda:0")} == set(WORKLOADS["pong"].lanes)
    alone = rounds.contenders(WORKLOADS["updates"], ["bench_peer:steady", "tianshou"])
    assert [(one.name, one.problem) for one in alone] == [
        ("qfleet, bf16", None), ("qfleet, fp32", None), ("bench_peer:steady", None),
        ("tianshou", "does not measure updates")]


def exit_code(argv):
    try:
        return bench.main(argv)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("argv, words", [
    (["cartpol"], ["'cartpol' is not a workload", "did you mean cartpole?"]),
    (["zzz"], ["choose from cartpole, pong"]),
    (["cartpole", "--peers", "sb4"], ["--peers sb4", "sb3, tianshou"]),
    (["cartpole", "--peers", "cleanrl"], ["Python below 3.11"]),
    (["cartpole", "--peers", "nowhere:peer"], ["there is no module 'nowhere'"]),
    (["cartpole", "--peers", "bench_peer:stedy"], ["did you mean steady?"]),
    (["cartpole", "--steps", "900"], ["--steps 900", "at least 1280"]),
    (["cartpole", "learner.batch_size=7"], ["learner.batch_size=7", "--profile"]),
    (["cartpole", "device=cuda"], ["device=cuda", "no GPU"]),
    (["cartpole", "--out", "bench_peer.py/x"], ["--out bench_peer.py/x"]),
    (["cartpole", "--rounds", "0"], ["the minimum is 1"]),
    (["cartpole", "--ronds", "3"], ["--ronds"]),
])
def test_mistakes_are_exit_2_without_a_traceback(argv, words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code(argv) == 2
    said = capsys.readouterr()
    assert all(word in said.err for word in words) and "Traceback" not in said.err and not said.out


def test_a_workload_that_needs_an_extra_says_which(monkeypatch, capsys):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pong is not installed: pip install 'qfleet\[atari\]'"):
        bench.find_workloads(["pong"])
    assert [work.name for work in bench.find_workloads([])] == [name for name in DEFAULT if not WORKLOADS[name].module]
    assert "pong is not installed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_processes_that_fail_are_named_by_their_last_line():
    def problem(name, timeout_s):
        contender = entry(f"bench_peer:{name}", work="cartpole")
        return rounds._measure_in_process(contender, RoundSpec(1, 0, 1, "cpu"), timeout_s)

    assert problem("steady", 120) == Throughput(80.0, 160.0)
    assert problem("broken", 120) == "failed: ValueError: no such thing as a free lunch"
    assert problem("silent", 120) == "failed: it printed no throughput"
    assert problem("endless", 3) == "was not done after 3 s"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_quick_end_to_end_with_test_peers(capsys, place, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/bench.py", "cartpole"])
    peers = ["bench_peer:steady", "bench_peer:broken"]
    assert bench.main(["cartpole", "--quick", "--peers", *peers, "--out", "here", "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document == json.loads((place / "here" / "bench.json").read_text()) | {"machine": document["machine"]}
    results = {one["name"]: one for one in document["results"]}
    assert results["bench_peer:broken, 1 lane"]["problem"].endswith("free lunch")
    mine = results["qfleet, 8 lanes"]
    assert mine["median"]["per_s"] > 0 and mine["median"]["per_cpu_s"] > 0 and len(mine["rounds"]) == 1
    ratio = document["ratio"]["cartpole"]["qfleet, 8 lanes / bench_peer:steady, 8 lanes"]["per_s"]
    assert ratio == pytest.approx(mine["median"]["per_s"] / 80)
    assert document["machine"]["command"] == "benchmarks/bench.py cartpole" and document["steps"] == {"cartpole": 1280}
    assert "cartpole, round 1 of 1: qfleet, 1 lane:" in said.err
