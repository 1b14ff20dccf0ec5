"""Numba where it can be imported, plain Python where not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _import_numba() -> Any:
    # With colorama installed, numba would colour its errors, and an escape would follow the last line of every command.
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
    """Compile a function of arrays and numbers, once per machine; it must also run, slower, uncompiled.

    With `reorder` sums may be added up in another order, which is several times faster and differs in the last digits.
    """
    if not HAS_NUMBA:
        return function
    loose = {"reassoc", "contract"} if reorder else False
    try:
        kernel: Function = _numba.njit(cache=True, nogil=True, fastmath=loose)(function)
    except RuntimeError:  # nowhere to write the cache: a read-only installation without a home directory
        kernel = _numba.njit(nogil=True, fastmath=loose)(function)
    return kernel
