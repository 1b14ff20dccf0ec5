"""What a rank that is not the first adds to a checkpoint: its state as bytes, its replay as files beside it.

    parts/rank-0001/NAME.seg      written and synced by that rank, linked by the first into the checkpoint, then removed
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch

from qfleet.core.replay import Segment
from qfleet.runs import state_tree
from qfleet.runs.atomic import AtomicDirectory

_LENGTH = struct.Struct("<Q")
BLOCK = 1 << 20


def pack_state(state: Any) -> bytes:
    """A tree of state as bytes, as `tree` takes it apart: JSON, then its arrays."""
    document, arrays = state_tree.pack(state)
    text = json.dumps(document, allow_nan=False).encode()
    return _LENGTH.pack(len(text)) + text + safetensors.torch.save(arrays)


def unpack_state(data: bytes) -> Any:
    """The same tree again; ValueError if `pack_state` did not make these bytes."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"{len(data)} bytes are no state")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    try:
        return state_tree.unpack(json.loads(data[_LENGTH.size:end]), safetensors.torch.load(data[end:]))
    except safetensors.SafetensorError as error:
        raise ValueError(f"not the arrays of a state: {error}") from error


class StagingArea:
    """Where one rank leaves its replay until it is in the checkpoint. Names that the last one holds are left out."""

    def __init__(self, root: Path, rank: int) -> None:
        self.folder = root / f"rank-{rank:04d}"
        self.saved_names: set[str] = set()

    def write(self, segments: Iterable[Segment]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        while not self.folder.exists():
            with suppress(FileNotFoundError):  # another rank has just taken away what it thought to be empty
                self.folder.mkdir(parents=True)
        draft = AtomicDirectory(self.folder)
        for segment in segments:
            if segment.name not in self.saved_names:
                draft.write(_file(segment.name), segment.blocks())

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # others may still have something there
            self.folder.parent.rmdir()

    def segment(self, name: str) -> Segment:
        """As the first rank saves it: from the file, or, if there is none, from the checkpoint before."""
        path = self.folder / _file(name)
        return Segment(name, partial(_blocks, path), path)


def _file(name: str) -> str:
    return f"{name}.seg"


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block
