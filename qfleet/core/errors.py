"""Exceptions that determine the exit code or the supervisor's reaction."""

from __future__ import annotations


class UserError(Exception):
    """Invalid input. The message names the value and the remedy. The command line exits with 2, without a traceback.

    Examples:
        >>> qfleet.train("cartpole", learner=dict(batch_sise=64))
        Traceback (most recent call last):
            ...
        qfleet.core.errors.UserError: keyword: learner.batch_sise: unknown key; did you mean learner.batch_size?
    """


class EnvFault(Exception):
    """Unrecoverable environment failure: it raised repeatedly, hung, or returned NaN; exit code 1."""


class BadOutput(EnvFault):
    """The environment returned NaN, infinity or a value outside its space, which no restart can fix; exit code 1."""


class ProcessFault(Exception):
    """A process of the run died repeatedly; the text includes its first output; exit code 1."""


class ExportError(Exception):
    """A policy cannot be exported, or the outputs of the exported file differ from the policy's; exit code 1."""


class CallbackError(Exception):
    """A callback or sink of the user raised an exception, which is the cause of this one; exit code 1."""


class RunLost(ProcessFault):
    """The run directory was deleted or replaced while the run wrote to it; exit code 1."""
