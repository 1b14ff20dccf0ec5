"""Exceptions with a meaning for users or for the supervisor."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the user's: the message names the value and the remedy; shown without a traceback, exit 2."""


class EnvFault(Exception):
    """The environment failed beyond repair (it raised again and again, hung, or returned NaN); exit 1."""


class BadOutput(EnvFault):
    """The environment returned NaN, infinity, or what does not fit its space: no restart mends that; exit 1."""


class ProcessFault(Exception):
    """A process of a fleet died again and again; the text holds what it wrote the first time; exit 1."""


class RunLost(ProcessFault):
    """The directory of a run was deleted or replaced while the run wrote to it; exit 1."""
