"""Ranks: who they are, where they meet, and how they reach each other (gloo between CPUs, nccl between GPUs)."""

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
from typing import Protocol

import torch
import torch.distributed as dist

from qfleet.core.errors import ProcessFault
from qfleet.sync.allreduce import Collectives, RankRows

RENDEZVOUS_PORT = 20_000
"""Ranks that srun started meet at one of the ten thousand from here on, below those that systems hand out."""

SIOCGIFADDR = 0x8915
POLL_S = 0.02
MESSAGE = 1 << 20
"""Numbers per message of a reduction: several are under way at once."""


class RankLost(ProcessFault):
    """Another rank died, or was silent for too long; exit 1, so that whoever watches starts all of them again."""


class Rendezvous(Protocol):
    """Where ranks leave notes for each other: bytes by key."""

    def put(self, key: str, value: bytes, timeout_s: float) -> None: ...

    def find(self, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        """The values of all keys, at once; None as long as one is missing."""


@dataclass(frozen=True)
class RankInfo:
    """Which of how many ranks this process is; `local` among the `neighbours` on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int = 0  # how often all ranks were started anew
    rendezvous: str | Rendezvous = (
        "env://"  # where they meet, by an address as torch.distributed takes it, or otherwise
    )

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
        """As torchrun says, or srun; None in a process that neither started as one of several."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return _from_slurm(environment)
        size = environment["WORLD_SIZE"]
        return RankInfo(int(environment["RANK"]), int(size), int(environment.get("LOCAL_RANK", 0)),
                        int(environment.get("LOCAL_WORLD_SIZE", size)),
                        int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)))


def _from_slurm(environment: Mapping[str, str]) -> RankInfo | None:
    """As srun says. A batch script has most of its variables, too, but is no step; a step of one task is no crew."""
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    size = int(environment.get("SLURM_NTASKS", 1))
    if not (job.isdecimal() and step.isdecimal() and "SLURM_PROCID" in environment) or size < 2:
        return None
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # 4(x2),3
    host = first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
    port = RENDEZVOUS_PORT + (int(job) * 10 + int(step) % 10) % 10_000  # all must know it without having met
    return RankInfo(int(environment["SLURM_PROCID"]), size, int(environment.get("SLURM_LOCALID", 0)),
                    max(map(int, counts), default=size), int(environment.get("SLURM_RESTART_COUNT", 0)), f"tcp://{host}:{port}")


def first_host(hosts: str) -> str:
    """Of `gpu[07-12,15],cpu1`, as Slurm writes it, `gpu07`."""
    first = re.match(r"([^\[,]+)(?:\[([^\]\-,]+)[^\]]*\]([^,\[]*))?", hosts)
    return hosts if first is None else "".join(part or "" for part in first.groups())


def network_interface(address: str) -> str | None:
    """Which of this host's interfaces has this IPv4 address: where names are not resolved, ranks must be told."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return None


class ProcessGroup(Collectives, Protocol):
    """Peers that can also send each other texts."""

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gave, rank by rank."""


