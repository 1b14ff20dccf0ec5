"""Process groups: rank discovery (torchrun, srun), rendezvous, and collectives over gloo or NCCL."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from qfleet.core.errors import ProcessFault
from qfleet.sync.allreduce import Collectives, RankRows

RENDEZVOUS_PORT = 20_000
"""First of the ten thousand ports at which ranks started by srun meet, below the ephemeral port range."""

SIOCGIFADDR = 0x8915
POLL_S = 0.02
MESSAGE_ELEMENTS = 1 << 20
"""Elements per message of a reduction; several messages are in flight at once."""


class RankLost(ProcessFault):
    """Another rank died or did not respond; exit code 1, so that the supervisor restarts all ranks."""


class Rendezvous(Protocol):
    """Key-value store through which ranks exchange their addresses."""

    def put(self, key: str, value: bytes, timeout_s: float) -> None: ...

    def find(self, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        """Values of all keys; None while one is missing."""


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process and number of ranks, in total and on this host.

    `attempt` is the number of restarts of all ranks so far. `rendezvous` is an address in the
    format of torch.distributed, a file of this host that is created there, or a store.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int = 0
    rendezvous: str | Path | Rendezvous = "env://"

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
        """Read the rank from the variables of torchrun or srun; None in a process started by neither."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return _from_slurm(environment)
        size = environment["WORLD_SIZE"]
        return RankInfo(int(environment["RANK"]), int(size), int(environment.get("LOCAL_RANK", 0)),
                        int(environment.get("LOCAL_WORLD_SIZE", size)),
                        int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)))


def _from_slurm(environment: Mapping[str, str]) -> RankInfo | None:
    """Read the rank from srun's variables.

    A batch script has most of them too but is not a job step, and a step with one task has no
    peers.
    """
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    size = int(environment.get("SLURM_NTASKS", 1))
    if not (job.isdecimal() and step.isdecimal() and "SLURM_PROCID" in environment) or size < 2:
        return None
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # 4(x2),3
    host = first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
    port = RENDEZVOUS_PORT + (int(job) * 10 + int(step) % 10) % 10_000  # known to all ranks without communication
    return RankInfo(int(environment["SLURM_PROCID"]), size, int(environment.get("SLURM_LOCALID", 0)),
                    max(map(int, counts), default=size), int(environment.get("SLURM_RESTART_COUNT", 0)), f"tcp://{host}:{port}")


def first_host(hosts: str) -> str:
    """First host of a Slurm node list: `gpu[07-12,15],cpu1` -> `gpu07`."""
    first = re.match(r"([^\[,]+)(?:\[([^\]\-,]+)[^\]]*\]([^,\[]*))?", hosts)
    return hosts if first is None else "".join(part or "" for part in first.groups())


def network_interface(address: str) -> str | None:
    """Name of the interface with this IPv4 address; ranks need it where host names are not resolved."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return None


class ProcessGroup(Collectives, Protocol):
    """Collectives that can also exchange bytes."""

    def exchange(self, data: bytes) -> list[bytes]:
        """Gather the bytes of every rank, in rank order."""


class SingleProcessGroup:
    """Process group of one rank."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.sent_bytes = 0.0

    def all_gather(self, row: Sequence[float]) -> RankRows:
        return [list(row)]

    def start_allreduce(self, vector: torch.Tensor) -> Callable[[], None]:
        return lambda: None

    def all_gather_slices(self, vector: torch.Tensor, slices: Sequence[slice]) -> None: ...
    def broadcast(self, tensor: torch.Tensor) -> None: ...

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]


