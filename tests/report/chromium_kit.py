"""A real browser for tests: headless Chromium, driven over a pipe by its DevTools protocol. Nothing but the stdlib."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--hide-scrollbars", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
         "--mute-audio", "--autoplay-policy=no-user-gesture-required", "--remote-debugging-pipe"]
DEADLINE_S = 30.0


class Browser:
    """One tab. What the page complains of (console errors, exceptions, refused loads) is kept in `complaints`."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "-", str(CHROMIUM), *FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._count, self._session, self._loaded = b"", 0, "", False
        pages = self.until(lambda: [each for each in self.call("Target.getTargets")["targetInfos"]
                                    if each["type"] == "page"])
        self._session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- What a user does ----

    def open(self, address: str | Path) -> None:
        """Go there and wait until all is loaded."""
        self.complaints.clear()
        self.requests.clear()
        self._loaded = False
        reply = self.call("Page.navigate", url=address.resolve().as_uri() if isinstance(address, Path) else address)
        assert not reply.get("errorText"), reply
        self.until(lambda: self._loaded)

    def screen(self, width: int, height: int, theme: str = "light") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def ask(self, expression: str) -> Any:
        """The value of some JavaScript, awaited."""
        reply = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def sees(self, expression: str, within: float = DEADLINE_S) -> Any:
        return self.until(lambda: self.ask(expression), within)

    def picture(self, path: Path, whole: bool = True) -> Path:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    # ---- The protocol ----

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = self._next(deadline)
            if found.get("id") == self._count:
                assert "error" not in found, found["error"]
                return found["result"]

    def until(self, ready: Callable[[], Any], within: float = DEADLINE_S) -> Any:
        deadline = time.monotonic() + within
        while not (found := ready()):
            assert time.monotonic() < deadline, f"the browser did not get there; it said: {self.complaints}"
            self.pause(0.05)
        return found

    def pause(self, seconds: float) -> None:
        """Let time pass, and hear what happens meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if b"\0" not in self._buffer and not select.select([self._in], [], [], left)[0]:
                return
            self._next(deadline + DEADLINE_S)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._in], [], [], left)[0], "Chromium does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has gone"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._hear(message.get("method", ""), message.get("params", {}))
        return message

    def _hear(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(each.get("value")) for each in params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
