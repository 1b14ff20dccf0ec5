"""Python objects of the running program in a config: by `module:attribute` if they can be imported, else by
`object:PROGRAM-NUMBER:NAME`.

PROGRAM is a random word for this process, so that no other program mistakes an object of its own for one of this name.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from qfleet.core.errors import UserError

PREFIX = "object:"
PROGRAM = secrets.token_hex(3)

_named: dict[str, tuple[Any, Any]] = {}
"""Reference -> the object as the user gave it, and what the reference stands for."""


def reference_to(value: Any, stands_for: Any = None, base: str | None = None) -> str:
    """Name of an object that `load_attribute` finds in this process; the same for the same object.

    Args:
        value: The object, which is kept for as long as the process lives.
        stands_for: What `load_attribute` returns instead of the object, in place of what it returned before.
        base: The name to show; None = that of the object or its class.
    """
    imported = import_name(value)
    if imported is not None and stands_for is None:
        return imported
    reference = next((name for name, (known, _) in _named.items() if known is value),
                     f"{PREFIX}{PROGRAM}-{len(_named) + 1}:{base or _plain_name(value)}")
    _named[reference] = (value, value if stands_for is None else stands_for)
    return reference


def import_name(value: Any) -> str | None:
    """`module:attribute` under which an object can be imported in this process, or None."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    for name in path.split("."):
        found = getattr(found, name, None)
    return f"{module}:{path}" if found is value or _same_method(found, value) else None


def is_object(reference: Any) -> bool:
    """True for a name that only the process knows in which the object was named."""
    return isinstance(reference, str) and reference.startswith(PREFIX)


def is_local(reference: str) -> bool:
    """True for a name that other processes cannot import: of an object, or of a definition of the script itself."""
    return is_object(reference) or reference.startswith("__main__:")


def require_names(settings: Any, starts: str) -> None:
    """UserError if settings have a name that is local to this process, where the setting `starts` starts others."""
    names = list(dict.fromkeys(readable(text) for text in texts_of(settings) if is_local(text)))
    if names:
        own = names[0].removeprefix("__main__:")
        example = own if own.isidentifier() and own != "lambda" else "make_env"
        raise UserError(f"{', '.join(names)}: definitions of a script or notebook, lambdas and instances cannot be "
                        f"imported by the other processes that {starts} starts: put a class or a function into a file, "
                        f"my_module.py, and name it my_module:{example}, or import it from there and pass it")


def texts_of(value: Any) -> Iterator[str]:
    """Yield every text in a tree, keys included: a wrapper with arguments is a key."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


def readable(text: str) -> str:
    """A text with objects by their names alone, without the parts that make them unique."""
    return re.sub(rf"{PREFIX}[^:\s]+:", "", text)


def find_object(reference: str) -> Any:
    """The object of a reference; UserError if it was named in another process."""
    try:
        return _named[reference][1]
    except KeyError:
        raise UserError(f"{readable(reference)} was an object of the Python program that started the run, and no "
                        "other program knows it: pass it again, as env=... or wrappers=[...] of qfleet.resume, "
                        "evaluate, load or rollout") from None


def _plain_name(value: Any) -> str:
    value = getattr(value, "func", value)  # of a functools.partial
    return str(getattr(value, "__name__", type(value).__name__)).strip("<>")


def _same_method(found: Any, value: Any) -> bool:
    """A class method is another object at every access."""
    owner = getattr(value, "__self__", None)
    return isinstance(owner, type) and owner is getattr(found, "__self__", None) and found == value