class SingleProcessGroup:
    """A crew of one."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.sent_bytes = 0.0

    def all_gather(self, row: Sequence[float]) -> RankRows:
        return [list(row)]

    def start_allreduce(self, vector: torch.Tensor) -> Callable[[], None]:
        return lambda: None

    def all_gather_slices(self, vector: torch.Tensor, cuts: Sequence[slice]) -> None: ...
    def broadcast(self, tensor: torch.Tensor) -> None: ...

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]


class TorchProcessGroup:
    """A crew over torch.distributed. Rows and texts travel between CPUs; vectors too, unless GPUs reach each other."""

    def __init__(self, timeout_s: float, direct: bool) -> None:
        self.rank, self.size, self.timeout_s = dist.get_rank(), dist.get_world_size(), timeout_s
        self.direct = direct  # from GPU to GPU
        self.sent_bytes = 0.0

    def all_gather(self, row: Sequence[float]) -> RankRows:
        return torch.stack(self._all(torch.tensor(row, dtype=torch.float64))).tolist()

    def start_allreduce(self, vector: torch.Tensor) -> Callable[[], None]:
        near = self._near(vector)
        with self._answered():
            works = [dist.all_reduce(part, async_op=True) for part in near.split(MESSAGE)]
        self.sent_bytes += 2 * (self.size - 1) / self.size * vector.nbytes

        def wait() -> None:
            with self._answered():
                for work in works:
                    work.wait()
            if near is not vector:
                vector.copy_(near)

        return wait

    def all_gather_slices(self, vector: torch.Tensor, cuts: Sequence[slice]) -> None:
        longest = max(cut.stop - cut.start for cut in cuts)
        mine = vector.new_zeros(longest)
        mine[:cuts[self.rank].stop - cuts[self.rank].start] = vector[cuts[self.rank]]
        for cut, part in zip(cuts, self._all(self._near(mine)), strict=True):
            vector[cut] = part[:cut.stop - cut.start]

    def broadcast(self, tensor: torch.Tensor) -> None:
        near = self._near(tensor)
        with self._answered():
            dist.broadcast(near, 0)
        if near is not tensor:
            tensor.copy_(near)

    def exchange(self, data: bytes) -> list[bytes]:
        sizes = [int(row[0]) for row in self.all_gather([len(data)])]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if data:
            padded[:len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self._all(padded)
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def _near(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers where they can be sent from."""
        return tensor if self.direct else tensor.cpu()

    def _all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self._answered():
            dist.all_gather(parts, mine)
        self.sent_bytes += (self.size - 1) * mine.nbytes
        return parts

    @contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise RankLost(f"rank {self.rank}: another rank is gone, or has not answered for {self.timeout_s:g} s "
                           f"(allreduce.timeout_s): {first:.200}") from error


@contextmanager
def process_group(place: RankInfo | None, device: torch.device, timeout_s: float) -> Iterator[ProcessGroup]:
    """Meet the other ranks, and take leave of them in the end."""
    if place is None or place.size == 1:
        yield SingleProcessGroup()
        return
    # nccl refuses two ranks on one GPU; then the gradient takes the way through main memory.
    direct = device.type == "cuda" and torch.cuda.device_count() >= place.local_size
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    try:
        below = _store(place, timeout)  # held to the end: torch does not keep a store alive that is written in Python
        # One store serves all attempts: whoever looks early would find the address of a rank that died.
        store = dist.PrefixStore(f"attempt{place.attempt}", below)
        dist.init_process_group("cpu:gloo,cuda:nccl" if direct else "gloo", store=store, rank=place.rank,
                                world_size=place.size, timeout=timeout)
    except RuntimeError as error:
        raise RankLost(f"rank {place.rank} did not meet all of {place.size} ranks within {timeout_s:g} s "
                       f"(allreduce.timeout_s): {str(error).splitlines()[0]:.200}") from error
    try:
        yield TorchProcessGroup(timeout_s, direct)
    finally:
        dist.destroy_process_group()


def _store(place: RankInfo, timeout: timedelta) -> dist.Store:
    if not isinstance(place.rendezvous, str):
        return RendezvousStore(place.rendezvous, timeout.total_seconds())
    store, _, _ = next(dist.rendezvous(place.rendezvous, place.rank, place.size, timeout=timeout))
    return store


class RendezvousStore(dist.Store):
    """A meeting as the store of torch.distributed: what gloo and nccl ask of one to exchange their addresses."""

    def __init__(self, meeting: Rendezvous, timeout_s: float) -> None:
        super().__init__()
        self._meeting, self._timeout_s = meeting, timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._meeting.put(key, value.encode() if isinstance(value, str) else bytes(value), self._timeout_s)

    def get(self, key: str) -> bytes:
        return self._await([key], self._timeout_s)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._meeting.find(keys, self._timeout_s) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def clone(self) -> RendezvousStore:
        return self

    def _await(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        while (found := self._meeting.find(keys, timeout_s)) is None:
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(f"no rank has told {', '.join(keys)} within {timeout_s:g} s")
            time.sleep(POLL_S)
        return found
