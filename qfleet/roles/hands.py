"""Threads that compute side by side, each on a core of its own, and wait for each other once, at the end.

Those that share an operation of torch's wait after every operation: where another process has taken the core of one of
them, all are as slow as that one, again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Hands:
    """`count` threads, of which the caller's is the first; for the others, torch has one thread each. Who has more than
    one hand should tell torch to take one thread in his own, too."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "hand", torch.set_num_threads, (1,)) if count > 1 else None

    def __call__(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Do these at once, one in each hand; what they return, in order."""
        if self._pool is None:
            return [job() for job in jobs]
        others = [self._pool.submit(job) for job in jobs[1:]]
        try:
            first = jobs[0]()
        finally:
            wait(others)  # after a failure, too: nobody is left at work on what the caller may change
        return [first, *(other.result() for other in others)]
