"""A shard over the wire: the same numbers as without it, nonsense refused by name, deaths survived."""

import math
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from qfleet.core.errors import ProcessFault, UserError
from qfleet.optim.optimizer import OptimizerConfig
from qfleet.sync.ps_shard import ParameterServerConfig, Push, Shard
from qfleet.transport import shard_service, shared_memory
from qfleet.transport.address import socket_address
from qfleet.transport.shard_client import GrpcShardChannel, RemoteShard
from qfleet.transport.shard_pb2 import Board as Ticket
from qfleet.transport.shard_pb2 import State
from qfleet.transport.shard_service import ShardServer, ShardService, pack_shard, to_bytes, to_tensor, unpack_shard

pytestmark = pytest.mark.timeout(60)
TOKEN, SIZE = "a-token-for-the-tests", 100


def shard(**cfg):
    weights = torch.linspace(-1, 1, SIZE)
    return Shard("shard 0", weights, OptimizerConfig(learning_rate=0.1), ParameterServerConfig(**cfg))


class Host:
    """One shard's process without the process."""

    def __init__(self, folder, **cfg):
        self.path, self.states = folder / "shard.sock", []

        def build(state):
            made = shard(**cfg)
            made.load_state_dict(state)
            return made

        self.service = ShardService(build, self.states.append)
        self.server = ShardServer(self.service, self.path, TOKEN, 1 << 20)

    def __enter__(self):
        self.server.__enter__()
        return self

    def __exit__(self, *failure):
        self.server.__exit__()

    def shelf(self, token=TOKEN, patience_s=20.0, **wait):
        return RemoteShard(GrpcShardChannel(socket_address(self.path), token), patience_s, **wait)


def push_of(shown, sequence=1, gradient=None, **other):
    gradient = torch.linspace(-2, 3, SIZE) if gradient is None else gradient
    known = {"worker": "w", "epoch": shown.epoch, "version": shown.version, "norm": 7.0} | other
    return Push(known["worker"], sequence, known["epoch"], known["version"], known["norm"], gradient)


@pytest.fixture(params=["shared", "no memory to share", "not found by the shard"])
def shared(request, monkeypatch):
    """Whether numbers lie where both see them; where that cannot be they travel."""
    def none(name, flags):
        raise OSError(38, "Function not implemented")

    if request.param == "no memory to share":
        monkeypatch.setattr(os, "memfd_create", none, raising=False)
    elif request.param != "shared":
        monkeypatch.setattr(shared_memory, "_path", lambda ticket: "/proc/1/fd/4711")
    return request.param == "shared"


