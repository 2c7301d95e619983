"""A browser to drive: headless Chromium over its DevTools protocol, with aiohttp as the only client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

WAIT_SECONDS = 90.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The browser's program; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Every call waits for the browser's answer; `console` collects its complaints."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listener = asyncio.create_task(self._listen())
        self.console: list[str] = []
        self.requests: list[str] = []

    async def start(self) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.send(f"{domain}.enable")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command. Raises RuntimeError if the browser refuses it."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._answers[number], WAIT_SECONDS)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def size(self, width: int, height: int) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError with what it threw."""
        told = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, expression: str, seconds: float = WAIT_SECONDS) -> Any:
        """The first true value of an expression. Raises TimeoutError with what the page shows instead."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # a page that is being replaced has no context
                if value := await self.evaluate(expression):
                    return value
            await asyncio.sleep(0.1)
        shown = await self.evaluate("document.body.innerText.slice(0, 2000)")
        raise TimeoutError(f"never true: {expression}\nconsole: {self.console}\npage: {shown}")

    async def choose(self, selector: str, value: str) -> None:
        """Set a field, once it is there, and tell the page, as a user would."""
        await self.until(f"!!document.querySelector({json.dumps(selector)})")
        await self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            f" e.value = {json.dumps(value)};"
            " for (const t of ['input', 'change']) e.dispatchEvent(new Event(t, {bubbles: true})); })()"
        )

    async def screenshot(self, path: Path) -> Path:
        told = await self.send("Page.captureScreenshot", format="png")
        return await asyncio.to_thread(_write, path, base64.b64decode(told["data"]))

    async def _listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if future := self._answers.pop(told.get("id", 0), None):
                future.set_result(told)
            elif told.get("method") == "Runtime.exceptionThrown":
                self.console.append(str(told["params"]["exceptionDetails"].get("exception")))
            elif told.get("method") == "Log.entryAdded":
                entry = told["params"]["entry"]
                if entry["level"] == "error":
                    self.console.append(f"{entry['text']} {entry.get('url', '')}")
            elif told.get("method") == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])


@contextlib.asynccontextmanager
async def browser(program: str) -> AsyncIterator[Page]:
    """A new browser with one empty tab; it ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-port=0",
            f"--user-data-dir={profile}", "about:blank",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": profile},
        )  # fmt: skip
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                tab = next(tab for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.start()
                    yield page
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


async def _port(path: Path, process: asyncio.subprocess.Process) -> int:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise RuntimeError(f"the browser ended with {process.returncode}")
        if text := await asyncio.to_thread(_read, path):
            return int(text.split()[0])
        await asyncio.sleep(0.1)
    raise TimeoutError("the browser opened no port")


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
