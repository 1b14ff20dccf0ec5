"""Free memory of a GPU is asked of the driver, and of torch only where the driver does not answer."""

import types

import pytest
import torch

from qfleet.accel import gpu_memory

GPU = torch.device("cuda:0")


class Driver:
    """NVML with one GPU; `refuse` names a call that fails."""

    def __init__(self, refuse=""):
        self.refuse, self.calls = refuse, []

    def _answer(self, name):
        self.calls.append(name)
        return 999 if name == self.refuse else 0

    def nvmlInit_v2(self):
        return self._answer("init")

    def nvmlShutdown(self):
        return self._answer("shutdown")

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        assert name == b"GPU-1234"
        handle._obj.value = 77
        return self._answer("handle")

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        assert handle.value == 77
        memory._obj.total, memory._obj.free, memory._obj.used = 100, 60, 40
        return self._answer("memory")


@pytest.fixture
def torch_asked(monkeypatch):
    """The devices whose memory torch was asked for, for which it makes a context."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (50, 100))[1])
    return asked


def test_the_driver_is_asked_and_torch_is_not(monkeypatch, torch_asked):
    driver = Driver()
    monkeypatch.setattr(gpu_memory, "_library", lambda: driver)
    assert gpu_memory.free_bytes(GPU) == 60 and torch_asked == []
    assert driver.calls == ["init", "handle", "memory", "shutdown"]


@pytest.mark.parametrize("refuse", ["init", "handle", "memory"])
def test_where_it_refuses_torch_is_asked(monkeypatch, torch_asked, refuse):
    driver = Driver(refuse)
    monkeypatch.setattr(gpu_memory, "_library", lambda: driver)
    assert gpu_memory.free_bytes(GPU) == 50 and torch_asked == [GPU]
    assert ("shutdown" in driver.calls) == (refuse != "init")


@pytest.mark.parametrize("missing", [OSError("no such file"), AttributeError("nvmlInit_v2")])
def test_where_there_is_none_torch_is_asked(monkeypatch, torch_asked, missing):
    def library():
        raise missing

    monkeypatch.setattr(gpu_memory, "_library", library)
    assert gpu_memory.free_bytes(GPU) == 50


def test_without_a_gpu_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_memory.free_bytes(GPU) is None


@pytest.mark.gpu
def test_a_real_driver_knows_as_much_free_memory_as_torch():
    found, its = gpu_memory.free_bytes(GPU), torch.cuda.mem_get_info(GPU)[0]
    assert gpu_memory._free_from_driver(gpu_memory._library(), gpu_memory._uuid_of(GPU)) is not None
    assert abs(found - its) < 1 << 30  # torch leaves out what the driver reserves
