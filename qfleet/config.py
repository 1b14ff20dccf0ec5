"""Strict YAML <-> typed config with dotted overrides: an unknown, inactive or contradictory key is an error."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """Accept 1e6 and '1e6' where a count is asked for; refuse True, which Python takes for 1."""
    if isinstance(value, bool):
        raise ValueError("a whole number is needed, not a yes/no")
    if isinstance(value, str):
        try:
            value = float(value.replace("_", ""))
        except ValueError:
            return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _real(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not a yes/no")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=0)]
PositiveCount = Annotated[Whole, Field(ge=1)]
Real = Annotated[float, BeforeValidator(_real)]
Positive = Annotated[Real, Field(gt=0)]
NonNegative = Annotated[Real, Field(ge=0)]
Fraction = Annotated[Real, Field(ge=0, le=1)]


class Config(BaseModel):
    """A frozen section of the config; lives beside the code that reads it, one line of doc per field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    def inactive(self) -> dict[str, str]:
        """Fields that have no effect, given the others, and why: setting one of them is refused."""
        return {}
