"""Whoever is faster waits for the other: samples per step stay what the config says."""

import pytest
from fleet_runs import SMALL, FleetRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.alone]


@pytest.mark.parametrize(("source", "ratio", "steps", "limited"), [
    ("cartpole", 256, 600, "learner"), ("fleet_envs:Slow", 4, 1200, "actors")])
def test_the_ratio_holds_whoever_is_slow(tmp_path, source, ratio, steps, limited):
    with FleetRun("train", source, *SMALL, "actors=2", f"replay.samples_per_insert={ratio}", f"total_steps={steps}",
                  "learner.batch_size=16", "run.name=x", cwd=tmp_path) as fleet:
        code, result = fleet.ended()
        last = [record for record in fleet.metrics() if record["step"] > steps * 2 / 3]
        assert code == 0 and result["steps"] < steps * 1.05, fleet.complaints
        found = [record["replay/samples_per_insert"] for record in last]
        # On the way the slower one may be a little behind, which in so short a run is more than in a real one.
        assert all(0.9 * ratio < each < 1.05 * ratio for each in found) and 0.95 * ratio < found[-1], found
        held = max(record.get("fleet/held_share", 0) for record in last)
        waited = max(record.get("time/idle_share", 0) for record in last)
        assert held > waited if limited == "learner" else held < waited, (held, waited)