@pytest.mark.parametrize("compensation", ["none", "adaptive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_arrive_as_they_are(tmp_path, caplog, compensation, dtype, shared):
    caplog.set_level("INFO")
    near = shard(compensation=compensation)
    with Host(tmp_path, compensation=compensation) as host:
        far = host.shelf()
        far.load(near.state_dict())
        for shelf in (near, far):
            _, shown = shelf.push_pull("w", None, True)()
            for sequence in range(1, 5):
                gradient = torch.randn(SIZE, generator=torch.Generator().manual_seed(sequence)).to(dtype)
                answer, shown = shelf.push_pull("w", push_of(shown, sequence, gradient), True)()
                assert (answer.verdict, answer.version, answer.staleness, shown.version) == (
                    "applied", sequence, 0, sequence)
        assert torch.equal(shown.weights, near.weights)
        assert len(host.service.shared_buffers) == shared
        assert caplog.text.count("no shared memory with") == (not shared), "said once, and why"
        copy = far.copy()
        for name, value in near.state_dict().items():
            same = torch.equal(copy[name], value) if isinstance(value, torch.Tensor) else copy[name] == value
            assert same, name
        assert far.status(10).version == 4 and dict(far.status(10).staleness) == {0: 4}
        far.close()


def test_nothing_but_words_is_sent_where_numbers_are_shared(tmp_path, monkeypatch):
    with Host(tmp_path) as host:
        shelf = host.shelf()
        shelf.load(shard().state_dict())
        _, shown = shelf.push_pull("w", None, True)()

        def sent(numbers):
            raise AssertionError("numbers were sent")

        monkeypatch.setattr(shard_service, "to_bytes", sent)
        for sequence in range(1, 4):
            answer, shown = shelf.push_pull("w", push_of(shown, sequence), True)()
        _, pulled = shelf.push_pull("w", None, True)()
        assert answer.verdict == "applied" and pulled.version == 3
        assert torch.equal(pulled.weights, host.service.shard.weights)


def test_what_is_asked_again_travels_and_a_late_answer_cannot_spoil_the_next_one(tmp_path):
    with Host(tmp_path) as host:
        shelf = host.shelf()
        shelf.load(shard().state_dict())
        _, shown = shelf.push_pull("w", None, True)()
        _, shown = shelf.push_pull("w", push_of(shown, 1), True)()
        first = shelf._buffer
        deadlines, meet = [], shelf._methods["Meet"]
        spied = SimpleNamespace(future=lambda data, timeout: deadlines.append(timeout) or meet.future(data, timeout))
        shelf._methods = dict(shelf._methods, Meet=spied)
        host.service.shard, kept = None, host.service.shard  # nothing is answered now
        waiting = shelf.push_pull("w", push_of(shown, 2), True)
        threading.Timer(0.3, lambda: setattr(host.service, "shard", kept)).start()
        answer, again = waiting()
        assert answer.verdict == "applied" and again.version == 2
        assert again.weights.data_ptr() != first.weights.data_ptr(), "it came by itself"
        assert deadlines[0] < deadlines[1], "as much time as its bytes may need"
        first.weights.fill_(7)  # somebody was late
        assert torch.equal(again.weights, kept.weights)
        answer, third = shelf.push_pull("w", push_of(again, 3), True)()
        assert answer.verdict == "applied" and torch.equal(third.weights, kept.weights)
        assert shelf._buffer is not first


@pytest.mark.parametrize("code, calls", [(0, ["pin", "let go"]), (2, ["pin", "a kernel on cuda"])])
def test_a_board_for_a_gpu_is_pinned_as_long_as_it_is_used_and_none_the_worse_where_it_cannot_be(
        monkeypatch, code, calls):
    class Driver:
        called: ClassVar = []

        def cudaHostRegister(self, at, size, flags):
            assert (size, flags) == (64, 0)
            made.at = at
            self.called.append("pin")
            return code

        def cudaHostUnregister(self, at):
            assert at == made.at
            self.called.append("let go")

    made = SimpleNamespace(at=0, one=torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch, "ones", lambda size, device: Driver.called.append(f"a kernel on {device}") or made.one)
    mine = shared_memory.OwnedSharedBuffer(8, pinned=True)
    assert made.at == mine.weights.data_ptr()
    mine.weights.fill_(2.5)
    assert shared_memory.SharedBufferCache().find(mine.ticket, 8).weights.tolist() == [2.5] * 8
    mine.close()
    assert Driver.called == calls


def test_boards_of_those_who_are_gone_are_forgotten():
    mine, boards = [shared_memory.OwnedSharedBuffer(8) for _ in range(3)], shared_memory.SharedBufferCache()
    mine[0].weights.fill_(1.5)
    mine[0].gradient(torch.bfloat16).fill_(2)
    found = boards.find(mine[0].ticket, 8)
    assert found.weights.tolist() == [1.5] * 8 and found.gradient(torch.bfloat16).tolist() == [2] * 8
    assert boards.find(mine[0].ticket, 8) is found
    boards.find(mine[1].ticket, 8)
    mine[0].close()
    mine[1].close()
    boards.find(mine[2].ticket, 8)
    assert len(boards) == 1
    with pytest.raises(FileNotFoundError):
        boards.find(mine[0].ticket, 8)
    mine[2].close()


def test_only_a_sealed_board_of_the_right_size_and_name_is_taken():
    mine, boards = shared_memory.OwnedSharedBuffer(8), shared_memory.SharedBufferCache()
    with pytest.raises(OSError, match="has 64 bytes, which are not 9 weights"):
        boards.find(mine.ticket, 9)
    with pytest.raises(FileNotFoundError, match=f"process {os.getpid()} has no shared buffer qfleet-other"):
        boards.find(Ticket(pid=os.getpid(), fd=mine.ticket.fd, name="qfleet-other"), 8)
    with pytest.raises(PermissionError):
        os.ftruncate(mine.ticket.fd, 8)
    for name, words in (("qfleet-open", "or is not sealed"), ("strange", "has no shared buffer strange")):
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 64)
        with pytest.raises(OSError, match=words):
            boards.find(Ticket(pid=os.getpid(), fd=fd, name=name), 8)
        os.close(fd)
    assert len(boards) == 0
    mine.close()


def test_a_board_is_seen_by_another_process():
    mine = shared_memory.OwnedSharedBuffer(8)
    mine.gradient(torch.float32).fill_(3)
    words = ("import sys; from qfleet.transport.shared_memory import SharedBufferCache, Ticket; "
             "ticket = Ticket(pid=int(sys.argv[1]), fd=int(sys.argv[2]), name=sys.argv[3]); "
             "found = SharedBufferCache().find(ticket, 8); "
             "found.weights[:] = 2 * found.gradient(found.weights.dtype)")
    ticket = mine.ticket
    subprocess.run([sys.executable, "-c", words, str(ticket.pid), str(ticket.fd), ticket.name], check=True, timeout=50)
    assert mine.weights.tolist() == [6] * 8
    mine.close()


def test_running_figures_travel_with_a_gradient_and_come_back_without_one(tmp_path):
    with Host(tmp_path) as host:
        shelf = host.shelf()
        shelf.load(shard().state_dict())
        _, shown = shelf.push_pull("w", None, True)()
        assert shown.buffers == {}
        push = push_of(shown)
        push = Push(push.worker, 1, push.epoch, push.version, push.norm, push.gradient, {"count": torch.tensor(3)})
        assert shelf.push_pull("w", push, True)()[1].buffers == {}
        assert shelf.push_pull("w", None, True)()[1].buffers == {"count": torch.tensor(3)} == shelf.copy()["buffers"]


def test_moments_of_rows_travel_with_a_gradient_and_come_back_with_the_weights(tmp_path):
    buffers = {"row_count": torch.zeros((), dtype=torch.float64), "row_mean": torch.zeros(1, dtype=torch.float64),
               "row_square": torch.zeros(1, dtype=torch.float64), "count": torch.tensor(3)}
    with Host(tmp_path) as host:
        shelf = host.shelf()
        shelf.load(shard().state_dict() | {"buffers": buffers})
        push = push_of(shelf.push_pull("w", None, True)()[1])
        rows = torch.tensor([[4.0, 2.5, 1.0], [4.0, 2.5, 1.0]], dtype=torch.float64)
        push = Push(push.worker, 1, push.epoch, push.version, push.norm, push.gradient, rows=rows)
        shown = shelf.push_pull("w", push, True)()[1].buffers
        assert {name: value.tolist() for name, value in shown.items()} == {
            "row_count": 8, "row_mean": [2.5], "row_square": [2]}
        assert shelf.copy()["buffers"]["count"] == 3


def test_nothing_is_answered_before_there_are_weights_and_what_was_given_is_kept(tmp_path):
    with Host(tmp_path) as host:
        waiting = host.shelf(patience_s=0.0)
        with pytest.raises(ProcessFault, match="no answer from the shard"):
            waiting.push_pull("w", None, True)()
        assert waiting.status() is None
        late, found = host.shelf(), []
        reader = threading.Thread(target=lambda: found.append(late.push_pull("w", None, True)()[1]))
        reader.start()
        host.shelf().load(shard().state_dict())
        reader.join(20)
        assert torch.equal(found[0].weights, shard().weights)
        assert torch.equal(unpack_shard(host.states[0])["weights"], shard().weights)


def test_nonsense_is_refused_by_name(tmp_path):
    with Host(tmp_path) as host:
        shelf = host.shelf()
        shelf.load(shard().state_dict())
        _, shown = shelf.push_pull("w", None, True)()
        for wrong, message in [
            ({"gradient": torch.full((SIZE,), math.nan)}, "shard 0 rejects a gradient from w: it is not finite"),
            ({"gradient": torch.zeros(SIZE - 1)}, r"its shape is \(99,\), not \(100,\)"),
            ({"norm": math.inf}, "not finite"), ({"version": 7}, "computed at version 7, but the newest is 0"),
        ]:
            with pytest.raises(ProcessFault, match=message):
                shelf.push_pull("w", push_of(shown, **wrong), True)()
        assert shelf.status(10).refused == 4 and shelf.status(10).version == 0
        with pytest.raises(UserError, match="does not know this token"):
            host.shelf("another").push_pull("w", None, True)()
        with pytest.raises(ProcessFault, match="not valid safetensors"):
            shelf._call("Load", State(tensors=b"\x80\x04rubbish").SerializeToString())()
        spoilt = shard().state_dict() | {"mean": torch.full((SIZE,), math.inf)}
        with pytest.raises(ProcessFault, match="mean of a shard: not finite"):
            shelf.load(spoilt)
        assert shelf.push_pull("w", push_of(shown), False)()[0].verdict == "applied", "it goes on as it was"


def test_a_push_that_is_sent_again_counts_once_and_one_for_a_former_life_not_at_all(tmp_path):
    with Host(tmp_path) as host:
        shelf = host.shelf()
        shelf.load(shard().state_dict())
        _, shown = shelf.push_pull("w", None, True)()
        assert [shelf.push_pull("w", push_of(shown), False)()[0].verdict for _ in range(2)] == ["applied", "repeated"]
        state = shelf.copy()
        shelf.load(state)
        assert shelf.push_pull("w", push_of(shown, 2), False)()[0].verdict == "anew"
        _, shown = shelf.push_pull("w", None, True)()
        assert shelf.push_pull("w", push_of(shown, 2), False)()[0].verdict == "applied"


def test_whoever_waits_for_a_dead_shard_waits_for_the_next_or_is_told_to_stop(tmp_path):
    class Enough(Exception):
        pass

    with Host(tmp_path) as host:
        shelf = host.shelf()
        shelf.load(shard().state_dict())
        _, shown = shelf.push_pull("w", None, True)()
        state = shelf.copy()
    found = []
    waiter = threading.Thread(target=lambda: found.append(shelf.push_pull("w", push_of(shown), True)()))
    waiter.start()
    with Host(tmp_path) as host:
        host.service.shard = host.service.build(state)
        waiter.join(30)
        answer, shown = found[0]
        assert answer.verdict == "anew" and shown.epoch == host.service.shard.epoch, "refused, and pulled at once"

    def enough(seconds):
        raise Enough

    shelf.wait = enough
    with pytest.raises(Enough):
        shelf.push_pull("w", None, True)()


def test_bytes_that_are_no_numbers_are_no_numbers():
    for dtype in (torch.float32, torch.bfloat16):
        numbers = torch.randn(7).to(dtype)
        assert torch.equal(to_tensor(to_bytes(numbers), dtype), numbers)
        with pytest.raises(ValueError, match="are not a multiple of"):
            to_tensor(b"123", dtype)
    whole = shard(compensation="adaptive").state_dict()
    assert set(unpack_shard(pack_shard(whole))) == set(whole)
    with pytest.raises(ValueError, match="a shard's state has"):
        unpack_shard(pack_shard({name: value for name, value in whole.items() if name != "mean"}))
    with pytest.raises(ValueError, match="of a shard is"):
        unpack_shard(pack_shard(whole | {"mean": torch.zeros(3)}))
