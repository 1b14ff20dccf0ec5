"""A page that follows a run: what it is told, again and again, and the small server that tells it.

The run does not notice: only its files are read. Whoever is on this machine may look; anybody else needs the token.
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
from qfleet.report.series import DownsampledRecords, columns
from qfleet.report.status import RunGoal, RunStatus
from qfleet.report.webpage import list_videos, read_video, render_page, to_json
from qfleet.runs.directory import RunDirectory
from qfleet.runs.members import MEMBERS_FILE, MemberMonitor
from qfleet.runs.run_state import STATE_TEXT, RunState, describe_state, may_be_running, run_state
from qfleet.runs.safe_open import no_follow_opener
from qfleet.runs.tail import MetricsTail

SCRIPTS = ("charts.js", "panels.js", "watch.js")
FRESH_S = 60.0
"""A run logs more often than that; clocks of hosts and shared disks may differ by a part of it."""

HEALTH: dict[RunState, str] = {"running": "healthy", "ended": "ended", "interrupted": "ended", "failed": "lost",
                               "died": "lost"}

LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.I)


class RunFollower:
    """What is known of a run, and what has been added since somebody asked last."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        settings = read_yaml(run.config, no_follow_opener) if run.config.is_file() else {}
        env = settings.get("env")
        self.env = str(env.get("id", "")) if isinstance(env, dict) else ""
        replay = settings.get("replay")
        judged = settings.get("eval")
        self.video_period = judged.get("video_period") if isinstance(judged, dict) else None
        self.alpha = replay.get("alpha") if isinstance(replay, dict) else None
        self.tally = RunStatus(RunGoal.from_settings(settings, run.has_gpu()))
        self.known = DownsampledRecords()  # so that what a page costs each second does not grow with the run
        self._tail, self._roll = MetricsTail(run.metrics, from_start=True), MemberMonitor(run.path)
        self._version = 0
        self._lock = threading.Lock()

    def updates_since(self, seen: int) -> dict[str, Any]:
        """Where the run stands now; its curves only if they are newer than version `seen`."""
        with self._lock:
            state = run_state(self.run)
            for record in self._tail.new_records():
                self._add(record)
            running = may_be_running(state)
            members = self._roll.poll(time.time()) if running else []
            health, words = self._health(state)
            return {"name": self.run.name, "env": self.env, "state": state, "words": words, "health": health,
                    **self._standing(running), "loop": self.tally.loop_shares(), "roles": self.tally.roles(),
                    "members": members, "events": list(self._roll.events), "film": self.newest_video(),
                    "video_period": self.video_period,
                    "version": self._version, "ratio": self.tally.goal.ratio, "alpha": self.alpha,
                    "series": columns(self.known.records) if seen != self._version else None}

    def _standing(self, running: bool) -> dict[str, Any]:
        """How far the run is; rates, the time left and what limits it only while it goes on."""
        tally = self.tally
        verdict = tally.bottleneck() if running else None
        steps_s, updates_s = tally.rates() if running else (None, None)
        return {"headline": tally.headline(running, " · ") if self.known else "there is no record yet",
                "fraction": tally.goal.fraction(tally.latest), "steps_s": steps_s, "updates_s": updates_s,
                "updates": tally.count("updates"), "limit": None if verdict is None else asdict(verdict),
                "figures": [row for row in tally.metrics() if running or not row[0].endswith("/s")]}

    def _health(self, state: RunState) -> tuple[str, str]:
        """How well the learner is, and the words for it: of another host only its files, on a shared disk, tell."""
        if state != "elsewhere":
            return HEALTH[state], describe_state(self.run, state)
        times = [path.stat().st_mtime for path in (self.run.metrics, self.run.path / MEMBERS_FILE) if path.exists()]
        silent = time.time() - max(times, default=0.0)
        if silent > FRESH_S:
            return "unknown", STATE_TEXT[state]
        return "healthy", f"runs on another host: its files changed {max(0.0, silent):.0f} s ago"

    def newest_video(self) -> str | None:
        films = self.videos()
        return films[0].name if films else None

    def videos(self) -> list[Path]:
        return list_videos(self.run.videos)

    def _add(self, record: dict[str, Any]) -> None:
        self.known.add(record)
        self.tally.add(record)
        self._version += 1


