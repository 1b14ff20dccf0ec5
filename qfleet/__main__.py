"""`python -m qfleet` is the `qfleet` command; child processes enter here too."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from qfleet.cli import main

PREEMPTED = 75


def leave(code: int, word: str | None = None) -> NoReturn:
    """End this process. A rank ends at once: what it had to do is done and written, and native threads may abort an
    interpreter that is torn down under them, which torchrun and srun take for the death of a rank.

    torchrun starts anew whoever does not end with 0: a rank that was told to stop says so in the file `word` instead.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or ("SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_NTASKS") != "1"):
        if word and code == PREEMPTED:
            Path(word).touch()
            code = 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    stopped = os.environ.pop("QFLEET_STOPPED", None)  # it is a word of this process, not of its children
    leave(main(), stopped)
