"""What becomes of a fleet when its head is told to end, or is killed: it is saved, gone, and can go on."""

import signal
import time

import pytest
from fleet_runs import GENTLE, SMALL, FleetRun, assert_goes_forward, processes
from real_runs import newest, records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ENDLESS = [*SMALL, GENTLE, "actors=2", "total_steps=1000000", "eval.period_steps=500", "checkpoint.period_steps=200",
           "run.name=x"]


def test_killed_and_told_to_end_a_fleet_is_saved_gone_and_goes_on(tmp_path):
    with FleetRun("train", "cartpole", *ENDLESS, cwd=tmp_path) as fleet:
        fleet.until(lambda: len(fleet.checkpoints) > 1)
        fleet.head.kill()
        fleet.head.wait()
        # At once: the learner of the dead head may be saving its last checkpoint, and the new one lets it.
        with FleetRun("resume", "x", cwd=tmp_path) as again:
            since = time.monotonic()
            private = next(fleet.tmp.glob("qfleet-*"))
            while private.exists() or any(str(private) in word for _, words in processes() for word in words):
                assert time.monotonic() < since + 10, "processes, socket and folder are to be gone by now"
                time.sleep(0.05)
            print(f"gone after {time.monotonic() - since:.1f} s")
            result = told_to_end(again, signal.SIGUSR1, 75)
    goes_on_from(result, tmp_path)


def told_to_end(fleet, number, code):
    fleet.learns()
    step = fleet.now().steps
    fleet.until(lambda: fleet.now().steps > step + 300)
    since = time.monotonic()
    fleet.head.send_signal(number)
    ended, result = fleet.ended()
    print(f"saved and gone after {time.monotonic() - since:.1f} s")
    fleet.assert_gone()
    assert ended == code, fleet.complaints
    return result


def goes_on_from(result, tmp_path):
    """Resumed, it has the steps, updates, episodes, replay and places of its checkpoint; then it is interrupted."""
    saved = newest(tmp_path / "runs" / "x")
    state = saved.state()
    assert (saved.manifest.step, saved.manifest.updates) == (result["steps"], result["updates"])
    assert result["saved_at"] == result["steps"] and state["meter"]["episodes"] == result["episodes"]
    last = records(tmp_path / "runs" / "x")[-1]
    lives = {(name, index): incarnation for name, index, incarnation, *_ in state["actor_registry"]["lives"]}
    with FleetRun("resume", "x", cwd=tmp_path) as fleet:
        first = fleet.until(fleet.pulse)
        # How far it has got until we look depends on the machine; never back, and not elsewhere.
        assert 0 <= first.updates - result["updates"] < 5000 and 0 <= first.steps - result["steps"] < 5000
        after = told_to_end(fleet, signal.SIGINT, 130)
        assert after["episodes"] > result["episodes"]
        following = next(record for record in records(fleet.run) if record["step"] > result["steps"])
        assert following["episodes"] >= result["episodes"]
        assert following["replay/size"] >= last["replay/size"], "the replay is there again"
        now = {(name, index): incarnation
               for name, index, incarnation, *_ in newest(fleet.run).state()["actor_registry"]["lives"]}
        assert now == {place: incarnation + 1 for place, incarnation in lives.items()}, (lives, now)
        assert_goes_forward(fleet.run)


def test_a_second_interrupt_does_not_wait(tmp_path):
    with FleetRun("train", "cartpole", *ENDLESS, cwd=tmp_path) as fleet:
        fleet.until(fleet.pulse)
        fleet.kill("learner", signal.SIGSTOP)
        fleet.head.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert fleet.head.poll() is None, "the first one waits for the learner"
        since = time.monotonic()
        fleet.head.send_signal(signal.SIGINT)
        code, _ = fleet.ended(20)
        print(f"gone after {time.monotonic() - since:.1f} s")
        fleet.assert_gone()
        assert code == 130 and "Traceback" not in fleet.complaints


def test_told_to_end_before_it_has_begun_it_does_not_begin_again(tmp_path):
    """The signal kills a learner that still imports: that is no death to be resumed from."""
    with FleetRun("train", "cartpole", *ENDLESS, "--restarts", "3", cwd=tmp_path) as fleet:
        fleet.until(lambda: fleet.pids().get("learner"))
        fleet.head.send_signal(signal.SIGTERM)
        code, result = fleet.ended(100)
        fleet.assert_gone()
        assert code == 75 and result["steps"] == 0, fleet.complaints
