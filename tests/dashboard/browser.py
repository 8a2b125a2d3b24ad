"""A headless Chromium, driven over WebDriver (W3C) by plain HTTP; one window, a profile of its own, nothing of it outside loopback.

Debian's chromium and chromium-driver are enough: the protocol is a handful of POSTs, so no library is wanted for it.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from tests.plain_http import NO_CERTIFICATES

DRIVER: Final = "chromedriver"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
FLAGS: Final = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --force-color-profile=srgb"
).split()
ELEMENT: Final = "element-6066-11e4-a52e-4f735466cecf"  # the name that WebDriver gives to what names an element
WAIT_S: Final = 90.0  # on a machine that does other things, too
POLL_S: Final = 0.05


def missing() -> str | None:
    """Why there is no browser to test with; None: there is one."""
    if shutil.which(DRIVER) is None or not any(map(shutil.which, BROWSERS)):
        return "there is no chromium with its driver (Debian: apt-get install chromium chromium-driver)"
    return None


class Browser:
    """One window; made by `opened_browser`."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def _ask(self, method: str, command: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, f"/session/{self._session}{command}", json=body)
        value = answer.json()["value"]
        assert answer.status_code == httpx.codes.OK, f"{command}: {value}"
        return value

    def open(self, url: str) -> None:
        """Go there."""
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body of JavaScript returns, which gets `arguments`."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any) -> Any:
        """The first true thing that it returns; fails after WAIT_S."""
        ends_at = time.monotonic() + WAIT_S
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < ends_at, f"never true: {script}\n{self.text()[-3000:]}"
            time.sleep(POLL_S)
        return value

    def click(self, selector: str) -> None:
        """Press what the selector names, as a pointer does."""
        self._ask("POST", f"/element/{self._find(selector)}/click", {})

    def write(self, selector: str, text: str) -> None:
        """Press its keys, there; `\\ue007` is Enter."""
        self._ask("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def text(self) -> str:
        """What the page says."""
        said: str = self.run("return document.body.innerText")
        return said

    def label(self, selector: str) -> tuple[str, str]:
        """Role and name, as a screen reader hears them."""
        element = self._find(selector)
        return self._ask("GET", f"/element/{element}/computedrole"), self._ask(
            "GET", f"/element/{element}/computedlabel"
        )

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """The viewport, in CSS pixels; `scale`: device pixels in one."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """What the system asks pages for: light or dark."""
        self._devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def block(self, *patterns: str) -> None:
        """Load nothing that these name, `*` for anything; none: load everything."""
        self._devtools("Network.enable", {})
        self._devtools("Network.setBlockedURLs", {"urls": list(patterns)})

    def screenshot(self, *, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the whole page."""
        taken = self._devtools("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        return base64.b64decode(taken["data"])

    def log(self) -> list[str]:
        """What the console has been told, and has not been asked for yet: errors and warnings, of pages and of loading."""
        return [each["message"] for each in self._ask("POST", "/se/log", {"type": "browser"})]

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _find(self, selector: str) -> str:
        found: dict[str, str] = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        return found[ELEMENT]


@contextmanager
def opened_browser(prefs: Mapping[str, Any] | None = None) -> Iterator[Browser]:
    """A window that is closed at the end, and its browser with it; `prefs`: of its profile, as Chromium names them."""
    binary = next(path for name in BROWSERS if (path := shutil.which(name)) is not None)
    with tempfile.TemporaryDirectory(prefix="browser") as folder, _driver(folder) as url:
        options = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={folder}/profile"], "prefs": dict(prefs or {})}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        with httpx.Client(base_url=url, timeout=60, trust_env=False, verify=NO_CERTIFICATES) as http:
            answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in answer, answer
            browser = Browser(http, answer["sessionId"])
            browser.resize(1280, 900)
            try:
                yield browser
            finally:
                http.delete(f"/session/{answer['sessionId']}")


@contextmanager
def _driver(folder: str) -> Iterator[str]:
    """The driver's address; the driver and whatever it has started are ended."""
    command = [DRIVER, "--port=0", f"--log-path={folder}/driver.log"]
    environment = {"PATH": os.environ["PATH"], "HOME": folder, "TMPDIR": folder}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0) as driver:
        assert driver.stdout is not None
        try:
            port = next(found[1] for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line)))
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(driver.pid, signal.SIGKILL)


def save(png: bytes, path: Path) -> None:
    """Write a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png)