class LivePageServer(ThreadingHTTPServer):
    """Serves the page of one run. Without a token only under a name of this very machine."""

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
        """Addresses that lead here, the surest first: one that stands for all of this machine's leads nowhere."""
        port = self.server_address[1]
        places = [f"[{name}]" if ":" in name else name for name in reachable(str(self.server_address[0]))]
        return [f"http://{place}:{port}/" + (f"?token={quote(self.token)}" if self.token else "") for place in places]

    @property
    def cookie(self) -> str:
        """Its name: browsers keep the cookies of all ports of a host together."""
        return f"qfleet-{self.server_address[1]}"

    @property
    def cookie_value(self) -> str:
        """What the cookie holds: a hash, since a token may have characters that a cookie cannot, and other uses."""
        return hashlib.sha256(str(self.token).encode()).hexdigest()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle of an answer is nothing to be told of."""


def reachable(host: str) -> list[str]:
    """By what others reach a server that listens at `host`: that, or for all addresses one of them and the name."""
    if host not in ("0.0.0.0", "::"):
        return [host]
    found, name = [], socket.gethostname()
    family, outside = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((outside, 9))  # asks for the way there, and sends nothing
        found.append(str(probe.getsockname()[0]))
    return [*found, *([name] if name != "localhost" or not found else [])]


class LivePageHandler(BaseHTTPRequestHandler):
    """`/` the page, `/news?seen=N` where the run stands, `/film/NAME` a film, in parts if asked so."""

    server: LivePageServer
    server_version = "qfleet"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if self.server.token is None:
            if not LOOPBACK.fullmatch(self.headers.get("Host", "")):  # another site's name that leads here
                return self._say(HTTPStatus.FORBIDDEN, b"this page is for 127.0.0.1 and localhost only\n")
        elif parts.path == "/" and self._knows(query.get("token", [""])[0]):
            return self._let_in()
        elif not self._known():
            return self._say(HTTPStatus.UNAUTHORIZED, b"open the address that `qfleet watch` printed\n")
        follower = self.server.follower
        if parts.path == "/":
            text = render_page(f"{follower.run.name} · qfleet", SCRIPTS, {}, connect="'self'")
            return self._say(HTTPStatus.OK, text.encode(), "text/html; charset=utf-8")
        if parts.path == "/news":
            seen = query.get("seen", ["-1"])[0]
            text = to_json(follower.updates_since(int(seen) if re.fullmatch(r"-?\d{1,12}", seen) else -1))
            return self._say(HTTPStatus.OK, text.encode(), "application/json")
        name = unquote(parts.path).removeprefix("/film/")
        for path in follower.videos():
            if path.name == name:
                return self._film(path)
        return self._say(HTTPStatus.NOT_FOUND, b"there is nothing of that name\n")

    def _knows(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), str(self.server.token).encode())

    def _known(self) -> bool:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            cookie = None
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        given = cookie.value if cookie is not None else ""
        return self._knows(bearer) or hmac.compare_digest(given.encode(), self.server.cookie_value.encode())

    def _let_in(self) -> None:
        """A cookie takes the token's place, so that it stands in no address bar, history or screenshot."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header(
            "Set-Cookie", f"{self.server.cookie}={self.server.cookie_value}; HttpOnly; SameSite=Lax; Path=/"
        )
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _film(self, path: Path) -> None:
        try:
            data = read_video(path)
        except OSError:  # it has just been deleted
            return self._say(HTTPStatus.NOT_FOUND, b"there is nothing of that name\n")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._say(HTTPStatus.OK, data, "video/mp4")
        start, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if start > end:
            return self._say(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"")
        return self._say(HTTPStatus.PARTIAL_CONTENT, data[start:end + 1], "video/mp4",
                         ("Content-Range", f"bytes {start}-{end}/{len(data)}"))

    def _say(self, status: HTTPStatus, body: bytes, kind: str = "text/plain", *more: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
                            ("Accept-Ranges", "bytes"), ("X-Content-Type-Options", "nosniff"),
                            ("X-Frame-Options", "DENY"), ("Referrer-Policy", "no-referrer"), *more):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Every poll would be a line."""
