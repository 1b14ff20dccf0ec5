"""GPU kernels of an update in a few groups. To a timer, an update that is one CUDA graph is a single row.

Kernels are grouped by the names that libraries give them, so the groups are estimates: a fused kernel, or an activation
in the epilogue of a matrix product, counts for the group of its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MATRIX = "matrix, convolution"
OTHER = "other"
ELEMENTWISE, REDUCTION = "elementwise", "reduction, scan, search"
GROUPS = (
    (ELEMENTWISE, r"^triton_poi|^(un)?finish$"),  # qfleet's own: bias, norm and activation at once
    (REDUCTION, r"^triton_(red|per)|dot_kernel|^add_up$"),
    ("optimizer", r"^adam|^rmsprop|multi_tensor"),
    (MATRIX, r"gemm|gemv|nvjet|xmma|cutlass|winograd|implicit_convolve|splitk|^triton_(tem|mm)|^(un)?rate$|^weigh$"),
    (REDUCTION, r"reduce_kernel|device_?(scan|reduce|radix)|searchsorted|softmax|_norm|gammabeta"),
    ("copy, gather", r"memcpy|memset|copy|catarray|gather|scatter|(?<!with_)index|tonhwc|tonchw|^lay$|^join$"),
    (ELEMENTWISE, r"elementwise|distribution|fill"),
)
"""The first pattern found in a kernel's lower-case name decides its group."""


@dataclass(frozen=True)
class KernelGroup:
    """Kernels of one kind: milliseconds and launches per update, and the milliseconds at the machine's peak rate."""

    name: str
    ms: float
    count: float
    roof_ms: float | None = None

    @property
    def distance(self) -> float | None:
        """Time divided by the time at the peak rate."""
        return self.ms / self.roof_ms if self.roof_ms else None


def group_of(kernel: str) -> str:
    name = kernel.lower()
    return next((group for group, words in GROUPS if re.search(words, name)), OTHER)


def grouped(kernels: Iterable[tuple[str, float, int]], updates: int, matrix_roof_ms: float) -> list[KernelGroup]:
    """Groups of (name, microseconds, count) of kernels, the longest first."""
    spent: dict[str, tuple[float, float]] = {}
    for name, us, count in kernels:
        before = spent.get(group := group_of(name), (0.0, 0.0))
        spent[group] = (before[0] + us / 1e3 / updates, before[1] + count / updates)
    return sorted((KernelGroup(name, ms, count, matrix_roof_ms if name == MATRIX else None)
                   for name, (ms, count) in spent.items()), key=lambda group: -group.ms)


def trace_kernels(learn: Callable[[int], int], wait: Callable[[], None], updates: int) -> list[tuple[str, float, int]]:
    """(Name, microseconds, count) of the kernels of `updates` updates."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    wait()
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        learn(updates)
        wait()
    return [(event.key, event.self_device_time_total, event.count) for event in trace.key_averages()
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)]


def lines(groups: Sequence[KernelGroup]) -> list[str]:
    """The groups as a text table."""
    if not groups:
        return []
    total = sum(group.ms for group in groups)
    table = [["on the GPU", "ms", "kernels", "share", "at best", "distance"]]
    for group in groups:
        table.append([group.name, f"{group.ms:.3f}", f"{group.count:.0f}", f"{100 * group.ms / total:.0f} %",
                      "" if group.roof_ms is None else f"{group.roof_ms:.3f}",
                      "" if group.distance is None else f"{group.distance:.1f} ×"])
    table.append(["all kernels", f"{total:.3f}", f"{sum(group.count for group in groups):.0f}", "", "", ""])
    return aligned(table)


def aligned(table: list[list[str]]) -> list[str]:
    """Table rows as text: first column left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join([f"  {row[0].ljust(widths[0])}", *(cell.rjust(width) for cell, width in
                                                        zip(row[1:], widths[1:], strict=True))]).rstrip()
            for row in table]
