"""The process of one round: `python -m speed.one_round ORDER` prints the throughput as JSON on its last line."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict

from speed.rounds import measure_order


def main() -> int:
    try:
        found = measure_order(sys.argv[1])
    except Exception:
        traceback.print_exc()
        return 1
    print(json.dumps(asdict(found)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
