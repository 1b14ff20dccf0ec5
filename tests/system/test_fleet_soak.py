"""A short soak: CartPole is learnt although some process dies every few seconds. The long one is `make soak`."""

import pytest
from fleet_soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_cartpole_is_learnt_while_processes_are_killed(tmp_path):
    soak(tmp_path, 30, (2.0, 5.0), 3, least=4, overrides=("stop_at=300", "eval.episodes=10", "total_steps=200000"))
