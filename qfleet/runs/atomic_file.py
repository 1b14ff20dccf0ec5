"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qfleet.core.errors import UserError


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Where to write what becomes `target` afterwards; nothing of it is left if that fails."""
    # A name that no link can wait at: the folder may be that of a run from elsewhere.
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
