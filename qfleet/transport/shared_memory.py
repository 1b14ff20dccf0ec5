"""Shared-memory buffers between a learner and a parameter-server shard on the same host.

    learner   creates a file without a path (memfd), maps it        gradient ─▶ ┌───────┐ ─▶ step
    shard     opens it as /proc/PID/fd/FD of the learner, maps it   weights  ◀─ └───────┘ ◀─

The kernel frees the memory when neither process maps it any more, however they ended.
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
    """Weights, and a gradient of the same length. The writer notifies the reader by an RPC."""

    def __init__(self, fd: int, length: int) -> None:
        self.length = length
        self.memory = torch.from_numpy(np.frombuffer(mmap.mmap(fd, 2 * length * FLOAT), np.uint8))
        self.weights = self.memory[:length * FLOAT].view(torch.float32)

    def gradient(self, dtype: torch.dtype) -> torch.Tensor:
        begin = self.length * FLOAT
        return self.memory[begin:begin + self.length * dtype.itemsize].view(dtype)


class OwnedSharedBuffer(SharedBuffer):
    """Buffer created by this process. OSError where the system has no memfd.

    For a learner on a GPU it is `pinned` if possible: copies are several times as fast.
    """

    def __init__(self, length: int, pinned: bool = False) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        name = PREFIX + secrets.token_hex(8)
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, 2 * length * FLOAT)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _seals())
            super().__init__(self._fd, length)
        except (OSError, ValueError):
            os.close(self._fd)
            raise
        self.ticket = Ticket(pid=os.getpid(), fd=self._fd, name=name)
        self._pinned = pinned and _pin(self.memory)

    def close(self) -> None:
        """Invalidate the ticket; a process that has mapped the buffer keeps it."""
        if self._pinned:  # the driver would treat a later mapping at this address as pinned
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
        os.close(self._fd)


class SharedBufferCache:
    """Buffers of other processes, found by their tickets.

    Those of ended processes are dropped when another is opened.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Ticket, SharedBuffer]] = {}
        self._lock = threading.Lock()

    def find(self, ticket: Ticket, length: int) -> SharedBuffer:
        """Open a buffer; OSError unless it exists and has this length."""
        key = ticket.SerializeToString()
        with self._lock:
            if key not in self._known:
                self._known = {old: known for old, known in self._known.items() if _is_at(_path(known[0]), known[0])}
                self._known[key] = ticket, _open_buffer(ticket, length)
            return self._known[key][1]

    def __len__(self) -> int:
        return len(self._known)


def _open_buffer(ticket: Ticket, length: int) -> SharedBuffer:
    """Map the buffer of a ticket, after checking its identity, length and seals."""
    fd = os.open(_path(ticket), os.O_RDWR | os.O_CLOEXEC)
    try:
        if not _is_at(f"/proc/self/fd/{fd}", ticket):
            raise FileNotFoundError(f"process {ticket.pid} has no shared buffer {ticket.name}")
        size = os.fstat(fd).st_size
        if size != 2 * length * FLOAT or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise OSError(f"{ticket.name} has {size} bytes, which are not {length} weights, or is not sealed")
        return SharedBuffer(fd, length)
    finally:
        os.close(fd)  # the mapping stays valid


def _is_at(path: str, ticket: Ticket) -> bool:
    """True if a descriptor still refers to the file of the ticket."""
    with suppress(OSError):
        return ticket.name.startswith(PREFIX) and os.readlink(path) == f"/memfd:{ticket.name} (deleted)"
    return False


def _path(ticket: Ticket) -> str:
    return f"/proc/{ticket.pid}/fd/{ticket.fd}"


def _seals() -> int:
    """Seals against resizing: reading beyond the end of a shrunk file would kill the process."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory for direct GPU access; False if that failed."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # clears the error, which the next kernel launch would report
        torch.ones(1, device="cuda").add_(1)
    return False
