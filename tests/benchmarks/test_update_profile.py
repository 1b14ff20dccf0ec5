"""The profile of an update: nested timers, operations counted by hand, and the rows of a small learner."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext

import bench
import pytest
import torch
from speed import gpu_kernels as kernels
from speed import update_profile as profiling
from speed.stage import BenchStage
from speed.update_profile import NestedTimer, ProfileRow, measure, profile
from torch.utils._python_dispatch import _disable_current_modes

from qfleet.accel.graph_gradient import GraphGradient
from qfleet.learner import learner as learning

TINY = ["agent.hidden=[8]", "agent.double=false", "agent.n_step=1", "learner.batch_size=16", "run.threads=1",
        "device=cpu", "replay.capacity=2000"]
COMMON = ["sample", "gather, decode", "optimizer", "priorities", "target network", "publish", "the rest"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(profiling, "PROBE_S", 0.01)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_time_of_an_inner_call_is_not_counted_twice():
    timer = NestedTimer(lambda: None)
    inner = timer.timed("inner", lambda: time.sleep(0.05))

    def work():
        time.sleep(0.02)
        inner()

    begin = time.perf_counter()
    timer.timed("outer", work)()
    whole = time.perf_counter() - begin
    (inside, _), (outside, _) = timer.spent["inner"], timer.spent["outer"]
    assert inside >= 0.05 and outside >= 0.02
    assert inside + outside <= whole


def test_a_call_that_fails_is_still_counted():
    timer = NestedTimer(lambda: None)
    with pytest.raises(ZeroDivisionError):
        timer.timed("part", lambda: 1 / 0)()
    assert "part" in timer.spent and timer._inner[0][0] > 0


def test_distance_uses_cpu_time_on_a_cpu_and_wall_time_on_a_gpu():
    assert ProfileRow("x", 10.0, 4.0, 2.0).distance == 2.0
    assert ProfileRow("x", 10.0, 4.0, 2.0, on_gpu=True).distance == 5.0
    assert ProfileRow("x", 10.0, 4.0).distance is None


def test_peak_rates_are_measured():
    rates = measure(torch.device("cpu"), torch.float32)
    assert rates.flops > 1e8 and rates.bytes_per_s > 1e7


def test_rows_of_a_small_learner():
    found = profile("cartpole", TINY, 12, 64)
    names = [row.name for row in found.rows]
    assert names == ["sample", "gather, decode", "forward, loss", "backward", *COMMON[2:]]
    assert all(row.ms > 0 for row in found.rows)
    assert found.updates_per_s == pytest.approx(1e3 / sum(row.ms for row in found.rows))
    # Two forward passes through 4 × 8 and 8 × 2; backward twice the last layer (weights and input) and once the first.
    batch, first, last = 16, 4 * 8, 8 * 2
    forward, backward = 2 * batch * 2 * (first + last), 2 * batch * (first + 2 * last)
    assert found.settings["gflop"] * 1e9 == pytest.approx(forward + backward)
    roofs = {row.name: row.roof_ms for row in found.rows}
    assert roofs["forward, loss"] == pytest.approx(1e3 * forward / found.rates.flops)
    assert roofs["sample"] is None and roofs["optimizer"] > 0
    assert json.loads(json.dumps(found.to_json()))["parts"][2]["distance"] > 0


class Unseen(GraphGradient):
    """Runs operations that the counter does not see, as a CUDA graph does."""

    captured = True

    def __call__(self, sample):
        with _disable_current_modes():
            return self.autograd(sample)


def test_operations_of_a_cuda_graph_are_counted_eagerly(monkeypatch):
    eager = profile("cartpole", TINY, 4, 64)
    deriving = learning.Learner._make_gradient_fn
    monkeypatch.setattr(learning.Learner, "_make_gradient_fn", lambda *given: Unseen(deriving(*given)))
    found = profile("cartpole", TINY, 4, 64)
    assert profiling.RECORDED in [row.name for row in found.rows]
    assert found.settings["gflop"] == pytest.approx(eager.settings["gflop"])


@pytest.mark.parametrize(("name", "group"), [
    ("sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", kernels.MATRIX),
    ("nvjet_sm90_tst_32x64_64x16_4x1_v_bz_splitK_bias_TNN", kernels.MATRIX),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", kernels.MATRIX),
    ("void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>", kernels.REDUCTION),
    ("void at_cuda_detail::cub::detail::scan::DeviceScanKernel<double>", kernels.REDUCTION),
    ("triton_red_fused_sum_threshold_backward_15", kernels.REDUCTION),
    ("triton_poi_fused_clone_convolution_relu_threshold_backward_3", kernels.ELEMENTWISE),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::AbsFunctor<float>", kernels.ELEMENTWISE),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", "copy, gather"),
    ("void at::native::_scatter_gather_elementwise_kernel<128, 8>", "copy, gather"),
    ("Memcpy DtoD (Device -> Device)", "copy, gather"), ("lay", "copy, gather"), ("adam", "optimizer"),
    ("unfinish", kernels.ELEMENTWISE), ("layer", kernels.OTHER)])
def test_kernels_are_grouped_by_their_names(name, group):
    assert kernels.group_of(name) == group


def test_groups_of_kernels_have_shares_and_only_products_a_roof():
    found = kernels.grouped([("nvjet", 300.0, 4), ("adam", 100.0, 2), ("gemm", 500.0, 2)], 2, 0.1)
    assert [(one.name, one.ms, one.count) for one in found] == [(kernels.MATRIX, 0.4, 3), ("optimizer", 0.05, 1)]
    assert found[0].distance == pytest.approx(4.0) and found[1].distance is None
    said = kernels.lines(found)
    assert "89 %" in said[1] and said[1].endswith("4.0 ×") and said[2].endswith("11 %")
    assert said[-1].split() == ["all", "kernels", "0.450", "4"]
    assert kernels.lines([]) == []


def test_a_gpu_is_timed_by_its_own_clock_over_many_launches(monkeypatch):
    tape = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            tape.append("record")

        def synchronize(self):
            tape.append("wait")

        def elapsed_time(self, end):
            return 20.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    assert profiling._fastest_launches(torch.device("cuda"), lambda: tape.append("call")) == pytest.approx(0.002)
    assert tape[:14] == ["call", "record", *["call"] * 10, "record", "wait"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_profiler_without_a_gpu_sees_no_kernels():
    assert kernels.trace_kernels(lambda updates: torch.ones(8).sum().int().item(), lambda: None, 2) == []


def test_a_stage_needs_experience_to_learn_from():
    stage = BenchStage("cartpole", [*TINY, "replay.min_steps=64"])
    with pytest.raises(RuntimeError, match="fill the replay first"):
        stage.learn(1)
    stage.fill(64)
    assert stage.learn(3) == 3 == stage.learner.updates
    assert stage.replay.clock.steps > 64 and stage.play() == 8
    stage.close()


def test_the_script_prints_and_writes_a_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench.main(["cartpole", "--profile", "--quick", "--out", "p", *TINY[:4]]) == 0
    said = capsys.readouterr().out
    assert "GFLOP/s" in said and "optimizer" in said and said.splitlines()[-1] == "p/profile.json"
    assert json.loads((tmp_path / "p" / "profile.json").read_text())["profile"]["cartpole"]["parts"]
