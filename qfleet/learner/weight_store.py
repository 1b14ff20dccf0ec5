"""The mailbox between a learner and those who act, inside one process.

On a GPU weights are published while the updates that make them are still queued there. Whoever loads them on the
learner's stream gets them when they are done; an actor would keep its emulators waiting that long, and takes the newest
that are `complete`:

    learner's stream    update ─ update ─ copy of 2 ─ update ─ update ─ copy of 4 ─ ...
    host                        publishes 4, and more updates are on their way: complete are those of 2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

VersionedWeights = tuple[int, dict[str, torch.Tensor]]

MOST_COMING = 4
"""Weights that a GPU has not made yet and that are kept all the same: newer ones take the place of the newest."""


class Mailbox:
    """Keeps the newest weights, and those that are coming; a reader says which version it has and gets a newer one or
    nothing."""

    def __init__(self) -> None:
        self._newest: VersionedWeights = (-1, {})
        self._complete: VersionedWeights = self._newest
        self._coming: deque[tuple[VersionedWeights, torch.cuda.Event]] = deque()
        self.completed = CompletedWeights(self)

    @property
    def has_reader(self) -> bool:
        return True

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None:
        self._newest = (version, state)
        if not any(value.is_cuda for value in state.values()):
            self._complete = self._newest
            return
        done = torch.cuda.Event()
        done.record()
        if len(self._coming) >= MOST_COMING:
            self._coming.pop()
        self._coming.append((self._newest, done))

    def fetch(self, newer_than: int) -> VersionedWeights | None:
        return self._newest if self._newest[0] > newer_than else None

    def newest_complete(self) -> VersionedWeights:
        while self._coming and self._coming[0][1].query():
            self._complete = self._coming.popleft()[0]
        return self._complete

    def state_dict(self) -> dict[str, Any]:
        version, state = self._newest
        return {"version": version, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._coming.clear()
        self._newest = self._complete = (state["version"], dict(state["state"]))


class CompletedWeights:
    """A mailbox in the eyes of those who cannot wait for what a GPU is still computing."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def fetch(self, newer_than: int) -> VersionedWeights | None:
        news = self._mailbox.newest_complete()
        return news if news[0] > newer_than else None
