"""Live page of a run: the data it polls, and the HTTP server that provides them.

The run is not affected: only its files are read. The page is open on this machine; other machines need the token.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import socket
import threading
import time
from dataclasses import asdict
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from qfleet.config import read_yaml
from qfleet.config.objects import readable
from qfleet.report.plots import format_value
from qfleet.report.series import DownsampledRecords, columns
from qfleet.report.status import RunGoal, RunStatus, format_score
from qfleet.report.webpage import CHARTS, list_videos, read_video, render_page, to_json
from qfleet.runs.directory import RunDirectory
from qfleet.runs.hparams import DEFAULT, flat_settings, origin_rank
from qfleet.runs.membership import MemberMonitor, member_files
from qfleet.runs.run_log import log_names, log_tail
from qfleet.runs.run_state import STATE_TEXT, RunState, describe_state, may_be_running, run_state
from qfleet.runs.safe_open import no_follow_opener
from qfleet.runs.tail import MetricsTail

SCRIPTS = (*CHARTS, "watch.js")
FRESH_S = 60.0
"""Age in seconds up to which files of a run on another host count as fresh. Runs log more often than that, and clocks
of hosts and shared disks differ by less."""

HEALTH: dict[RunState, str] = {"running": "healthy", "ended": "ended", "stopped": "ended", "interrupted": "ended",
                               "pruned": "ended", "failed": "lost", "died": "lost"}

LOG_LINES = 14

LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.I)


class RunFollower:
    """Status and curves of a run, updated from its files at each request."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        settings = read_yaml(run.config, no_follow_opener) if run.config.is_file() else {}
        self.settings = _setting_rows(settings, run)
        env = settings.get("env")
        self.env = str(env.get("id", "")) if isinstance(env, dict) else ""
        replay = settings.get("replay")
        evaluation = settings.get("eval")
        self.video_period = evaluation.get("video_period") if isinstance(evaluation, dict) else None
        self.alpha = replay.get("alpha") if isinstance(replay, dict) else None
        self.status = RunStatus(RunGoal.from_settings(settings, run.has_gpu()))
        self.known = DownsampledRecords()  # keeps the cost of a request independent of the run's length
        self._tail, self._members = MetricsTail(run.metrics, from_start=True), MemberMonitor(run.path)
        self._version = 0
        self._lock = threading.Lock()

    def updates_since(self, seen: int, log: str = "") -> dict[str, Any]:
        """Return the current status, the end of a log, and the curves only if they are newer than version `seen`."""
        with self._lock:
            state = run_state(self.run)
            for record in self._tail.new_records():
                self._add(record)
            running = may_be_running(state)
            members = self._members.poll(time.time()) if running else []
            health, words = self._health(state)
            return {"name": self.run.name, "env": self.env, "state": state, "words": words, "health": health,
                    **self._progress(running), "loop": self.status.loop_shares(), "roles": self.status.roles(),
                    "members": members, "events": list(self._members.events), "film": self.newest_video(),
                    "video_period": self.video_period, "log": self._log(log),
                    "version": self._version, "ratio": self.status.goal.ratio, "alpha": self.alpha,
                    "series": columns(self.known.records) if seen != self._version else None}

    def _progress(self, running: bool) -> dict[str, Any]:
        """Progress of the run; rates, time left and bottleneck only while it is running."""
        status = self.status
        bottleneck = status.bottleneck() if running else None
        steps_s, updates_s = status.rates() if running else (None, None)
        return {"headline": status.headline(running, " · ") if self.known else "no records yet",
                "fraction": status.goal.fraction(status.latest), "steps_s": steps_s, "updates_s": updates_s,
                "updates": status.count("updates"), "limit": None if bottleneck is None else asdict(bottleneck),
                "figures": [row for row in status.metrics() if running or not row[0].endswith("/s")] + self._score(),
                "gap": None if (gap := status.return_gap()) is None else gap.to_json()}

    def _score(self) -> list[tuple[str, str]]:
        """Score of the best policy of a run that has ended."""
        score = self.run.final_score()
        return [] if score is None else [("score", format_score(score))]

    def _health(self, state: RunState) -> tuple[str, str]:
        """Health of the learner and its description. On another host it is inferred from the files on a shared disk."""
        if state != "elsewhere":
            return HEALTH[state], describe_state(self.run, state)
        times = [path.stat().st_mtime for path in (self.run.metrics, *member_files(self.run.path)) if path.exists()]
        silent = time.time() - max(times, default=0.0)
        if silent > FRESH_S:
            return "unknown", STATE_TEXT[state]
        return "healthy", f"runs on another host: its files changed {max(0.0, silent):.0f} s ago"

    def _log(self, name: str) -> dict[str, Any]:
        """Names of the run's logs, and the last lines of one of them; of the first if there is none of that name."""
        names = log_names(self.run.path)
        shown = name if name in names else next(iter(names), "")
        return {"names": names, "name": shown, "lines": log_tail(self.run.path, shown, LOG_LINES) if shown else []}

    def newest_video(self) -> str | None:
        videos = self.videos()
        return videos[0].name if videos else None

    def videos(self) -> list[Path]:
        return list_videos(self.run.videos)

    def _add(self, record: dict[str, Any]) -> None:
        self.known.add(record)
        self.status.add(record)
        self._version += 1


