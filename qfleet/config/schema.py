"""The base of every config section, and the number types its fields are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

_BOOL_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0"})


def _whole(value: Any) -> Any:
    """Accept 1e6 and '1e6' where a count is asked for; refuse True, which Python takes for 1."""
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
    """A frozen section of the config; lives beside the code that reads it, one line of doc per field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True,
                              use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_words_for_bools(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes `yes` and 1 for True, and True for 1.0: here only true and false are yes/no values."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise ValueError("a number is needed, not true or false")
        if bool not in kinds or isinstance(value, bool) or (isinstance(value, int) and int in kinds):
            return value
        if annotation is bool or str(value).lower() in _BOOL_WORDS:
            raise ValueError("true or false is needed")
        return value

    def inactive(self) -> dict[str, str]:
        """Fields that have no effect, given the others, and why: setting one of them is refused.

        A section may also speak, by dotted key, for the sections inside of it.
        """
        return {}


def sections(model: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    """The model itself and every section below it, each with its dotted path (the root's is empty)."""
    yield path, model
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, Config):
            yield from sections(value, join_key(path, name))


def join_key(path: str, name: str) -> str:
    return f"{path}.{name}" if path else str(name)  # a script's mapping may have other keys, to be refused as unknown


def flatten(model: Config) -> dict[str, Any]:
    """Every value by dotted key, in the order of the fields; lists and free dicts are single values."""
    flat: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, Config):
            flat |= {join_key(name, key): inner for key, inner in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def inactive_keys(model: Config) -> dict[str, str]:
    """Dotted key -> reason, for every key of the whole config that has no effect."""
    return {join_key(path, name): reason for path, section in sections(model)
            for name, reason in section.inactive().items()}
