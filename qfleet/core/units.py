"""Formatting of quantities for messages."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Bytes with a decimal unit (powers of 1000): `5 MB`, `0.317 GB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if value < 1000 or unit == "PB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
