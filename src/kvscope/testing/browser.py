"""A real headless Chromium, driven over its own debugging pipe: what a page shows, asks for and complains about."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 30.0


def chromium() -> str | None:
    """The program, if this machine has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page in a browser of its own. ``events`` has what the browser reported, in order."""

    def __init__(self, program: str, profile: Path, *, width: int = 1280, height: int = 1400) -> None:
        self._ids = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "--hide-scrollbars"]
        # The browser reads commands at descriptor 3 and answers at 4; the shell puts the pipes there.
        shell = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, program, *options, "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._session: str | None = None
        targets = self.command("Target.getTargets")["targetInfos"]
        target = next(entry["targetId"] for entry in targets if entry["type"] == "page")
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):
            self._session = None
            self.command("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._to)
        os.close(self._from)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            heard = self._hear(deadline)
            if heard.get("id") == number:
                assert "error" not in heard, heard["error"]
                result: dict[str, Any] = heard["result"]
                return result
            if "method" in heard:
                self.events.append(heard)

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """What a script comes to in the page."""
        result = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.value(script):
            assert time.monotonic() < deadline, f"not true after {PATIENCE_S:g} s: {script}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> bytes:
        data = base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data

    def requested(self) -> list[str]:
        """The addresses that the page asked for."""
        sent = [event["params"]["request"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [request["url"] for request in sent]

    def complaints(self) -> list[str]:
        """Errors that the page raised or the browser logged."""
        said = [event["params"] for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        said += [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        return [json.dumps(entry) for entry in said]

    def _hear(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._from, 1 << 20) if readable else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        heard: dict[str, Any] = json.loads(message)
        return heard
