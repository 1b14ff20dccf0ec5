"""Numbers that two processes of a host share, so that they need not be sent.

    learner   makes a file without a path (memfd), maps it          gradient ─▶ ┌───────┐ ─▶ step
    shard     finds it as /proc/PID/fd/FD of the learner, maps it   weights  ◀─ └───────┘ ◀─

The kernel frees the memory when neither of them has it any more, however they ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from contextlib import suppress

import numpy as np
import torch

from qfleet.transport.shard_pb2 import Board as Ticket

FLOAT = torch.float32.itemsize
PREFIX = "qfleet-"


class SharedBuffer:
    """Weights, and as many numbers of a gradient. Who has written there tells the other one by a call."""

    def __init__(self, fd: int, numbers: int) -> None:
        self.numbers = numbers
        self.memory = torch.from_numpy(np.frombuffer(mmap.mmap(fd, 2 * numbers * FLOAT), np.uint8))
        self.weights = self.memory[:numbers * FLOAT].view(torch.float32)

    def gradient(self, dtype: torch.dtype) -> torch.Tensor:
        begin = self.numbers * FLOAT
        return self.memory[begin:begin + self.numbers * dtype.itemsize].view(dtype)


class OwnedSharedBuffer(SharedBuffer):
    """One that this process has made. OSError where there is no such memory.

    For somebody whose numbers are on a GPU it is `pinned` where that can be: copies are several times as fast.
    """

    def __init__(self, numbers: int, pinned: bool = False) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a path")
        name = PREFIX + secrets.token_hex(8)
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, 2 * numbers * FLOAT)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _seals())
            super().__init__(self._fd, numbers)
        except (OSError, ValueError):
            os.close(self._fd)
            raise
        self.ticket = Ticket(pid=os.getpid(), fd=self._fd, name=name)
        self._pinned = pinned and _pin(self.memory)

    def close(self) -> None:
        """The ticket leads nowhere any more; who has the board keeps it."""
        if self._pinned:  # or a GPU would take what is mapped there next for this
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
        os.close(self._fd)


class SharedBufferCache:
    """Those that others have made, found by their tickets; of those who are gone they are kept until the next one."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Ticket, SharedBuffer]] = {}
        self._lock = threading.Lock()

    def find(self, ticket: Ticket, numbers: int) -> SharedBuffer:
        """OSError unless it is there, and has room for so many weights."""
        key = ticket.SerializeToString()
        with self._lock:
            if key not in self._known:
                self._known = {old: known for old, known in self._known.items() if _is_at(_path(known[0]), known[0])}
                self._known[key] = ticket, _opened(ticket, numbers)
            return self._known[key][1]

    def __len__(self) -> int:
        return len(self._known)


def _opened(ticket: Ticket, numbers: int) -> SharedBuffer:
    """The board behind a ticket, if it is one, and of a size that nobody can change any more."""
    fd = os.open(_path(ticket), os.O_RDWR | os.O_CLOEXEC)
    try:
        if not _is_at(f"/proc/self/fd/{fd}", ticket):
            raise FileNotFoundError(f"process {ticket.pid} has no board {ticket.name}")
        size = os.fstat(fd).st_size
        if size != 2 * numbers * FLOAT or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise OSError(f"{ticket.name} has {size} bytes, not those of {numbers} weights, or is not sealed")
        return SharedBuffer(fd, numbers)
    finally:
        os.close(fd)  # what is mapped stays so


def _is_at(path: str, ticket: Ticket) -> bool:
    """Whether a descriptor is what it was when the ticket was written."""
    with suppress(OSError):
        return ticket.name.startswith(PREFIX) and os.readlink(path) == f"/memfd:{ticket.name} (deleted)"
    return False


def _path(ticket: Ticket) -> str:
    return f"/proc/{ticket.pid}/fd/{ticket.fd}"


def _seals() -> int:
    """Nobody may change the size: who reads what is no longer there is killed."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _pin(memory: torch.Tensor) -> bool:
    """Let a GPU reach memory by itself; whether that could be."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # whoever starts a kernel next would be told of the failure
        torch.ones(1, device="cuda").add_(1)
    return False
