"""Under CI nothing may be skipped in silence: with QFLEET_NO_SKIPS a skipped test or file fails the session."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as the package does, but test files may import grpc before it

SKIPPED: list[str] = []


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
