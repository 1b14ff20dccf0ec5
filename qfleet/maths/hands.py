"""Threads that compute side by side and wait for each other once, at the end.

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
    """`count` threads, of which the caller's is the first. In the others torch takes `threads` of its own, if said."""

    def __init__(self, count: int = 1, threads: int | None = None) -> None:
        self.count, self._pool = count, None
        if count > 1:
            tell = () if threads is None else (torch.set_num_threads, (threads,))
            self._pool = ThreadPoolExecutor(count - 1, "hand", *tell)

    def __call__(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Do these at once, no more than there are hands; what they return, in order."""
        if self._pool is None:
            return [job() for job in jobs]
        others = [self._pool.submit(job) for job in jobs[1:]]
        try:
            first = jobs[0]()
        finally:
            wait(others)  # after a failure, too: nobody is left at work on what the caller may change
        return [first, *(other.result() for other in others)]
