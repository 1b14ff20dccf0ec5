"""The memory plan of a device replay: too large a replay is refused with a capacity that fits."""

import pytest
import torch

from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.core.replay import Window
from qfleet.replay.config import ReplayConfig
from qfleet.replay.device_store import DeviceReplay
from qfleet.replay.layout import Layout
from qfleet.replay.memory_plan import plan_device_memory

ATARI = Layout(EnvSpec("a", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, 6), Window(future=3), 64,
               {"row": ((), "int64"), "flag": ((3,), "bool")})


def test_a_store_takes_the_planned_memory():
    cfg = ReplayConfig(capacity=6_400)
    planned, taken = plan_device_memory(ATARI, cfg, None).total, DeviceReplay(ATARI, cfg, 0, torch.device("cpu")).nbytes
    assert planned <= taken <= planned + 84 * 84  # plus one zero frame


@pytest.mark.parametrize("limits", [({"max_bytes": 3 * 10**9}, None), ({}, int(3 * 10**9 / 0.8))])
def test_a_replay_that_does_not_fit_is_refused_with_a_capacity_that_fits(limits):
    settings, free = limits
    message = r"needs 7\.\d+ GB on the device .* is 3 GB: lower replay.capacity to \d"
    with pytest.raises(UserError, match=message) as info:
        plan_device_memory(ATARI, ReplayConfig(capacity=1_000_000, **settings), free)
    advised = int(str(info.value).split("replay.capacity to ")[1].split(",")[0])
    assert 350_000 < advised < 450_000
    plan_device_memory(ATARI, ReplayConfig(capacity=advised, **settings), free)
