"""Entry point of `qfleet`, of `python -m qfleet` and of child processes."""

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import NoReturn

from qfleet.cli.commands import main
from qfleet.process.signals import ignore_late, keep_exit_code

NO_RESTART_CODES = (2, 75)
"""Usage error, or stopped by the scheduler: a restart would end in the same way, or is not wanted."""


def leave(code: int, code_file: str | None = None) -> NoReturn:
    """End this process with an exit code.

    A rank exits immediately: its work is complete and written, and native threads may abort an interpreter that shuts
    down, which our driver, torchrun and srun would report as a failed rank.

    torchrun passes on only the exit codes 0 and 1, and may restart ranks: a final exit code is written to `code_file`
    instead.
    """
    of_srun = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_NTASKS") != "1"
    if of_srun or {"QFLEET_RANK", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        if code_file and code in NO_RESTART_CODES:
            Path(code_file).write_text(f"{code}\n")
            code = 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def collect_garbage() -> None:
    """Free what is only held by reference cycles, but keep the interpreter from scanning all modules for it at exit.

    The scan is slow. Without any, native objects of environments would be left over, which nanobind reports as leaks.
    Modules are not part of the collection here: `main` froze them after importing them.
    """
    gc.collect()
    gc.freeze()


def run() -> NoReturn:
    """Run the `qfleet` command and exit with its code."""
    stopped = os.environ.pop("QFLEET_STOPPED", None)  # for this process only, not for its children
    atexit.register(ignore_late)  # registered first, so it runs last
    atexit.register(collect_garbage)
    keep_exit_code()
    leave(main(), stopped)


if __name__ == "__main__":
    run()