class TorchProcessGroup:
    """Process group over torch.distributed.

    Rows and bytes are sent between CPUs; so are vectors, unless `direct` GPU-to-GPU transfer is
    possible.
    """

    def __init__(self, timeout_s: float, direct: bool) -> None:
        self.rank, self.size, self.timeout_s = dist.get_rank(), dist.get_world_size(), timeout_s
        self.direct = direct  # GPU to GPU
        self.sent_bytes = 0.0

    def all_gather(self, row: Sequence[float]) -> RankRows:
        return torch.stack(self._all(torch.tensor(row, dtype=torch.float64))).tolist()

    def start_allreduce(self, vector: torch.Tensor) -> Callable[[], None]:
        sendable = self._sendable(vector)
        with self._raise_rank_lost():
            works = [dist.all_reduce(part, async_op=True) for part in sendable.split(MESSAGE_ELEMENTS)]
        self.sent_bytes += 2 * (self.size - 1) / self.size * vector.nbytes

        def wait() -> None:
            with self._raise_rank_lost():
                for work in works:
                    work.wait()
            if sendable is not vector:
                vector.copy_(sendable)

        return wait

    def all_gather_slices(self, vector: torch.Tensor, slices: Sequence[slice]) -> None:
        longest = max(piece.stop - piece.start for piece in slices)
        own = vector.new_zeros(longest)
        own[:slices[self.rank].stop - slices[self.rank].start] = vector[slices[self.rank]]
        for piece, part in zip(slices, self._all(self._sendable(own)), strict=True):
            vector[piece] = part[:piece.stop - piece.start]

    def broadcast(self, tensor: torch.Tensor) -> None:
        sendable = self._sendable(tensor)
        with self._raise_rank_lost():
            dist.broadcast(sendable, 0)
        if sendable is not tensor:
            tensor.copy_(sendable)

    def exchange(self, data: bytes) -> list[bytes]:
        sizes = [int(row[0]) for row in self.all_gather([len(data)])]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if data:
            padded[:len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self._all(padded)
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on a device from which it can be sent."""
        return tensor if self.direct else tensor.cpu()

    def _all(self, own: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with self._raise_rank_lost():
            dist.all_gather(parts, own)
        self.sent_bytes += (self.size - 1) * own.nbytes
        return parts

    @contextmanager
    def _raise_rank_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankLost(f"rank {self.rank}: another rank exited or has not responded for {self.timeout_s:g} s "
                           f"(allreduce.timeout_s): {reason:.200}") from error


@contextmanager
def process_group(rank_info: RankInfo | None, device: torch.device, timeout_s: float) -> Iterator[ProcessGroup]:
    """Join the process group for the duration of the context."""
    if rank_info is None or rank_info.size == 1:
        yield SingleProcessGroup()
        return
    # NCCL does not support two ranks on one GPU; then gradients are sent from main memory.
    direct = device.type == "cuda" and torch.cuda.device_count() >= rank_info.local_size
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    try:
        base = _store(rank_info, timeout)  # kept referenced: torch does not keep a Python store alive
        # All attempts share one store; without the prefix a rank could find the address of a dead rank.
        store = dist.PrefixStore(f"attempt{rank_info.attempt}", base)
        dist.init_process_group("cpu:gloo,cuda:nccl" if direct else "gloo", store=store, rank=rank_info.rank,
                                world_size=rank_info.size, timeout=timeout)
    except RuntimeError as error:
        raise RankLost(f"rank {rank_info.rank} did not reach all of {rank_info.size} ranks within {timeout_s:g} s "
                       f"(allreduce.timeout_s): {str(error).splitlines()[0]:.200}") from error
    try:
        yield TorchProcessGroup(timeout_s, direct)
    finally:
        dist.destroy_process_group()


def _store(rank_info: RankInfo, timeout: timedelta) -> dist.Store:
    if isinstance(rank_info.rendezvous, Path):
        return dist.FileStore(str(rank_info.rendezvous), rank_info.size)
    if not isinstance(rank_info.rendezvous, str):
        return RendezvousStore(rank_info.rendezvous, timeout.total_seconds())
    store, _, _ = next(dist.rendezvous(rank_info.rendezvous, rank_info.rank, rank_info.size, timeout=timeout))
    return store


class RendezvousStore(dist.Store):
    """`Rendezvous` as a store of torch.distributed, with the methods that gloo and NCCL use."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous, self._timeout_s = rendezvous, timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._rendezvous.put(key, value.encode() if isinstance(value, str) else bytes(value), self._timeout_s)

    def get(self, key: str) -> bytes:
        return self._await([key], self._timeout_s)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._rendezvous.find(keys, self._timeout_s) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def clone(self) -> RendezvousStore:
        return self

    def _await(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        while (found := self._rendezvous.find(keys, timeout_s)) is None:
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(f"no rank has set {', '.join(keys)} within {timeout_s:g} s")
            time.sleep(POLL_S)
        return found
