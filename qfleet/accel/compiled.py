"""Networks compiled by torch.compile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from qfleet.core.tracebacks import first_line

log = logging.getLogger(__name__)


def compile_if_possible(*nets: torch.nn.Module) -> None:
    """Compile the networks at their first call; if compilation fails, all run uncompiled from then on.

    Errors of the call itself are raised again by the uncompiled call.
    """

    def compiled(net: torch.nn.Module) -> Callable[..., Any]:
        net.compile()
        compiled_call = net._compiled_call_impl
        assert compiled_call is not None

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return compiled_call(*args, **kwargs)
            except RuntimeError as error:
                log.warning("learner.compile: compiling failed (%s); networks run uncompiled. Without a C++ compiler: "
                            "apt install g++, or learner.compile=false", first_line(error))
                for other in nets:
                    other._compiled_call_impl = None
                return net(*args, **kwargs)

        return call

    for net in nets:
        net._compiled_call_impl = compiled(net)
