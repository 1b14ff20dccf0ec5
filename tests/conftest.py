"""Under CI nothing may be skipped in silence: with QFLEET_NO_SKIPS a skipped test or file fails the session.

Files whose tests are given most time come first, so that in the end no worker is left alone with a long one.
Tests marked `gpu` are deselected where there is no GPU.
"""

import gc
import os
from collections import defaultdict

from hypothesis import settings

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as the package does, but test files may import grpc before it

settings.register_profile("no clock", deadline=None)  # no test asserts a duration: CI machines are busy
settings.load_profile("no clock")

SKIPPED: list[str] = []


def pytest_collection_modifyitems(config, items):
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu and not gpu_found():
        config.hook.pytest_deselected(items=for_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    allowed = defaultdict(float)  # seconds for a test of each file, where more than usual
    for item in items:
        mark = item.get_closest_marker("timeout")
        allowed[item.path] = max(allowed[item.path], mark.args[0] if mark else 0)
    items.sort(key=lambda item: -allowed[item.path])  # stable: within a file, and among equals, nothing moves


def gpu_found():
    import torch  # test files have imported it already

    return torch.cuda.is_available()


def pytest_collection_finish():
    gc.freeze()  # modules and tests stay: no collection during a test needs to go through them


def pytest_runtest_logreport(report):
    if report.skipped:
        SKIPPED.append(f"{report.nodeid}: {report.longrepr}")


def pytest_collectreport(report):
    if report.skipped:
        SKIPPED.append(f"{report.nodeid}: {report.longrepr}")


def pytest_sessionfinish(session, exitstatus):
    if SKIPPED and os.environ.get("QFLEET_NO_SKIPS"):
        print("\nskipped, which CI does not allow:\n" + "\n".join(SKIPPED))
        session.exitstatus = 1