def _setting_rows(settings: dict[str, Any], run: RunDirectory) -> list[dict[str, Any]]:
    """Settings with the origin of their values, as recorded at the start: those that the user has set come first."""
    sources: dict[str, str] = {}
    for attempt in run.attempts():
        found = attempt.get("sources")
        sources |= {key: str(source) for key, source in found.items()} if isinstance(found, dict) else {}
    rows = [{"key": key, "value": readable(format_value(value)), "source": sources.get(key, ""),
             "rank": origin_rank(sources.get(key, DEFAULT))} for key, value in flat_settings(settings)]
    return sorted(rows, key=lambda row: row["rank"])


class LivePageServer(ThreadingHTTPServer):
    """HTTP server for the page of one run. Without a token it answers only under loopback names."""

    daemon_threads = True

    def __init__(self, run: RunDirectory, host: str, port: int, token: str | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.follower, self.token = RunFollower(run), token
        super().__init__((host, port), LivePageHandler)

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """Addresses of this server, most reliable first; never a wildcard such as 0.0.0.0, which cannot be opened."""
        port = self.server_address[1]
        places = [f"[{name}]" if ":" in name else name for name in reachable(str(self.server_address[0]))]
        return [f"http://{place}:{port}/" + (f"?token={quote(self.token)}" if self.token else "") for place in places]

    @property
    def cookie(self) -> str:
        """Name of the cookie. It contains the port because browsers share cookies between the ports of a host."""
        return f"qfleet-{self.server_address[1]}"

    @property
    def cookie_value(self) -> str:
        """Value of the cookie: a hash, since a token may contain invalid characters and may have other uses."""
        return hashlib.sha256(str(self.token).encode()).hexdigest()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects during a response."""


def reachable(host: str) -> list[str]:
    """Names under which a server that listens at `host` is reachable; for a wildcard an address and the host name."""
    if host not in ("0.0.0.0", "::"):
        return [host]
    found, name = [], socket.gethostname()
    family, outside = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((outside, 9))  # selects a route and sends nothing
        found.append(str(probe.getsockname()[0]))
    return [*found, *([name] if name != "localhost" or not found else [])]


class LivePageHandler(BaseHTTPRequestHandler):
    """Serves `/` (the page), `/news?seen=N&log=NAME` (the status) and `/film/NAME` (a video, with range requests)."""

    server: LivePageServer
    server_version = "qfleet"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if self.server.token is None:
            if not LOOPBACK.fullmatch(self.headers.get("Host", "")):  # DNS rebinding by another site
                return self._respond(HTTPStatus.FORBIDDEN, b"this page is available at 127.0.0.1 and localhost only\n")
        elif parts.path == "/" and self._is_token(query.get("token", [""])[0]):
            return self._set_cookie()
        elif not self._authorised():
            return self._respond(HTTPStatus.UNAUTHORIZED, b"open the address that `qfleet watch` printed\n")
        follower = self.server.follower
        if parts.path == "/":
            text = render_page(f"{follower.run.name} · qfleet", SCRIPTS, {"settings": follower.settings},
                               connect="'self'")
            return self._respond(HTTPStatus.OK, text.encode(), "text/html; charset=utf-8")
        if parts.path == "/news":
            seen, log = query.get("seen", ["-1"])[0], query.get("log", [""])[0]
            text = to_json(follower.updates_since(int(seen) if re.fullmatch(r"-?\d{1,12}", seen) else -1, log))
            return self._respond(HTTPStatus.OK, text.encode(), "application/json")
        name = unquote(parts.path).removeprefix("/film/")
        for path in follower.videos():
            if path.name == name:
                return self._send_video(path)
        return self._respond(HTTPStatus.NOT_FOUND, b"not found\n")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), str(self.server.token).encode())

    def _authorised(self) -> bool:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            cookie = None
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        given = cookie.value if cookie is not None else ""
        return self._is_token(bearer) or hmac.compare_digest(given.encode(), self.server.cookie_value.encode())

    def _set_cookie(self) -> None:
        """Replace the token by a cookie, so that it does not appear in the address bar, history or screenshots."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header(
            "Set-Cookie", f"{self.server.cookie}={self.server.cookie_value}; HttpOnly; SameSite=Lax; Path=/"
        )
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_video(self, path: Path) -> None:
        try:
            data = read_video(path)
        except OSError:  # it has just been deleted
            return self._respond(HTTPStatus.NOT_FOUND, b"not found\n")
        requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if requested is None:
            return self._respond(HTTPStatus.OK, data, "video/mp4")
        start, end = int(requested[1]), min(int(requested[2] or len(data)), len(data) - 1)
        if start > end:
            return self._respond(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"")
        return self._respond(HTTPStatus.PARTIAL_CONTENT, data[start:end + 1], "video/mp4",
                             ("Content-Range", f"bytes {start}-{end}/{len(data)}"))

    def _respond(self, status: HTTPStatus, body: bytes, kind: str = "text/plain", *more: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
                            ("Accept-Ranges", "bytes"), ("X-Content-Type-Options", "nosniff"),
                            ("X-Frame-Options", "DENY"), ("Referrer-Policy", "no-referrer"), *more):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: every poll would be a line."""
