"""Reading pages of the documentation."""

from __future__ import annotations

import re

CALLOUT = re.compile(r"^(?:!!!|\?\?\?\+?) .*\n((?:(?: {4}.*)?\n)+)", re.M)


def unfolded(text: str) -> str:
    """A page with the content of its callouts (`!!! note`, `??? note`) where it would stand without them."""
    complete = text if text.endswith("\n") else f"{text}\n"
    return CALLOUT.sub(lambda match: re.sub(r"^ {4}", "", match[1], flags=re.M), complete)
