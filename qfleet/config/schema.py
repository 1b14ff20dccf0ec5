"""Base class of all config sections, and the numeric types of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

_BOOL_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0"})


def _whole(value: Any) -> Any:
    """Accept 1e6 and '1e6' as integers; reject True, which Python treats as 1."""
    if isinstance(value, bool):
        raise ValueError("a whole number is needed, not true or false")
    if isinstance(value, str):
        try:
            number = float(value.replace("_", ""))
        except ValueError:
            return value
        return int(number) if number.is_integer() else number
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _real(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


Integer = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Integer, Field(ge=0)]
PositiveCount = Annotated[Integer, Field(ge=1)]
Real = Annotated[float, BeforeValidator(_real)]
Positive = Annotated[Real, Field(gt=0)]
NonNegative = Annotated[Real, Field(ge=0)]
Fraction = Annotated[Real, Field(ge=0, le=1)]


class Config(BaseModel):
    """Frozen config section, defined next to the code that reads it, with a description for each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True,
                              use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _only_true_and_false(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept only true and false as booleans; pydantic also takes `yes` and 1 for True, and True for 1.0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        types = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and bool not in types and (int in types or float in types):
            raise ValueError("a number is needed, not true or false")
        if bool not in types or isinstance(value, bool) or (isinstance(value, int) and int in types):
            return value
        if annotation is bool or str(value).lower() in _BOOL_WORDS:
            raise ValueError("true or false is needed")
        return value

    def inactive(self) -> dict[str, str]:
        """Fields without effect given the others. Setting one of them is an error.

        Returns:
            Reason by field name. A section may also list dotted keys of the sections inside it.
        """
        return {}


def sections(model: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    """The model itself and every section below it, with dotted paths (empty for the root)."""
    yield path, model
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, Config):
            yield from sections(value, join_key(path, name))


def join_key(path: str, name: str) -> str:
    return f"{path}.{name}" if path else str(name)  # a script may pass other key types, rejected later as unknown


def flatten(model: Config) -> dict[str, Any]:
    """Every value by dotted key, in field order; lists and free dicts are single values."""
    flat: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, Config):
            flat |= {join_key(name, key): inner for key, inner in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def inactive_keys(model: Config) -> dict[str, str]:
    """Dotted key -> reason, for every key of the whole config without effect."""
    return {join_key(path, name): reason for path, section in sections(model)
            for name, reason in section.inactive().items()}
