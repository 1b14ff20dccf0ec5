"""Numba if it can be imported, else plain Python."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _import_numba() -> Any:
    # With colorama installed, numba colours its errors and leaves an escape code after every command's output.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    try:
        import numba
    except ImportError:  # an interpreter newer than numba, or a platform without it
        logging.getLogger(__name__).warning("numba cannot be imported: replay and curiosity are several times slower")
        return None
    return numba


_numba = _import_numba()
HAS_NUMBA = _numba is not None


def jit(function: Function, *, reorder: bool = False) -> Function:
    """Compile a function of arrays and numbers, cached on disk; it must also run uncompiled, slower.

    With `reorder`, sums may be reordered, which is several times faster and changes the last
    digits.
    """
    if not HAS_NUMBA:
        return function
    fastmath = {"reassoc", "contract"} if reorder else False
    try:
        kernel: Function = _numba.njit(cache=True, nogil=True, fastmath=fastmath)(function)
    except RuntimeError:  # no writable cache: a read-only installation without a home directory
        kernel = _numba.njit(nogil=True, fastmath=fastmath)(function)
    return kernel
