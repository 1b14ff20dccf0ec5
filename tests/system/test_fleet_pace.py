"""Whoever is faster waits for the other: samples per step stay what the config says."""

import pytest
from fleet_runs import SMALL, FleetRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.alone]

WARM_UP, BATCH = 64, 16
WAITING = 4
"""Steps that may wait for the learner: an eighth of a chunk of each of the four lanes."""
MESSAGE = 2 * 2 * 8
"""Steps in one message at most: an actor that has not quite told a chunk of its two lanes plays another one first."""


@pytest.mark.parametrize(("source", "ratio", "steps", "limited"), [
    ("cartpole", 256, 600, "learner"), ("fleet_envs:Slow", 4, 1200, "actors")])
def test_the_ratio_holds_whoever_is_slow(tmp_path, source, ratio, steps, limited):
    with FleetRun("train", source, *SMALL, "actors=2", f"replay.samples_per_insert={ratio}", f"total_steps={steps}",
                  f"learner.batch_size={BATCH}", "run.name=x", cwd=tmp_path) as fleet:
        code, result = fleet.ended()
        assert code == 0 and result["steps"] < steps * 1.05, fleet.complaints
        records = [record for record in fleet.metrics() if record.get("replay/samples_per_insert")]
        # A message is taken while little waits for the learner, and then nothing until the learner has caught up.
        due = max(WAITING * ratio, 2 * BATCH) + MESSAGE * ratio
        behind = [(ratio - record["replay/samples_per_insert"]) * (record["step"] - WARM_UP) for record in records]
        assert len(behind) > 4 and all(-1e-6 < samples <= due for samples in behind), (behind, due)
        assert records[-1]["replay/samples_per_insert"] > 0.95 * ratio
        last = [record for record in records if record["step"] > steps * 2 / 3]
        held = max(record.get("fleet/backpressure_share", 0) for record in last)
        waited = max(record.get("time/idle_share", 0) for record in last)
        assert held > waited if limited == "learner" else held < waited, (held, waited)
