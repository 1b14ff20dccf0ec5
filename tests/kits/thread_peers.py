"""Peers in threads of one process: every call waits until all have made it."""

from __future__ import annotations

import threading
import time

import torch

from qfleet.core.errors import ProcessFault

GRACE_S = 1.0


class Roundtable:
    """Run `work(peers)` on `size` ranks at once; `results` in their order. A rank that raises frees the others."""

    def __init__(self, size):
        self.size, self.barrier, self.places = size, threading.Barrier(size, timeout=30), [None] * size

    def run(self, work):
        results, errors = [None] * self.size, []

        def be(rank):
            try:
                results[rank] = work(Seat(self, rank))
            except BaseException as error:
                errors.append(error)
                time.sleep(GRACE_S)  # whoever is just leaving the same meeting shall not find it broken
                self.barrier.abort()

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            # The cause before what others say of it, whoever was quicker.
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError | ProcessFault))
        return results

    def meet(self, rank, thing):
        self.places[rank] = thing
        self.barrier.wait()
        seen = list(self.places)
        self.barrier.wait()
        return seen


class Seat:
    def __init__(self, table, rank):
        self.table, self.rank, self.size = table, rank, table.size
        self.sent_bytes = 0.0

    def all_gather(self, row):
        return [list(map(float, row)) for row in self.table.meet(self.rank, row)]

    def start_allreduce(self, vector):
        vector.copy_(torch.stack(self.table.meet(self.rank, vector.clone())).sum(0))
        return lambda: None

    def all_gather_slices(self, vector, cuts):
        for cut, part in zip(cuts, self.table.meet(self.rank, vector[cuts[self.rank]].clone()), strict=True):
            vector[cut] = part

    def broadcast(self, tensor):
        tensor.copy_(self.table.meet(self.rank, tensor.clone())[0])

    def exchange(self, data):
        return self.table.meet(self.rank, data)
