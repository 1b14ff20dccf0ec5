"""Directory of a new run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qfleet.core.errors import ProcessFault
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory, default_name
from qfleet.sync.process_group import RankLost


@contextmanager
def new_run(config: RunConfig) -> Iterator[RunDirectory]:
    """Create and lock the directory of a run; unlock it at the end.

    If the run fails before it opens its metrics, the directory is removed: its name would stay taken by a run that
    never started. A failed process is an exception, since the error names its log in there.
    """
    directory = RunDirectory.create(config.run, default_name(config.env.id, config.agent.algo, config.seed))
    try:
        yield directory
    except BaseException as error:
        names_log = isinstance(error, ProcessFault) and not isinstance(error, RankLost)
        if not directory.metrics.exists() and not names_log:
            directory.discard()
        raise
    finally:
        directory.unlock()
