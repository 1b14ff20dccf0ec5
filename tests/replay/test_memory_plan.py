"""The memory plan, and the free memory of the machine and its control groups."""

import pytest
import torch

from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.core.replay import Window
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout
from qfleet.replay.memory_plan import IMAGE_RATIO, available_memory, plan_memory
from qfleet.replay.priorities import importance_exponent

ATARI = Layout(EnvSpec("a", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, 6), Window(), 64)
GB = 10**9


def test_a_million_atari_steps():
    planned = plan_memory(ATARI, ReplayConfig(capacity=1_000_000), available_bytes=8 * GB)
    assert planned.tree_bytes == 2**24
    assert planned.blob_bytes_estimate == pytest.approx(1e6 * 68 / 64 * 84 * 84 / IMAGE_RATIO, rel=1e-6)
    assert planned.total == planned.dense_bytes + planned.tree_bytes + planned.blob_bytes_estimate
    assert planned.max_bytes == pytest.approx(0.8 * 8 * GB)


def test_an_empty_store_has_the_planned_size():
    cfg = ReplayConfig(capacity=10_000)
    assert HostReplay(ATARI, cfg, 0, torch.device("cpu")).nbytes == plan_memory(ATARI, cfg, available_bytes=GB).fixed


def test_vectors_are_planned_without_compression():
    wide = Layout(EnvSpec("w", {"obs": Leaf((100,), "float32", "vector")}, 2), Window(), 50)
    planned = plan_memory(wide, ReplayConfig(capacity=5000, chunk_steps=50), available_bytes=GB)
    assert planned.blob_bytes_estimate == 100 * 51 * 400


@pytest.mark.parametrize(("cfg", "available", "message"), [
    ({"capacity": 1_000_000}, GB, "replay.capacity=1000000 needs about .* but may take 800 MB"),
    ({"capacity": 1_000_000, "max_bytes": 2 * GB}, GB, "max_bytes=2 GB is more than the 1 GB of free memory"),
    ({"capacity": 1_000_000, "max_bytes": 10**7}, GB, "max_bytes=10 MB does not hold replay.min_steps=1000"),
    ({"capacity": 32}, GB, "capacity=32 does not hold one chunk"),
])
def test_plans_that_cannot_fit_are_refused_with_the_sizes(cfg, available, message):
    with pytest.raises(UserError, match=message):
        plan_memory(ATARI, ReplayConfig.model_validate(cfg), available_bytes=available)


def test_max_bytes_may_be_below_the_estimate():
    assert plan_memory(ATARI, ReplayConfig(capacity=1_000_000, max_bytes=GB // 2), GB).max_bytes == GB // 2


def test_the_store_refuses_a_limit_below_its_arrays():
    with pytest.raises(UserError, match="raise max_bytes or lower the capacity"):
        HostReplay(ATARI, ReplayConfig(capacity=1_000_000, max_bytes=10**6), 0, torch.device("cpu"))


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_available_memory_is_the_minimum_of_all_limits(tmp_path):
    write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4000 kB\n"})
    assert available_memory(tmp_path) == 4_096_000
    write(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n",
                     "sys/fs/cgroup/a/memory.max": "3000000\n", "sys/fs/cgroup/a/memory.current": "1500000\n",
                     "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 500000\n"})
    assert available_memory(tmp_path) == 2_000_000
    write(tmp_path, {"proc/self/cgroup": "5:cpu,memory:/job\n4:cpu:/x\n",
                     "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "700000",
                     "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "650000",
                     "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 0\n"})
    assert available_memory(tmp_path) == 50_000


def test_available_memory_is_known_on_this_machine():
    assert available_memory() > 10**6


def test_contradictory_settings_are_reported():
    cfg = ReplayConfig(capacity=100, min_steps=200, chunk_steps=6)
    found = "\n".join(cfg.problems(batch_size=128, window=Window(future=7, stride=4), lanes=32))
    for part in ("learner.batch_size=128 exceeds replay.capacity=100", "replay.min_steps=200 exceeds", "set it to 8",
                 "look-ahead of 7 steps (agent.n_step) is longer than replay.chunk_steps=6",
                 "below one chunk per lane"):
        assert part in found
    assert ReplayConfig().problems(32, Window(future=3), 8) == []


def test_beta_needs_alpha():
    assert set(ReplayConfig().inactive()) == {"beta_start", "beta_end", "beta_steps"}
    assert ReplayConfig(alpha=0.6).inactive() == {}


def test_beta_is_linear_in_steps_and_exact_beyond_two_to_the_31():
    cfg = ReplayConfig(alpha=0.5, beta_start=0.4, beta_end=1.0, beta_steps=2**32)
    start, middle, later, end = (importance_exponent(cfg, steps) for steps in (0, 2**31, 2**31 + 1, 2**33))
    assert start == 0.4 and middle == pytest.approx(0.7) and end == 1.0
    assert later > middle
