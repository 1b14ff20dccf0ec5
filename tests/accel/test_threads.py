"""Who may use which cores."""

import pytest
import torch

from qfleet.accel import gpu_memory, threads
from qfleet.accel.threads import decoding_threads, evaluator_threads, thread_plan, usable_cores
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.report import doctor
from qfleet.runconfig import auto, build
from qfleet.runconfig.resolution import resolve


@pytest.mark.parametrize(("images", "wish", "given"), [
    (False, "", 1), (False, "4", 1), (True, "", 8), (True, "3", 3), (True, "64", 8), (True, "0", 8), (True, "many", 8)])
def test_convolutions_take_all_cores_that_the_user_leaves_them(monkeypatch, images, wish, given):
    monkeypatch.setenv("OMP_NUM_THREADS", wish)
    plan = thread_plan(images, cores=8)
    assert plan.torch == given and plan.env == 8


@pytest.mark.parametrize(("gpu", "cores", "given"), [(False, 16, 1), (True, 16, 4), (True, 2, 1), (True, 1, 1)])
def test_an_evaluator_with_a_gpu_takes_cores_that_nobody_learns_on(gpu, cores, given):
    assert evaluator_threads(gpu, cores) == given


@pytest.mark.parametrize(("torch_has", "gpu", "alone", "wish", "given"), [
    (1, False, False, "", 1), (6, False, False, "", 6), (6, False, True, "3", 6),
    (1, True, False, "", 4), (1, True, True, "", 16), (1, True, True, "3", 3), (1, True, False, "1", 1),
    (8, True, False, "", 8)])
def test_batches_are_decoded_by_threads_that_wait_and_on_cores_that_are_idle(monkeypatch, torch_has, gpu, alone, wish,
                                                                             given):
    monkeypatch.setenv("OMP_NUM_THREADS", wish)
    assert decoding_threads(torch_has, gpu, alone, cores=16) == given


def test_many_more_threads_than_cores_are_refused_unless_qfleet_chose_them(monkeypatch):
    monkeypatch.setattr(build, "usable_cores", lambda: 2)
    config = resolve("cartpole", ["device=cpu", "run.threads=1000"]).config
    with pytest.raises(UserError, match=r"run.threads=1000: .* 2 cores.*set run.threads=2 or less"):
        auto.resolve_auto(config, VECTORS)
    chosen = config.model_copy(update={"run": config.run.model_copy(update={"settled": ("run.threads",)})})
    assert auto.resolve_auto(chosen, VECTORS).run.threads == 1000, "a run of a larger machine goes on here"


def test_a_quota_counts_as_cores(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(threads, "_quota", lambda: 3)
    assert usable_cores() == 3
    monkeypatch.setattr(threads, "_quota", lambda: 1 << 30)
    assert usable_cores() == 16


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 2), ("max 100000", 1 << 30), ("nonsense", 1 << 30)])
def test_the_quota_is_read_from_the_control_group(monkeypatch, text, cores):
    monkeypatch.setattr(threads.Path, "read_text", lambda self: text)
    assert threads._quota() == cores


PICTURES = EnvSpec("ALE/Pong-v5", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, 6)
VECTORS = EnvSpec("CartPole-v1", {"obs": Leaf((4,), "float32", "vector")}, 2)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("cores", [1, 2, 4, 16, 64])
@pytest.mark.parametrize(("words", "learners", "actors"), [
    ([], 1, 0), (["env.groups=2"], 1, 0), (["actors=1"], 1, 1), (["actors=3"], 1, 3), (["actors=15"], 1, 15),
    (["actors=63"], 1, 63), (["sync=server", "learners=2"], 2, 0),
    (["sync=allreduce", "learners=2"], 2, 0)])
def test_nobody_gets_more_threads_than_there_are_cores(monkeypatch, gpu, cores, words, learners, actors):
    """All who compute at once, learners with their threads and actors with one each; but one each they have."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpu))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda device: 80 << 30)
    for recipe, spec in (("pong", PICTURES), ("cartpole", VECTORS)):
        config = resolve(recipe, ["replay.capacity=50000", "replay.min_steps=1000", "learner.precision=fp32", *words])
        settled = auto.resolve_auto(config.config, spec)
        learner, decoders = settled.run.threads, build.make_plan(settled).decode_threads
        assert learner >= 1 and learner * learners + actors <= max(cores, learners + actors)
        assert decoders >= learner and decoders * learners + actors <= max(cores, learners + actors)
        if gpu or recipe == "cartpole":
            assert learner == 1, "what the GPU computes needs no thread, and a small network is fastest on one"
        elif cores >= learners + actors:
            assert learner == (cores - actors) // learners, "and no core is left idle"


@pytest.mark.parametrize(("words", "learners_here", "cores", "given"), [
    (["sync=allreduce", "learners=4"], None, 16, 4), (["sync=allreduce", "learners=4"], 2, 16, 8),
    (["sync=server", "learners=4"], None, 16, 4), (["sync=server", "learners=4"], None, 2, 1),
    (["sync=server", "learners=4", "launcher=ray", "ray.learner_cpus=3"], None, 16, 3)])
def test_learners_share_the_cores_of_their_host_or_have_those_that_ray_reserves(monkeypatch, words, learners_here,
                                                                                cores, given):
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    config = resolve("cartpole", words).config
    assert build.cores_per_learner(config, learners_here) == given
    assert build.with_env_threads(config, learners_here).env.threads == given


@pytest.mark.parametrize("cores", [1, 2, 4, 16, 64])
def test_the_plan_that_the_doctor_shows_is_within_the_cores(monkeypatch, cores):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    assert doctor._cpu()["threads"] == {"images": cores, "vectors": 1, "env": cores, "decode": max(1, cores // 4)}
