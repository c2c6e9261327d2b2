"""Chromium without a window, driven over its DevTools pipe: for pictures of pages, and for tests that look at them.

Standard library alone: a pipe takes and gives JSON that ends with a zero byte, where the other way, a websocket, needs
a package. https://chromedevtools.github.io/devtools-protocol
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Browser", "Tab", "find_chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 30.0
"""In which an answer must come, on a machine that has other things to do."""

OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # which root and containers cannot have; only our own pages are opened
    "--disable-gpu",
    "--use-angle=swiftshader",  # WebGL on the CPU
    "--enable-unsafe-swiftshader",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Return the program, None where it is absent."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """A Chromium of its own, with a profile that is thrown away; to be used in ``with``."""

    def __init__(self) -> None:
        program = find_chromium()
        if program is None:
            raise FileNotFoundError(f"no browser: one of {', '.join(NAMES)} is needed (Debian: apt install chromium)")
        self._profile = tempfile.TemporaryDirectory(prefix="chromium_", ignore_cleanup_errors=True)
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        # The browser reads descriptor 3 and writes 4. The pipes may lie there crosswise, so they are moved away first.
        move = (
            "import fcntl, os, sys; "
            f"r, w = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in ({read}, {write})); "
            "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-ISc",
                f"import os, sys; {move}",
                program,
                *OPTIONS,
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, fault, trace
        os.close(self._to)  # the browser ends when nobody talks to it
        os.close(self._from)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask for something of the protocol and return the answer; events that come before it are kept."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._read(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait(self, method: str, session: str) -> dict[str, Any]:
        """Return the first event of a kind, which may have come already; those before it are kept."""
        deadline = time.monotonic() + SECONDS
        place = 0
        while True:
            for event in self.events[place:]:
                place += 1
                if event.get("method") == method and event.get("sessionId") == session:
                    return event
            self.events.append(self._read(deadline))

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Tab":
        """Open a page in a window of so many pixels, and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        # What about:blank had to say is not the page's.
        self.events = [event for event in self.events if event.get("sessionId") != session]
        self.call("Page.navigate", session, url=url)
        self.wait("Page.loadEventFired", session)
        return Tab(self, session)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"the browser said nothing for {SECONDS:.0f} s")
            got = os.read(self._from, 2**20)
            if not got:
                raise RuntimeError(f"the browser ended with status {self._process.wait()}")
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class Tab:
    """A page that is open."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page; of a promise what it comes to."""
        answer = self._browser.call(
            "Runtime.evaluate", self._session, expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {SECONDS:.0f} s: {expression}")
            time.sleep(0.1)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button at a pixel of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self._browser.call("Input.dispatchMouseEvent", self._session, type=kind, x=x, y=y, **button)

    def list_requests(self) -> list[str]:
        """Return the address of everything that the page asked for, itself included; what lies in it is no request."""
        asked = [event["params"]["request"]["url"] for event in self._list("Network.requestWillBeSent")]
        return [url for url in asked if not url.startswith("data:")]

    def list_complaints(self) -> list[str]:
        """Return what the browser has to say of the page: errors, warnings, exceptions, refused resources."""
        said = [event["params"]["entry"]["text"] for event in self._list("Log.entryAdded")]
        said += [str(event["params"]["args"]) for event in self._list("Runtime.consoleAPICalled")]
        return said + [str(event["params"]["exceptionDetails"]) for event in self._list("Runtime.exceptionThrown")]

    def photograph(self, file: str | Path, *, height: int | None = None) -> Path:
        """Write a PNG of what is seen, or of so much of the page from its top."""
        view = self._browser.call("Page.getLayoutMetrics", self._session)["cssVisualViewport"]
        clip = {"x": 0, "y": 0, "width": view["clientWidth"], "height": height, "scale": 1}
        beyond = {} if height is None else {"clip": clip, "captureBeyondViewport": True}
        shot = self._browser.call("Page.captureScreenshot", self._session, format="png", **beyond)
        Path(file).write_bytes(base64.b64decode(shot["data"]))
        return Path(file)

    def _list(self, method: str) -> list[dict[str, Any]]:
        self.evaluate("1")  # what was said before this has come by then
        return [
            event
            for event in self._browser.events
            if event.get("method") == method and event.get("sessionId") == self._session
        ]
