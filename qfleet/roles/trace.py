"""The operations that a function of tensors consists of, recorded once and tidied, to be played back."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from qfleet.roles.tidy import tidy

TRACING = threading.Lock()
"""The tracer puts its own calls into torch's modules, for all threads: whoever records does so alone."""


def traced(do: Callable[..., Sequence[torch.Tensor | None]], *given: torch.Tensor) -> Callable[..., list[Any]]:
    """What `do` does with tensors of these shapes: the same operations in the same order, without what called them."""
    with TRACING:
        _import_quietly()
        module = make_fx(do)(*given)
    tidy(module)
    return module.forward


def _import_quietly() -> None:
    """Import what the tracer needs; left to itself, that makes a cache folder among the temporary files."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        return
    os.environ[name] = os.path.dirname(torch.__file__)  # a folder that is there already
    try:
        importlib.import_module("torch._inductor.compiler_bisector")
    finally:
        del os.environ[name]
