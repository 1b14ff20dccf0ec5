"""What this machine offers and what a run would take of it: versions, extras, cores, memory, disk, GPU, display."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qfleet import __version__
from qfleet.runs.progress import size

CORE = ("torch", "numpy", "gymnasium", "pydantic", "numba", "zstandard", "safetensors", "tensorboard", "rich")
EXTRAS = {"atari": ("ale-py", "opencv-python-headless"), "video": ("imageio-ffmpeg", "pillow", "pygame"),
          "plot": ("matplotlib",), "wandb": ("wandb",)}
SERVES = {"atari": "Atari games", "video": "films and the window of `play`", "plot": "learning curves as pictures",
          "wandb": "Weights & Biases"}
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


def examine(plan: Mapping[str, str] | None = None, root: str | Path = ".") -> dict[str, Any]:
    """Everything that was found, as plain data; `plan` is what a recipe would take, `root` where runs would lie."""
    return {
        "qfleet": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in CORE},
        "extras": {extra: {"installed": all(_version(name) for name in names),
                           "packages": {name: _version(name) for name in names},
                           "serves": SERVES[extra], "install": f"pip install 'qfleet[{extra}]'"}
                   for extra, names in EXTRAS.items()},
        "cpu": _cpu(),
        "memory": _memory(),
        "disk": _disk(Path(root)),
        "gpu": _gpu(),
        "tools": {"compiler": shutil.which("g++") or shutil.which("clang++") or shutil.which("cl"),
                  "ffmpeg": _ffmpeg(), "display": _display()},
        "plan": dict(plan) if plan is not None else None,
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as lines for people: what is there, what is missing, and how to get it."""
    cpu, memory, disk, tools = report["cpu"], report["memory"], report["disk"], report["tools"]
    packages = "  ".join(f"{name} {version or 'MISSING'}" for name, version in report["packages"].items())
    rows = [
        ("qfleet", f"{report['qfleet']}, Python {report['python']}, {report['platform']}"),
        ("packages", packages),
        ("cpu", f"{cpu['model']}, {cpu['cores']} usable cores of {cpu['present']}"),
        ("threads", f"torch {cpu['threads']['vectors']} for vectors, {cpu['threads']['images']} for images; "
                    f"environments {cpu['threads']['env']}"),
        ("bf16", f"{'in hardware' if cpu['bf16'] else 'not in hardware: precision=fp32 is likely faster'} (cpu)"),
        ("memory", f"{size(memory['available'])} free of {size(memory['total'])}" if memory else "unknown"),
        ("disk", f"{size(disk['free'])} free of {size(disk['total'])} at {disk['path']}"),
        ("gpu", _gpu_text(report["gpu"])),
        ("compiler", tools["compiler"] or "none: learner.compile needs one (apt install g++)"),
        ("ffmpeg", tools["ffmpeg"] or "none: pip install 'qfleet[video]'"),
        ("display", tools["display"] or "none: `qfleet record` films what `qfleet play` would show"),
    ]
    lines = [f"{name:<10} {text}" for name, text in rows]
    lines.append("extras")
    for extra, facts in report["extras"].items():
        state = "installed" if facts["installed"] else f"missing    {facts['install']}"
        lines.append(f"  {extra:<8} {facts['serves']:<34} {state}")
    if report["plan"] is not None:
        lines += ["plan", *(f"  {name:<11} {text}" for name, text in report["plan"].items())]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    from qfleet.runtime.threads import thread_plan, usable_cores

    images, vectors = thread_plan(images=True), thread_plan(images=False)
    facts = _read("/proc/cpuinfo").splitlines()
    model = next((line.partition(":")[2].strip() for line in facts if line.startswith("model name")), "")
    flags = next((line.split() for line in facts if line.startswith(("flags", "Features"))), [])
    return {"model": model or platform.processor() or platform.machine(), "present": os.cpu_count(),
            "cores": usable_cores(), "bf16": any(flag in flags for flag in BF16_FLAGS),
            "threads": {"images": images.torch, "vectors": vectors.torch, "env": images.env}}


def _memory() -> dict[str, int] | None:
    """Bytes in all and bytes free, both within the container's limit where there is one."""
    from qfleet.replay.planner import available_memory

    fields = {line.split(":")[0]: line.split()[1] for line in _read("/proc/meminfo").splitlines() if ":" in line}
    limit, available = _read("/sys/fs/cgroup/memory.max").strip(), available_memory()
    if available is None or "MemTotal" not in fields:
        return None
    total = int(fields["MemTotal"]) * 1024
    return {"total": min(total, int(limit)) if limit.isdigit() else total, "available": available}


def _disk(root: Path) -> dict[str, Any]:
    place = root.expanduser().absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    return {"path": str(place), "total": usage.total, "free": usage.free}


def _gpu() -> list[dict[str, Any]]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append({"name": facts.name, "memory": facts.total_memory, "bf16": facts.major >= 8})
    return found


def _gpu_text(gpus: list[dict[str, Any]]) -> str:
    if not gpus:
        return "none: device=auto means cpu"
    return "; ".join(f"{gpu['name']}, {size(gpu['memory'])}, bf16 {'yes' if gpu['bf16'] else 'no'}" for gpu in gpus)


def _ffmpeg() -> str | None:
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return shutil.which("ffmpeg")


def _display() -> str | None:
    """The screen that `play` would open a window on."""
    if sys.platform in ("darwin", "win32"):
        return sys.platform
    return os.environ.get("WAYLAND_DISPLAY") or os.environ.get("DISPLAY") or None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
