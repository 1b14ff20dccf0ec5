"""Where an update's time goes: clocks that nest, work that is counted by hand, and a learner taken apart."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from qfleet.bench import kernels
from qfleet.bench import profile as profiling
from qfleet.bench.profile import Clocks, Part, measure, profile
from qfleet.bench.stage import Stage
from qfleet.cli import main
from qfleet.roles import learner as learning
from qfleet.roles.taped import Taped

TINY = ["agent.hidden=[8]", "agent.double=false", "agent.n_step=1", "learner.batch_size=16", "run.threads=1",
        "device=cpu", "replay.capacity=2000"]
COMMON = ["sample", "gather, decode", "optimizer", "priorities", "target network", "publish", "the rest"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(profiling, "PROBE_S", 0.01)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_an_inner_part_is_not_counted_twice():
    clocks = Clocks(lambda: None)
    inner = clocks.timed("inner", lambda: time.sleep(0.05))

    def work():
        time.sleep(0.02)
        inner()

    begin = time.perf_counter()
    clocks.timed("outer", work)()
    whole = time.perf_counter() - begin
    (inside, _), (outside, _) = clocks.spent["inner"], clocks.spent["outer"]
    assert inside >= 0.05 and outside >= 0.02
    assert inside + outside <= whole


def test_a_part_that_fails_is_still_counted():
    clocks = Clocks(lambda: None)
    with pytest.raises(ZeroDivisionError):
        clocks.timed("part", lambda: 1 / 0)()
    assert "part" in clocks.spent and clocks._inner[0][0] > 0


def test_distance_is_by_cpu_on_a_cpu_and_by_the_clock_on_a_gpu():
    assert Part("x", 10.0, 4.0, 2.0).distance == 2.0
    assert Part("x", 10.0, 4.0, 2.0, on_gpu=True).distance == 5.0
    assert Part("x", 10.0, 4.0).distance is None


def test_the_machine_multiplies_and_copies():
    rates = measure(torch.device("cpu"), torch.float32)
    assert rates.flops > 1e8 and rates.bytes_per_s > 1e7


def test_a_tiny_learner_taken_apart():
    found = profile("cartpole", TINY, 12, 64)
    names = [part.name for part in found.parts]
    assert names == ["sample", "gather, decode", "forward, loss", "backward", *COMMON[2:]]
    assert all(part.ms > 0 for part in found.parts)
    assert found.updates_per_s == pytest.approx(1e3 / sum(part.ms for part in found.parts))
    # Two forward passes through 4 × 8 and 8 × 2; backward twice the last layer (weights and input) and once the first.
    batch, first, last = 16, 4 * 8, 8 * 2
    forward, backward = 2 * batch * 2 * (first + last), 2 * batch * (first + 2 * last)
    assert found.settings["gflop"] * 1e9 == pytest.approx(forward + backward)
    roofs = {part.name: part.roof_ms for part in found.parts}
    assert roofs["forward, loss"] == pytest.approx(1e3 * forward / found.rates.flops)
    assert roofs["sample"] is None and roofs["optimizer"] > 0
    assert json.loads(json.dumps(found.to_json()))["parts"][2]["distance"] > 0


class Unseen(Taped):
    """Plays back what no counter sees, as a CUDA graph does."""

    recorded = True

    def __call__(self, sample):
        with _disable_current_modes():
            return self.eager(sample)


def test_what_a_gpu_plays_back_is_counted_operation_by_operation(monkeypatch):
    eager = profile("cartpole", TINY, 4, 64)
    deriving = learning.Learner._deriving
    monkeypatch.setattr(learning.Learner, "_deriving", lambda *given: Unseen(deriving(*given)))
    found = profile("cartpole", TINY, 4, 64)
    assert profiling.RECORDED in [part.name for part in found.parts]
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
def test_kernels_are_told_by_their_names(name, group):
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
    assert kernels.observed(lambda updates: torch.ones(8).sum().int().item(), lambda: None, 2) == []


def test_a_stage_learns_only_from_what_was_played():
    stage = Stage("cartpole", [*TINY, "replay.min_steps=64"])
    with pytest.raises(RuntimeError, match="fill the replay first"):
        stage.learn(1)
    stage.fill(64)
    assert stage.learn(3) == 3 == stage.learner.updates
    assert stage.replay.steps > 64 and stage.play() == 8
    stage.close()


def test_the_verb_tells_and_writes_a_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "cartpole", "--profile", "--quick", "--out", "p", *TINY[:4]]) == 0
    said = capsys.readouterr().out
    assert "GFLOP/s" in said and "optimizer" in said and said.splitlines()[-1] == "p/profile.json"
    assert json.loads((tmp_path / "p" / "profile.json").read_text())["profile"]["cartpole"]["parts"]
