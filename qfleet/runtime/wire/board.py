"""Numbers that two processes of a host share, so that they need not be sent.

    learner   makes a file without a path (memfd), maps it          gradient ─▶ ┌───────┐ ─▶ step
    shard     finds it as /proc/PID/fd/FD of the learner, maps it   weights  ◀─ └───────┘ ◀─

Nothing of it is left behind: the kernel frees the memory when neither of them has it any more, however they ended.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading

import numpy as np
import torch

from qfleet.runtime.wire.shard_pb2 import Board as Ticket

FLOAT = torch.float32.itemsize


class Board:
    """Weights, and as many numbers of a gradient. Who has written there tells the other one by a call."""

    def __init__(self, fd: int, size: int) -> None:
        self.bytes = torch.from_numpy(np.frombuffer(mmap.mmap(fd, size), np.uint8))
        self.numbers = size // (2 * FLOAT)
        self.weights = self.bytes[:self.numbers * FLOAT].view(torch.float32)

    def gradient(self, dtype: torch.dtype) -> torch.Tensor:
        begin = self.numbers * FLOAT
        return self.bytes[begin:begin + self.numbers * dtype.itemsize].view(dtype)


class OwnBoard(Board):
    """One that this process has made. OSError where there is no such memory.

    For somebody whose numbers are on a GPU it is `pinned` where that can be: copies are several times as fast.
    """

    def __init__(self, numbers: int, pinned: bool = False) -> None:
        name = f"qfleet-{secrets.token_hex(8)}"
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a path")
        self._fd = os.memfd_create(name)
        try:
            os.ftruncate(self._fd, 2 * numbers * FLOAT)
            super().__init__(self._fd, 2 * numbers * FLOAT)
        except (OSError, ValueError):
            os.close(self._fd)
            raise
        self.ticket = Ticket(pid=os.getpid(), fd=self._fd, name=name)
        at, size = self.bytes.data_ptr(), self.bytes.nbytes
        self._pinned = pinned and int(torch.cuda.cudart().cudaHostRegister(at, size, 0)) == 0

    def close(self) -> None:
        """Nobody can find it any more; who has it keeps it."""
        if self._pinned:  # or a GPU would take what is mapped there next for this
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        os.close(self._fd)


class Boards:
    """Those that others have made, found by their tickets."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Ticket, Board]] = {}
        self._lock = threading.Lock()

    def find(self, ticket: Ticket) -> Board:
        """OSError if it is not there, or not theirs."""
        key = ticket.SerializeToString()
        with self._lock:
            if key not in self._known:
                self._known = {old: known for old, known in self._known.items() if is_there(known[0])}
                self._known[key] = ticket, opened(ticket)
            return self._known[key][1]

    def __len__(self) -> int:
        return len(self._known)


def opened(ticket: Ticket) -> Board:
    if not is_there(ticket):
        raise FileNotFoundError(f"process {ticket.pid} has no board {ticket.name}")
    fd = os.open(path_of(ticket), os.O_RDWR)
    try:
        return Board(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)  # what is mapped stays so


def is_there(ticket: Ticket) -> bool:
    """Whether that descriptor is still what it was when the ticket was written."""
    try:
        return os.readlink(path_of(ticket)) == f"/memfd:{ticket.name} (deleted)"
    except OSError:
        return False


def path_of(ticket: Ticket) -> str:
    return f"/proc/{ticket.pid}/fd/{ticket.fd}"
