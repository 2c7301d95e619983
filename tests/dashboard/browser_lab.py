"""What the browser tests share: whether there is a browser, and where its pictures go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cdp import Page, find_chromium

SCREENSHOTS_VAR = "PRL_SCREENSHOTS"
PROGRAM = find_chromium()
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no chromium on this machine (Debian: apt-get install chromium)"
)


async def picture(page: Page, name: str, otherwise: Path) -> Path:
    """A screenshot in the directory that `PRL_SCREENSHOTS` names (what CI keeps), else in `otherwise`."""
    path = await page.screenshot(Path(os.environ.get(SCREENSHOTS_VAR) or otherwise) / f"{name}.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return path
