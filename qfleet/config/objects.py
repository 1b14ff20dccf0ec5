"""Python objects of the running program in a config: by `module:attribute` if they can be imported, else `object:NAME`.

A name `object:NAME` is only known to the process in which the object was named.
"""

from __future__ import annotations

import sys
from typing import Any

from qfleet.core.errors import UserError

PREFIX = "object:"

_named: dict[str, tuple[Any, Any]] = {}
"""NAME -> the object as the user gave it, and what the name stands for."""


def reference_to(value: Any, stands_for: Any = None, base: str | None = None) -> str:
    """Name of an object that `load_attribute` finds in this process; the same for the same object.

    `stands_for` is what `load_attribute` returns instead of the object, `base` the wanted name.
    """
    imported = import_name(value)
    if imported is not None and stands_for is None:
        return imported
    base = base or getattr(value, "__name__", type(value).__name__).strip("<>")
    name, number = base, 1
    while name in _named and _named[name][0] is not value:
        number += 1
        name = f"{base}-{number}"
    _named.setdefault(name, (value, value if stands_for is None else stands_for))
    return PREFIX + name


def import_name(value: Any) -> str | None:
    """`module:attribute` under which an object can be imported in this process, or None."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    for name in path.split("."):
        found = getattr(found, name, None)
    return f"{module}:{path}" if found is value else None


def is_object(reference: Any) -> bool:
    """True for a name that only the process knows in which the object was named."""
    return isinstance(reference, str) and reference.startswith(PREFIX)


def find_object(reference: str) -> Any:
    """The object of an `object:NAME`; UserError if it was named in another process."""
    try:
        return _named[reference.removeprefix(PREFIX)][1]
    except KeyError:
        raise UserError(f"{reference!r} was an object of the Python program that started the run, which other programs "
                        "do not know: pass it again, as env=... or wrappers=... of qfleet.resume, evaluate or "
                        "rollout") from None
