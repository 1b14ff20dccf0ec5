"""Threads that compute side by side and wait for each other once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Result = TypeVar("Result")


class ThreadTeam:
    """`count` threads, of which the caller's is the first."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count - 1, "hand") if count > 1 else None

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
