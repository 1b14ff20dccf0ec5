"""`python -m qfleet` is the `qfleet` command; child processes enter here too."""

import sys

from qfleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
