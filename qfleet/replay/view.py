"""Read-only view of a replay store, for user code."""

from __future__ import annotations

from typing import Any

from qfleet.core.errors import UserError
from qfleet.core.replay import Sample
from qfleet.replay.store import ReplayStore


class ReplayView:
    """Replay buffer of a run. Inspecting it does not affect the training."""

    def __init__(self, store: ReplayStore[Any],
                 empty: str = "the replay holds no complete window yet: step the run further") -> None:
        """Created by the run.

        Args:
            store: The replay.
            empty: Message of `sample` if there is nothing to sample.
        """
        self._store, self._empty = store, empty

    def __len__(self) -> int:
        """Number of windows that can be sampled."""
        return int(self._store.metrics()["replay/size"])

    def sample(self, n: int) -> Sample:
        """Sample windows as the learner does: by priority.

        Args:
            n: Number of windows.

        Returns:
            A batch; `rows["action"]`, `rows["reward"]` and others are [n, T, ...], `obs(0)` are the first observations.

        Raises:
            UserError: The replay holds no complete window yet, or `n` is not a positive integer.

        Examples:
            >>> batch = run.replay.sample(8)
            >>> batch.rows["reward"].shape[0]
            8
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise UserError(f"sample({n!r}): must be an integer of at least 1")
        found = self._store.peek(n)
        if found is None:
            raise UserError(self._empty)
        return found

    def metrics(self) -> dict[str, float]:
        """Fill and rates of the buffer.

        Returns:
            Values by tag: `replay/size`, `replay/steps`, `replay/bytes` and others.
        """
        return self._store.metrics()

    def __repr__(self) -> str:
        return f"ReplayView({len(self):,} windows)"
