"""Writer of metric records to an MLflow run: parameters, metrics over steps, tags; a resumed run continues its run.

Records are sent by a thread, so that a slow or absent server never delays the training.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from qfleet import __version__
from qfleet.core.errors import UserError
from qfleet.runs.directory import RunDirectory
from qfleet.runs.metric_writers import Record, ThrottledWarning, is_number
from qfleet.runs.safe_open import open_no_follow

log = logging.getLogger(__name__)

EXPERIMENT = "qfleet"
RUN_FILE = "mlflow.json"
"""File of a run directory with the id of its MLflow run and the store that holds it."""

MAX_PARAM_CHARACTERS, MAX_PARAMS = 500, 100
"""Limits of MLflow for a value and for one request."""

WAITING_RECORDS, CLOSE_TIMEOUT_S = 1000, 15.0
ATTEMPTS, RETRY_S = 3, 1.0
"""How often a record is sent, and seconds between. Runs of one root share a SQLite file, which may be locked."""

SETTINGS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
            "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ENABLE_ASYNC_LOGGING": "false"}
"""Environment variables of MLflow that are set unless the user has set them: by default a request to an absent server
is repeated for minutes."""


class MlflowWriter:
    """Logs to MLflow: to MLFLOW_TRACKING_URI, or to a SQLite file next to the run directories.

    At the start of a new run an error raises UserError. Later errors, also at the start of a resume, only warn.
    """

    def __init__(self, directory: RunDirectory, config: Mapping[str, Any]) -> None:
        self._warning = ThrottledWarning("mlflow")
        self._records: queue.Queue[Record | None] = queue.Queue(WAITING_RECORDS)
        self._client: Any = None
        self._id: str | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        require_mlflow()
        address = (os.environ.get("MLFLOW_TRACKING_URI")
                   or f"sqlite:///{directory.path.resolve().parent / 'mlflow.db'}")
        self.uri = without_user(address)
        new = not directory.attempts()
        try:
            self._client = _connect(address)
            self._id = self._open(directory, dict(flat(config)))
        except Exception as error:
            if new:
                raise UserError(f"run.mlflow=true: {self.uri} cannot be used ({short_reason(error)}): set "
                                "MLFLOW_TRACKING_URI to the address of a server or to sqlite:///FILE, or "
                                "run.mlflow=false") from error
            self._warning.add(error)
            return
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        if self._thread is None:
            return
        try:
            self._records.put_nowait(dict(record))
        except queue.Full:
            self._warning.add(TimeoutError(f"{self.uri} is too slow"))

    def flush(self) -> None:
        """Records are sent by a thread."""

    def close(self) -> None:
        """Send what is waiting, for a few seconds at most, and end the MLflow run."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        failed = sys.exc_info()[0] is not None
        self._closing.set()
        with suppress(queue.Full):  # then the thread does not wait for a record
            self._records.put_nowait(None)
        thread.join(CLOSE_TIMEOUT_S)
        if thread.is_alive():
            self._warning.add(TimeoutError(f"{self.uri} does not answer, {self._unsent()} records are waiting"))
            return
        try:
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
        except Exception as error:
            self._warning.add(error)

    def _open(self, directory: RunDirectory, params: dict[str, str]) -> str:
        found = self._continued(directory)
        if found is not None:
            run, known = found
            changed = {f"resumed.{key}": value for key, value in params.items() if known.get(key) not in (None, value)}
            self._client.update_run(run, status="RUNNING")
            self._log(run, {key: value for key, value in params.items() if key not in known}, changed)
            return run
        tags = {"qfleet.version": __version__, "qfleet.directory": str(directory.path.resolve()),
                **{f"qfleet.{key}": params[key] for key in ("env.id", "agent.algo", "seed") if key in params}}
        run = self._client.create_run(self._experiment(), run_name=directory.name, tags=tags).info.run_id
        self._log(run, params, {})
        text = json.dumps({"run_id": run, "tracking_uri": self.uri})
        (directory.path / RUN_FILE).write_text(text + "\n", encoding="utf-8")
        return str(run)

    def _continued(self, directory: RunDirectory) -> tuple[str, dict[str, str]] | None:
        """Id and parameters of the MLflow run that this run logged to before; None if there is none in this store."""
        known = {}
        with suppress(OSError, ValueError), open_no_follow(directory.path / RUN_FILE) as file:
            known = json.load(file)
        if not isinstance(known, dict) or without_user(str(known.get("tracking_uri"))) != self.uri:
            return None
        run = self._client.get_run(known["run_id"])
        return run.info.run_id, dict(run.data.params)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                found = self._client.get_experiment_by_name(name)
                if found is None:  # else another run has created it meanwhile
                    raise
        return str(found.experiment_id)

    def _log(self, run: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        pairs = [Param(key, value) for key, value in params.items()]
        for start in range(0, len(pairs), MAX_PARAMS):
            self._client.log_batch(run, params=pairs[start:start + MAX_PARAMS])
        if tags:
            self._client.log_batch(run, tags=[RunTag(key, value) for key, value in tags.items()])

    def _send_all(self) -> None:
        while not (self._closing.is_set() and self._records.empty()):
            record = self._records.get()
            if record is None:
                return
            if self._warning.waiting():  # the server was absent a moment ago
                self._warning.count()
            else:
                self._send_with_retries(record)

    def _send_with_retries(self, record: Record) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._send(record)
                return
            except Exception as error:  # a failing writer must not stop the training
                if attempt == ATTEMPTS:
                    self._warning.add(RuntimeError(short_reason(error)))
            self._closing.wait(RETRY_S)

    def _unsent(self) -> int:
        """Number of records that are not stored, with the one that is being sent."""
        return 1 + sum(record is not None for record in list(self._records.queue))

    def _send(self, record: Record) -> None:
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), int(record["step"])
        values = {tag: value.item() if hasattr(value, "item") else value for tag, value in record.items()}
        self._client.log_batch(self._id, metrics=[
            Metric(metric_name(tag), float(value), now, step) for tag, value in values.items()
            if tag != "step" and is_number(value) and abs(value) < float("inf")])


def require_mlflow() -> None:
    """Raise UserError if MLflow is not installed."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow  # noqa: F401
    except ImportError as error:
        raise UserError("run.mlflow=true needs MLflow: pip install 'qfleet[mlflow]'") from error


def _connect(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # the creation of a database is logged in many lines
    return MlflowClient(tracking_uri=uri)


def metric_name(tag: str) -> str:
    """Return a tag or key in the characters that MLflow allows in names."""
    return re.sub(r"[^\w./ -]", "_", tag)


def flat(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values as texts, cut to the length that MLflow stores."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield metric_name(f"{path}{key}"), text[:MAX_PARAM_CHARACTERS]


def without_user(text: str) -> str:
    """Return a text without the user names and passwords in its addresses."""
    return re.sub(r"://[^/\s]*@", "://", text)


def short_reason(error: BaseException) -> str:
    """Return the reason of an error in few words: that of the operating system, or the first line."""
    message = without_user(str(error))
    if found := re.search(r"\[Errno -?\d+\] ([\w ]+)", message):
        return found[1].strip()
    text = next((line for line in message.splitlines() if line.strip()), "")
    return f"{text[:200]}…" if len(text) > 200 else text or type(error).__name__
