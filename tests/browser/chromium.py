"""A headless Chromium, driven over its debugging pipe: no driver, no port, no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Names of the program, best first.
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars",
    "--force-device-scale-factor=1", "--remote-debugging-pipe",
)  # fmt: skip

_KEYS = {
    "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27, "Tab": 9,
}  # fmt: skip


def find_chromium() -> str | None:
    """The path of the browser; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a running browser.

    Attributes:
        complaints: what the page said on its console or raised.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found
            self._note(answer)

    def open(
        self, page: Path, width: int = 1400, height: int = 1000, *, dark: bool = False, scripts: bool = True
    ) -> None:
        """Show a file and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.complaints.clear()
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._note(self._read())

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript evaluates to, in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, as a person would: names as in KeyboardEvent.key."""
        for key in keys:
            code = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)}
            text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def click(self, selector: str) -> None:
        """Scroll to an element and click on its middle."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Move the pointer onto the middle of an element."""
        x, y = self._middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self) -> bytes:
        """The visible part of the page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def paper(self) -> bytes:
        """The page as it is printed, as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])

    def _middle(self, selector: str) -> tuple[float, float]:
        element = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{element}.scrollIntoView({{block: 'center', inline: 'center'}})")
        seen = self.value(
            f"(() => {{ const r = {element}.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; }})()"
        )
        x, y = seen[0] + seen[2] / 2, seen[1] + seen[3] / 2
        return x, y

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._receive, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method", ""), event.get("params", {})
        self._events.append(event | {"method": method})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Start a browser and end it.

    Args:
        program: its path.
        profile: an empty folder for its files.
    """
    its_input, send = os.pipe()
    receive, its_output = os.pipe()
    # The browser reads from descriptor 3 and writes to 4, whatever the pipes are here.
    command = f'exec "$0" "$@" 3<&{its_input} 4>&{its_output}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", command, program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(its_input, its_output),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    try:
        yield Browser(send, receive)
    finally:
        os.close(send)
        os.close(receive)
        try:
            process.wait(10)  # it ends with its pipe
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
