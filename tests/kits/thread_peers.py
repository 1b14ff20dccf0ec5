"""Process group whose ranks are threads of one process: every collective waits for all ranks."""

from __future__ import annotations

import threading
import time

import torch

from qfleet.core.errors import ProcessFault

GRACE_S = 1.0
"""Delay before a failed rank breaks the barrier."""


class Roundtable:
    """Runs `work(peers)` on `size` ranks concurrently; returns the results by rank. If one raises, all others end."""

    def __init__(self, size):
        self.size, self.barrier, self.values = size, threading.Barrier(size, timeout=30), [None] * size

    def run(self, work):
        results, errors = [None] * self.size, []

        def run_rank(rank):
            try:
                results[rank] = work(ThreadRank(self, rank))
            except BaseException as error:
                errors.append(error)
                time.sleep(GRACE_S)  # ranks that are leaving the same barrier must not find it broken
                self.barrier.abort()

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            # Prefer the cause to its consequences on other ranks, whichever came first.
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError | ProcessFault))
        return results

    def gather(self, rank, value):
        """Values of all ranks, once every rank has called this."""
        self.values[rank] = value
        self.barrier.wait()
        gathered = list(self.values)
        self.barrier.wait()
        return gathered


class ThreadRank:
    """One rank; implements `sync.process_group.ProcessGroup`."""

    def __init__(self, group, rank):
        self._group, self.rank, self.size = group, rank, group.size
        self.sent_bytes = 0.0

    def all_gather(self, row):
        return [list(map(float, row)) for row in self._group.gather(self.rank, row)]

    def start_allreduce(self, vector):
        vector.copy_(torch.stack(self._group.gather(self.rank, vector.clone())).sum(0))
        return lambda: None

    def all_gather_slices(self, vector, cuts):
        for cut, part in zip(cuts, self._group.gather(self.rank, vector[cuts[self.rank]].clone()), strict=True):
            vector[cut] = part

    def broadcast(self, tensor):
        tensor.copy_(self._group.gather(self.rank, tensor.clone())[0])

    def exchange(self, data):
        return self._group.gather(self.rank, data)
