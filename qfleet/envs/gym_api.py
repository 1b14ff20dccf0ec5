"""What Gymnasium asks of an environment's answers; the Gym before it had other ones, and code for it abounds."""

from __future__ import annotations

from typing import Any

import numpy as np

API = "see https://gymnasium.farama.org/introduction/migration_guide if it was written for the old Gym"


def fault_of_reset(answer: Any) -> str | None:
    """What is wrong with the form of what `reset` returned."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict):
        return None
    return f"reset must return (observation, info dict); it returned {_form(answer)}; {API}"


def fault_of_step(answer: Any) -> str | None:
    """What is wrong with the form of what `step` returned."""
    if isinstance(answer, tuple) and len(answer) == 5:
        return None
    return f"step must return (observation, reward, terminated, truncated, info); it returned {_form(answer)}; {API}"


def fault_of_reward(reward: Any) -> str | None:
    """What is wrong with a reward that is not one real number; a number in a string or in a list is not one."""
    shape = getattr(reward, "shape", ())
    if hasattr(reward, "__float__") and not isinstance(reward, np.complexfloating) and shape == ():
        return None
    form = f"{_form(reward)}{f' of shape {tuple(shape)}' if shape else ''}"
    return f"step must return the reward as one number, not {form}: return a float"


def fault_of_call(error: BaseException) -> str | None:
    """What an exception says of the same: a wrapper met the old answers, or `reset` takes no seed."""
    text = str(error)
    if isinstance(error, ValueError) and "to unpack (expected 5, got 4)" in text:
        return fault_of_step((None,) * 4)
    if isinstance(error, TypeError) and "reset() got an unexpected keyword argument 'seed'" in text:
        return f"reset must take a seed, as in reset(self, *, seed=None, options=None); {API}"
    return None


def _form(answer: Any) -> str:
    size = f" of {len(answer)}" if isinstance(answer, tuple) else ""
    return f"a {type(answer).__name__}{size}"
