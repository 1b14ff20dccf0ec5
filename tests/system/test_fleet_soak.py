"""A short soak: CartPole is learnt although some process dies every few seconds. The long one is `make soak`."""

import pytest
from fleet_soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_cartpole_is_learnt_while_processes_are_killed(tmp_path):
    killed = soak(tmp_path, 40, (3.0, 6.0), 3, overrides=("stop_at=195", "total_steps=200000"))
    assert sum(killed.values()) >= 3, "or it was no soak"
