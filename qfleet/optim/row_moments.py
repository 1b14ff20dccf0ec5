"""Moments of the rows that learners receive, as an agent's running statistics need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
import torch

from qfleet.core.agent import ROW_MOMENTS, RowValues
from qfleet.core.devices import staged_for
from qfleet.maths.moments import Moments
from qfleet.optim.flat_params import Flat


def moments_of(buffers: Mapping[str, torch.Tensor]) -> Moments:
    """Moments in the buffers `ROW_MOMENTS` of a network."""
    return Moments.from_row(torch.cat([buffers[name].detach().cpu().reshape(-1) for name in ROW_MOMENTS]).numpy())


def buffers_of(moments: Moments) -> dict[str, torch.Tensor]:
    """Inverse of `moments_of`."""
    values = (np.array(moments.count), moments.mean, moments.square)
    return {name: torch.from_numpy(value.copy()) for name, value in zip(ROW_MOMENTS, values, strict=True)}


class RowMoments:
    """Merges the moments of new rows, and writes them to the network's buffers `ROW_MOMENTS` before an update.

    A learner that exchanges rows with others keeps those that it has not sent. `replace` and `merge_ranks` take over
    the moments of all learners; what this one has not sent is added to them.
    """

    def __init__(self, row_values: RowValues, flat: Flat, exchanged: bool) -> None:
        self._values, self._flat, self._exchanged = row_values, flat, exchanged
        self._unsent = list[Moments]()
        self._moments = self._shared = Moments.empty(0)
        self.read_network()

    def add(self, columns: Mapping[str, np.ndarray]) -> None:
        """Count rows [R, ...] in which an action was taken. Rows that are not finite are left out."""
        values = self._values(columns)
        new = Moments.of(values[np.isfinite(values).all(1)])
        if new.count:
            self._moments, self._written = self._moments.merge(new), False
            if self._exchanged:
                self._unsent.append(new)

    def write(self) -> None:
        """Update the network's buffers, in place and without waiting for a GPU."""
        if not self._written:
            device = self._flat.master.device
            values = staged_for(device, torch.from_numpy(self._moments.to_row())).to(device, non_blocking=True)
            parts = values[0], *values[1:].chunk(2)
            self._flat.set_buffers(dict(zip(ROW_MOMENTS, parts, strict=True)))
            self._written = True

    def read_network(self) -> None:
        """Continue from the network's buffers, without rows that were not written or sent."""
        self._moments = self._shared = moments_of({name: self._flat.buffer(name) for name in ROW_MOMENTS})
        self._unsent.clear()
        self._written = True

    def take_unsent(self) -> list[Moments]:
        """Moments of every chunk since the last call."""
        taken, self._unsent = self._unsent, []
        return taken

    def take_row(self) -> list[float]:
        """The same, merged, as numbers for `merge_ranks`."""
        return reduce(Moments.merge, self.take_unsent(), Moments.empty(len(self._moments.mean))).to_row().tolist()

    def merge_ranks(self, ranks: Sequence[Sequence[float]]) -> None:
        """Take over the results of `take_row` of all ranks, this one included, in the same order on every rank."""
        if len(ranks) > 1:
            self.replace(reduce(Moments.merge, map(Moments.from_row, ranks), self._shared))
        self._shared = self._moments

    def replace(self, shared: Moments) -> None:
        """Take over the moments of all learners."""
        self._moments, self._written = reduce(Moments.merge, self._unsent, shared), False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The moments that the network's buffers do not have yet; empty if they have all."""
        return {} if self._written else buffers_of(self._moments)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from the network's buffers, or from newer moments in `state`."""
        self.read_network()
        if state:
            self._moments = self._shared = moments_of(state)
            self._written = False
