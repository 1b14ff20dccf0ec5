"""Named inputs and outputs of an exported policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]
"""Values of inputs or outputs by name."""


@dataclass(frozen=True)
class ValueInfo:
    """One input or output. `shape` is that of one lane; with `batched` an axis of any size comes before it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    batched: bool = True
    meaning: str = ""

    def to_json(self) -> dict[str, Any]:
        shape = [*(["batch"] if self.batched else []), *self.shape]
        return {"name": self.name, "shape": shape, "dtype": self.dtype} | (
            {"meaning": self.meaning} if self.meaning else {})

    @property
    def text(self) -> str:
        """For example `obs batch×4 float32`."""
        shape = "×".join(map(str, [*(["batch"] if self.batched else []), *self.shape]))
        return f"{self.name} {shape or 'scalar'} {self.dtype}"
