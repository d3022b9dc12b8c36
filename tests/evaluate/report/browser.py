"""A real Chromium, driven over its DevTools pipe with the standard library alone: no download, no driver, no open port."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 60.0


def find_browser():
    """Path of the first browser found, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser with a profile folder of its own and one page in it. Messages are JSON, each ended by a zero byte.

    Console messages, exceptions and requests of the page are kept in `problems` and `requests`.
    """

    def __init__(self, path):
        self.profile = tempfile.TemporaryDirectory(prefix="tailguard-browser-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The shell puts the pipes where Chromium looks for them, on 3 and 4, whatever numbers they have here.
        flags = [
            "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={self.profile.name}",
        ]  # fmt: skip
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, path, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, None
        self.problems, self.requests, self._events = [], [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._write)
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self.profile.cleanup()

    def call(self, method, **parameters):
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, path, width=1440, height=900, *, dark=False, phone=False):
        """Load a file from disk at a width; ends when the page has drawn."""
        self.problems.clear()
        self.requests.clear()
        scale = 2 if phone else 1
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self._events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT
        while "Page.loadEventFired" not in self._events:
            assert time.monotonic() < deadline, "the page did not load"
            self._note(self._receive())
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def evaluate(self, expression):
        """The value of a JavaScript expression; promises are waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def hover(self, x, y):
        """Move the mouse to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key, code=0):
        """Press a key that is named as in `KeyboardEvent.key`."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path, *, whole=False):
        """A PNG of the window, or of the whole page."""
        area = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            area = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **area)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def pdf(self, path):
        """The page as it would be printed on A4."""
        data = self.call("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True)[
            "data"
        ]
        Path(path).write_bytes(base64.b64decode(data))

    def _receive(self):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], TIMEOUT)
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event):
        method, parameters = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(parameters["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(parameters["args"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
