"""Whatever stops a save (a full disk, a kill), the checkpoint before it is there and valid."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from checkpoint_kit import META, POLICY, STATE, contents, save, segment

from qfleet.core.replay import Segment
from qfleet.runs import atomic as draft_module
from qfleet.runs.atomic import DiskFull
from qfleet.runs.checkpoint import Checkpoints
from qfleet.runs.lock import LockOwner


@pytest.mark.slow
def test_a_reader_is_not_confused_by_a_run_that_rotates(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    stop, faults, seen = threading.Event(), [], set()

    def read():
        while not stop.is_set():
            try:
                seen.add(Checkpoints(tmp_path, keep=1).newest(set_aside=False).manifest.step)
            except Exception as fault:
                faults.append(repr(fault))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 30):
        save(checkpoints, step)
    stop.set()
    reader.join(timeout=30)
    assert not reader.is_alive() and faults == [] and seen
    assert "damaged" not in caplog.text


def test_leftovers_of_dead_writers_are_swept_and_living_ones_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=30)
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        host = LockOwner.current().host
        leftovers = [
            tmp_path / f".tmp-step-000000000001~{LockOwner(host, dead.pid, 'x-1')}",
            tmp_path / ".tmp-whatever",
            tmp_path / f".tmp-step-000000000001~{LockOwner('otherhost', os.getpid(), 'x-1')}"]
        living = [tmp_path / f".tmp-step-000000000002~{LockOwner(host, sleeper.pid, '')}",
                  tmp_path / f".tmp-step-000000000003~{LockOwner.current()}"]
        for folder in leftovers + living:
            folder.mkdir(parents=True)
            (folder / "policy.safetensors").write_bytes(b"half")
        save(Checkpoints(tmp_path, keep=1), 9)
        assert sorted(tmp_path.glob(".tmp-*")) == sorted(living)
    finally:
        sleeper.kill()
        sleeper.wait(timeout=30)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("when", range(1, 8))
def test_a_full_disk_leaves_everything_as_it_was(tmp_path, monkeypatch, when, number):
    """The n-th file to be synced does not fit: policy, config, state, arrays, segment, manifest, and the directory."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = save(checkpoints, 1, ["replay-a"])
    before, calls = contents(path), []
    real = os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == when:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(draft_module.os, "fsync", full)
        with pytest.raises(DiskFull, match="disk is full") as caught:
            save(checkpoints, 2, ["replay-b"])
    assert caught.value.errno == number
    assert [item.name for item in tmp_path.iterdir()] == [path.name] and contents(path) == before
    assert checkpoints.newest().manifest.step == 1
    save(checkpoints, 3)
    assert checkpoints.newest().manifest.step == 3


def test_a_disk_full_while_linking_is_a_full_disk(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(DiskFull):
        save(checkpoints, 2)


def test_another_error_is_passed_on_and_leaves_nothing(tmp_path):
    def broken():
        yield b"some"
        raise RuntimeError("codec")

    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(RuntimeError, match="codec"):
        checkpoints.save(1, 1, POLICY, STATE, [Segment("replay-x", broken)], META)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, timeout=30).returncode:
        pytest.skip("mounting is not permitted here; the faked full disk is tested above")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


def test_a_disk_that_is_really_full(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints", keep=2)
    save(checkpoints, 1)
    large = [segment("replay-large", bytes(2**21))]
    for step in (2, 3):
        with pytest.raises(DiskFull):
            checkpoints.save(step, 1, POLICY, STATE, large, META)
        with pytest.raises(DiskFull):
            checkpoints.save(step, 1, {"weight": torch.zeros(2**19)}, STATE, [], META)
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-000000000001"]
    assert checkpoints.newest().manifest.step == 1
    save(checkpoints, 4)
    assert checkpoints.newest().manifest.step == 4


KILL_LOOP = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Segment

root = Path(sys.argv[1])
meta = CheckpointMeta("seed: 1", EnvSpec("x", {"obs": Leaf((4,), "float32", "vector")}, 2))
policy = {"weight": torch.zeros(20000)}

def save_for_ever(done):
    checkpoints = Checkpoints(root, keep=2)
    found = checkpoints.newest()
    step = 0
    if found:
        checkpoints.resume_from(found)
        step = found.state()["step"]
    while True:
        step += 1
        names = range(step // 4, step // 4 + 5)
        segments = [Segment(f"replay-{n}", lambda n=n: [bytes([n % 256]) * 20000] * 3) for n in names]
        checkpoints.save(step, step, policy, {"step": step}, segments, meta)
        os.write(done, b".")

generator, last = random.Random(5), 0
for turn in range(20):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        save_for_ever(writing)
    os.read(reading, 1)
    begin = time.monotonic()
    os.read(reading, 1)
    time.sleep(1.5 * generator.random() * (time.monotonic() - begin))  # somewhere within the third save or the fourth
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = Checkpoints(root, keep=2).newest(set_aside=False)
    assert found is not None and found.state()["step"] == found.manifest.step >= last + 2, (turn, last, found)
    for name, file in found.segments():
        assert file.read_bytes() == bytes([int(name.split("-")[1]) % 256]) * 60000
    last = found.manifest.step
assert not list(root.glob("*.corrupt*"))
print(last)
"""


@pytest.mark.slow
def test_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILL_LOOP, str(tmp_path)], capture_output=True,
                          text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 40 and done.stderr == ""
    save(Checkpoints(tmp_path, keep=2), 10**6)
    assert not list(tmp_path.glob(".tmp-*"))
