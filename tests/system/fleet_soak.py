"""Soaks, long with `make soak` and short in the tests: a fleet whose learner dies again and again, and fleets that must
solve CartPole while somebody keeps killing their processes.

    python tests/system/fleet_soak.py --deaths 20 --seconds 300 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fleet_runs import SMALL, FleetRun, assert_goes_forward
from real_runs import newest

SOLVES = ["actors=2", "env.lanes=4", "run.tensorboard=false", "run.threads=1", "device=cpu", "replay.chunk_steps=8",
          "checkpoint.period_steps=500", "eval.period_steps=1000", "eval.episodes=5", "fleet.actor_restarts=1000"]
ENDLESS = [*SMALL, "actors=2", "total_steps=1000000", "eval.period_steps=300", "checkpoint.period_steps=200"]
HEAD_MB = 30.0
"""By how much the head may grow while its children die."""


def kill_learner(fleet: FleetRun, delay_s: float | None) -> float:
    """Kill the learner so long after a checkpoint, or in the middle of one, and see it resumed from a valid one, with
    everybody else still there. Returns the seconds until it answered again."""
    others = {name: pid for name, pid in fleet.pids().items() if name != "learner"}
    saved = fleet.checkpoints[-1]
    fleet.until(lambda: fleet.checkpoints[-1] > saved)
    if delay_s is None:
        fleet.until(lambda: any(path.name.startswith(".") for path in (fleet.run / "checkpoints").iterdir()))
    else:
        time.sleep(delay_s)
    epoch, since = fleet.until(fleet.pulse).epoch, time.monotonic()
    fleet.kill("learner")
    valid = newest(fleet.run)
    fleet.until(lambda: (pulse := fleet.pulse()) and pulse.epoch != epoch)
    seconds = time.monotonic() - since
    attempts = json.loads((fleet.run / "run.json").read_text())["attempts"]
    assert attempts[-1]["resumed_from"] == valid.path.name
    fleet.until(lambda: (pulse := fleet.pulse()) and pulse.updates > valid.manifest.updates
                and {each.name: each.pid for each in pulse.members} == others)
    assert {name: pid for name, pid in fleet.pids().items() if name != "learner"} == others, "nobody else was restarted"
    assert_goes_forward(fleet.run)
    return seconds


def many_deaths(place: Path, deaths: int, seed: int, say: Callable[[str], object] = print) -> None:
    """One run whose learner dies so often, at random moments and while it saves; told to end, it has lost nothing."""
    rng = random.Random(seed)
    with FleetRun("train", "cartpole", *ENDLESS, "run.name=deaths", "--restarts", str(deaths), cwd=place,
                  run="deaths") as fleet:
        fleet.learns()
        fleet.until(lambda: len(fleet.now().members) == 3 and fleet.checkpoints)
        for death in range(deaths):
            seconds = kill_learner(fleet, None if rng.random() < 0.4 else rng.uniform(0.0, 1.5))
            say(f"death {death + 1}: the learner answers again after {seconds:.1f} s, at step {fleet.now().steps:,}")
        fleet.head.terminate()
        code, result = fleet.ended()
        fleet.assert_gone()
        assert code == 75 and result["saved_at"] == result["steps"] == newest(fleet.run).manifest.step
        assert_goes_forward(fleet.run)


def soak(place: Path, seconds: float, pauses: tuple[float, float], seed: int, least: int = 10,
         say: Callable[[str], object] = print, overrides: tuple[str, ...] = ()) -> Counter[str]:
    """Train until it is solved, again and again, for so long and at least so many deaths; kill one process of anybody
    but the head after every pause. Returns how often whom. AssertionError for whatever is not as it should be."""
    rng, killed, solved = random.Random(seed), Counter[str](), 0
    deadline = time.monotonic() + seconds
    while not solved or time.monotonic() < deadline or sum(killed.values()) < least:
        name = f"soak-{seed + solved}"
        words = [*SOLVES, f"seed={seed + solved}", f"run.name={name}", *overrides, "--restarts", "1000"]
        with FleetRun("train", "cartpole", *words, cwd=place, run=name) as fleet:
            more = solved and sum(killed.values()) >= least
            _batter(fleet, rng, pauses, killed, deadline if more else deadline + 3 * seconds, say)
            if fleet.head.poll() is None:  # time is up in the middle of another run, which must end well
                fleet.head.terminate()
                code, result = fleet.ended()
                assert code == 75 and result["saved_at"] == result["steps"], fleet.complaints
            else:
                code, result = fleet.ended()
                assert (code, result["reason"]) == (0, "stop_at"), (code, result, fleet.complaints)
                say(f"{name}: solved after {result['steps']:,} steps and {result['updates']:,} updates")
            solved += 1
            fleet.assert_gone()
            assert newest(fleet.run).manifest.step == result["steps"]
            assert_goes_forward(fleet.run)
    return killed


def _batter(fleet: FleetRun, rng: random.Random, pauses: tuple[float, float], killed: Counter[str], deadline: float,
            say: Callable[[str], object]) -> None:
    """Kill one process after every pause, until the run ends or time is up."""
    fleet.until(lambda: len(fleet.pids()) == 4)
    fleet.learns()
    first = usage(fleet.head.pid)
    while fleet.head.poll() is None and time.monotonic() < deadline:
        wake = min(deadline, time.monotonic() + rng.uniform(*pauses))
        while fleet.head.poll() is None and time.monotonic() < wake:
            time.sleep(0.05)
        pids = fleet.pids()
        if fleet.head.poll() is not None or not pids:
            continue
        now = usage(fleet.head.pid)
        assert now[0] <= first[0] + 2 * 4, f"the head had {first[0]} descriptors and has {now[0]}"  # 2 for each child
        assert now[1] <= first[1] + HEAD_MB, f"the head had {first[1]:.0f} MB and has {now[1]:.0f} MB"
        name = rng.choice(sorted(pids))
        try:
            os.kill(pids[name], 9)
        except ProcessLookupError:
            continue
        killed[name] += 1
        say(f"{name} killed; the head has {now[0]} descriptors, {now[1]:.0f} MB; {fleet.metrics()[-1]['step']:,} steps")


def usage(pid: int) -> tuple[int, float]:
    """Open descriptors and resident megabytes of a process; nothing of one that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        resident = next((line for line in lines if line.startswith("VmRSS")), "VmRSS: 0")
        return len(os.listdir(f"/proc/{pid}/fd")), int(resident.split()[1]) / 1024
    except OSError:
        return 0, 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=20, help="deaths of the learner of one run")
    parser.add_argument("--seconds", type=float, default=300.0, help="of killing anybody")
    parser.add_argument("--pauses", type=float, nargs=2, default=(5.0, 10.0), metavar="S")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.deaths:
            many_deaths(Path(folder), args.deaths, args.seed)
        found = soak(Path(folder), args.seconds, tuple(args.pauses), args.seed)
    print(f"killed {sum(found.values())}: {dict(found)}")
