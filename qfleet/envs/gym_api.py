"""Checks of return values against the Gymnasium API; environments written for the older Gym API violate it."""

from __future__ import annotations

from typing import Any

import numpy as np

API = "see https://gymnasium.farama.org/introduction/migration_guide if it was written for the old Gym"


def fault_of_reset(answer: Any) -> str | None:
    """Problem with the return value of `reset`, or None."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict):
        return None
    return f"reset must return (observation, info dict); it returned {_form(answer)}; {API}"


def fault_of_step(answer: Any) -> str | None:
    """Problem with the return value of `step`, or None."""
    if isinstance(answer, tuple) and len(answer) == 5:
        return None
    return f"step must return (observation, reward, terminated, truncated, info); it returned {_form(answer)}; {API}"


def fault_of_reward(reward: Any) -> str | None:
    """Problem with a reward that is not one real number (a string or a list is not one), or None."""
    shape = getattr(reward, "shape", ())
    if hasattr(reward, "__float__") and not isinstance(reward, np.complexfloating) and shape == ():
        return None
    form = f"{_form(reward)}{f' of shape {tuple(shape)}' if shape else ''}"
    return f"step must return the reward as one number, not {form}: return a float"


def fault_of_call(error: BaseException) -> str | None:
    """API problem behind an exception: a wrapper received the old 4-tuple, or `reset` takes no seed; else None."""
    text = str(error)
    if isinstance(error, ValueError) and "to unpack (expected 5, got 4)" in text:
        return fault_of_step((None,) * 4)
    if isinstance(error, TypeError) and "reset() got an unexpected keyword argument 'seed'" in text:
        return f"reset must take a seed, as in reset(self, *, seed=None, options=None); {API}"
    return None


def _form(answer: Any) -> str:
    size = f" of {len(answer)}" if isinstance(answer, tuple) else ""
    return f"a {type(answer).__name__}{size}"
