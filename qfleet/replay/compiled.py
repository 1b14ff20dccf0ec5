"""Numba where it can be imported, plain Python where not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _import_numba() -> Any:
    try:
        import numba
    except ImportError:  # an interpreter newer than numba, or a platform without it
        logging.getLogger(__name__).warning("numba cannot be imported: replay runs on numpy, several times slower")
        return None
    return numba


_numba = _import_numba()
COMPILED = _numba is not None


def compiled(function: Function) -> Function:
    """Compile a function of arrays and numbers, once per machine; it must also run, slower, uncompiled."""
    if not COMPILED:
        return function
    try:
        kernel: Function = _numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # nowhere to write the cache: a read-only installation without a home directory
        kernel = _numba.njit(nogil=True)(function)
    return kernel
