"""Hardware and package versions of this machine, for run.json, `qfleet doctor` and the scripts of benchmarks/."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from qfleet import __version__


def cpu_model() -> str:
    """Model name of the CPU, or its architecture if the system does not provide the name."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Physical memory, regardless of a container's limit; None if unknown."""
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes and bfloat16 support of every GPU."""
    import torch  # here, so that commands that only read runs need not import it

    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append({"name": facts.name, "memory": facts.total_memory, "bf16": facts.major >= 8})
    return found


def package_version(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of qfleet and of the installed packages among `names`."""
    found = {name: package_version(name) for name in names}
    return {"qfleet": __version__} | {name: version for name, version in found.items() if version is not None}
