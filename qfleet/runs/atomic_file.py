"""Atomic files: a file gets its name only when it is complete."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qfleet.core.errors import UserError


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `target` after the block; it is removed if the block fails."""
    # The name is unpredictable: a run copied from another machine may contain prepared links.
    partial = target.with_name(f".{target.stem}.partial-{secrets.token_hex(8)}{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
