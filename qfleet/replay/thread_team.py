"""Fork-join thread pool: runs a few jobs in parallel and waits for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Result = TypeVar("Result")


class ThreadTeam:
    """Runs jobs on `count` threads; the calling thread is one of them."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count - 1, "thread-team") if count > 1 else None

    def __call__(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run at most `count` jobs in parallel and return their results in order."""
        if self._pool is None:
            return [job() for job in jobs]
        others = [self._pool.submit(job) for job in jobs[1:]]
        try:
            first = jobs[0]()
        finally:
            wait(others)  # also after a failure: no thread may still use memory that the caller changes next
        return [first, *(other.result() for other in others)]
