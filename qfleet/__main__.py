"""`python -m qfleet` is the `qfleet` command; child processes enter here too."""

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import NoReturn

from qfleet.cli.commands import main
from qfleet.process.signals import ignore_late, keep_exit_code

FINAL_EXIT_CODES = (2, 75)
"""Misused, or told to stop: another attempt would end in the same way, or is not wanted."""


def leave(code: int, word: str | None = None) -> NoReturn:
    """End this process. A rank ends at once: what it had to do is done and written, and native threads may abort an
    interpreter that is torn down under them, which torchrun and srun take for the death of a rank.

    torchrun tells no exit code but 0 and 1, and may start ranks anew: what is final is said in the file `word` instead.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or ("SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_NTASKS") != "1"):
        if word and code in FINAL_EXIT_CODES:
            Path(word).write_text(f"{code}\n")
            code = 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run() -> NoReturn:
    """The `qfleet` command, from the first line to the exit code."""
    stopped = os.environ.pop("QFLEET_STOPPED", None)  # it is a word of this process, not of its children
    atexit.register(ignore_late)  # registered first, it runs last
    atexit.register(gc.freeze)  # the end of the interpreter would look for garbage in all modules, which takes long
    keep_exit_code()
    leave(main(), stopped)


if __name__ == "__main__":
    run()
