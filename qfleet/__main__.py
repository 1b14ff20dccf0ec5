"""`python -m qfleet` is the `qfleet` command; child processes enter here too."""

import os
import sys
from typing import NoReturn

from qfleet.cli import main


def leave(code: int) -> NoReturn:
    """End this process. A rank of a torchrun job ends at once: what it had to do is done and written, and native
    threads may abort an interpreter that is torn down under them, which torchrun takes for the death of a rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
