"""Weight store between a learner and actors of the same process.

On a GPU, weights are published while the updates that produce them are still queued. A reader on
the learner's stream gets them in order. An actor that waited for them would keep its environments
idle, so actors take the newest weights that are complete:

    learner's stream    update ─ update ─ copy of 2 ─ update ─ update ─ copy of 4 ─ ...
    host                        publishes 4 with more updates queued: version 2 is complete
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from qfleet.accel.completion import completion_event

VersionedWeights = tuple[int, dict[str, torch.Tensor]]

MAX_PENDING = 4
"""Maximum number of versions kept before the GPU has computed them; further ones replace the newest."""


class Mailbox:
    """Keeps the newest weights and those still being computed; `fetch` returns a newer version or None."""

    def __init__(self) -> None:
        self._newest: VersionedWeights = (-1, {})
        self._complete: VersionedWeights = self._newest
        self._pending: deque[tuple[VersionedWeights, torch.cuda.Event]] = deque()
        self.completed = CompletedWeights(self)

    @property
    def has_reader(self) -> bool:
        return True

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None:
        self._newest = (version, state)
        done = completion_event(state.values())
        if done is None:
            self._complete = self._newest
            return
        if len(self._pending) >= MAX_PENDING:
            self._pending.pop()
        self._pending.append((self._newest, done))

    def fetch(self, newer_than: int) -> VersionedWeights | None:
        return self._newest if self._newest[0] > newer_than else None

    def newest_complete(self) -> VersionedWeights:
        """Newest weights that the GPU has finished computing; does not wait."""
        while self._pending and self._pending[0][1].query():
            self._complete = self._pending.popleft()[0]
        return self._complete

    def state_dict(self) -> dict[str, Any]:
        version, state = self._newest
        return {"version": version, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending.clear()
        self._newest = self._complete = (state["version"], dict(state["state"]))


class CompletedWeights:
    """Read access to a mailbox that returns only weights that are completely computed."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def fetch(self, newer_than: int) -> VersionedWeights | None:
        newest = self._mailbox.newest_complete()
        return newest if newest[0] > newer_than else None
