"""Distributed deep Q-learning in PyTorch."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Callback", "CallbackError", "Episode", "EvalResult", "Evaluation", "ExportError", "FinalScore",
           "RolloutStep", "Run", "RunConfig", "RunControl", "RunSummary", "SavedCheckpoint", "TrainResult",
           "TrainedAgent", "TuneResult", "UserError", "__version__", "evaluate", "export", "list_runs", "load",
           "resume", "rollout", "train", "tune"]
TUNING = ("TuneResult", "tune")

if TYPE_CHECKING:
    from qfleet.api import (
        Callback,
        CallbackError,
        Episode,
        EvalResult,
        Evaluation,
        ExportError,
        FinalScore,
        RolloutStep,
        Run,
        RunConfig,
        RunControl,
        RunSummary,
        SavedCheckpoint,
        TrainedAgent,
        TrainResult,
        UserError,
        evaluate,
        export,
        list_runs,
        load,
        resume,
        rollout,
        train,
    )
    from qfleet.tuning.study import TuneResult, tune

if not TYPE_CHECKING:  # checkers would take any name for one of the API
    def __getattr__(name: str) -> Any:
        """Import `qfleet.train` and the other names of the API on first use, which keeps `import qfleet` fast."""
        if name in TUNING:
            from qfleet.tuning import study

            return getattr(study, name)
        if name in __all__:
            from qfleet import api

            return getattr(api, name)
        raise AttributeError(f"module 'qfleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names for tab completion."""
    return __all__
