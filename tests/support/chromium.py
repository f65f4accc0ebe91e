"""A headless Chromium, driven through a pipe by the DevTools protocol; needs no other package."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--remote-debugging-pipe", "about:blank"),
)
ANSWER_S = 60.0


class Page:
    """One tab: what it asked for, what it complained of, and how it looks."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest = write, read, b""
        self._number, self._session = 0, ""
        self._answers: dict[int, Any] = {}
        self.requests: list[str] = []
        """Every address that the tab asked for."""
        self.complaints: list[str] = []
        """Errors and warnings on the console, and exceptions."""
        target = self._first_tab()
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _first_tab(self) -> str:
        targets = self.call("Target.getTargets")["targetInfos"]
        return next(t["targetId"] for t in targets if t["type"] == "page")

    def call(self, method: str, **given: Any) -> Any:
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        number = self._number
        session = {"sessionId": self._session} if self._session else {}
        asked = {"id": number, "method": method, "params": given, **session}
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        self.until(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        return answer["result"]

    def until(self, ready: Callable[[], bool]) -> None:
        """Read what the browser tells until something is so."""
        end = time.monotonic() + ANSWER_S
        while not ready():
            assert time.monotonic() < end, f"Chromium did not come to it; {self.complaints}"
            self._listen(0.1)

    def _listen(self, wait_s: float) -> None:
        if not select.select([self._read], [], [], wait_s)[0]:
            return
        *whole, self._rest = (self._rest + os.read(self._read, 1 << 20)).split(b"\0")
        for message in whole:
            self._hear(json.loads(message))

    def _hear(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        told = message.get("params", {})
        match message["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
            case _:
                pass

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the tab."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str, ready: str) -> None:
        """Load a page, and wait until a JavaScript expression is true there."""
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, f"{url}: {found['errorText']}"
        self.until(lambda: bool(self.evaluate(f"document.readyState !== 'loading' && ({ready})")))

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """The size of the screen, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, file: Path) -> None:
        """A picture of what the screen shows, as `.png` or `.webp`."""
        kind = file.suffix.removeprefix(".")
        quality = {"quality": 82} if kind == "webp" else {}
        found = self.call("Page.captureScreenshot", format=kind, **quality)
        file.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def chromium(profile: Path, program: str = "chromium") -> Iterator[Page]:
    """A browser with an empty profile; it ends with the block."""
    ours_read, theirs_write = os.pipe()
    theirs_read, ours_write = os.pipe()

    def place() -> None:
        # Chromium reads from file 3 and writes to file 4.
        read, write = os.dup(theirs_read), os.dup(theirs_write)
        os.dup2(read, 3)
        os.dup2(write, 4)

    process = subprocess.Popen(
        [program, f"--user-data-dir={profile}", *FLAGS],
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=place,
    )
    os.close(theirs_read)
    os.close(theirs_write)
    try:
        yield Page(ours_write, ours_read)
    finally:
        process.terminate()
        process.wait(30)
        os.close(ours_write)
        os.close(ours_read)
