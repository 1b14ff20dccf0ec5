"""Contribution of ranks other than rank 0 to a checkpoint: state as bytes, replay as separate files.

    parts/rank-0001/NAME.seg      written and synced by that rank, linked by rank 0 into the checkpoint, then removed
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
    """Serialise a state tree as `state_tree.pack` splits it: JSON, then the arrays."""
    document, arrays = state_tree.pack(state)
    text = json.dumps(document, allow_nan=False).encode()
    return _LENGTH.pack(len(text)) + text + safetensors.torch.save(arrays)


def unpack_state(data: bytes) -> Any:
    """Restore the tree; ValueError if the bytes are not from `pack_state`."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"{len(data)} bytes are too short for a state")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    try:
        return state_tree.unpack(json.loads(data[_LENGTH.size:end]), safetensors.torch.load(data[end:]))
    except safetensors.SafetensorError as error:
        raise ValueError(f"not the arrays of a state: {error}") from error


class StagingArea:
    """Directory for the replay segments of one rank until they are part of the checkpoint.

    Segments in `saved_names`, which the last checkpoint contains, are not written again.
    """

    def __init__(self, root: Path, rank: int) -> None:
        self.folder = root / f"rank-{rank:04d}"
        self.saved_names: set[str] = set()

    def set_saved(self, names: Iterable[str]) -> None:
        self.saved_names = set(names)

    def write(self, segments: Iterable[Segment]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        while not self.folder.exists():
            with suppress(FileNotFoundError):  # another rank has just removed the parent, which was empty
                self.folder.mkdir(parents=True)
        draft = AtomicDirectory(self.folder)
        for segment in segments:
            if segment.name not in self.saved_names:
                draft.write(_file(segment.name), segment.blocks())

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # other ranks may still have files there
            self.folder.parent.rmdir()

    def segment(self, name: str) -> Segment:
        """Return the segment as rank 0 saves it: from the file or, without one, from the previous checkpoint."""
        path = self.folder / _file(name)
        return Segment(name, partial(_blocks, path), path)


def _file(name: str) -> str:
    return f"{name}.seg"


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block
