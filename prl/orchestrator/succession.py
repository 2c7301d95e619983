"""Addresses of a role that may be started again: the first one, and each that replaces a dead one."""

from __future__ import annotations

import asyncio
import json
import time

from prl.run_dir import POLL_SECONDS, RunDir


class Succession:
    """Follows `role`. Each start writes another address file (it names the process): none is taken twice."""

    def __init__(self, run: RunDir, role: str, patience: float) -> None:
        self._run, self._role, self._patience = run, role, patience
        self._known = ""

    async def next(self) -> str:
        """The address of the first start not seen yet. Raises TimeoutError after `patience` seconds."""
        deadline = time.monotonic() + self._patience
        while (text := self._read()) in ("", self._known):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._role} published no new address within {self._patience:.0f} s")
            await asyncio.sleep(POLL_SECONDS)
        self._known = text
        return str(json.loads(text)["address"])

    def _read(self) -> str:
        try:
            return self._run.address_file(self._role).read_text()
        except FileNotFoundError:
            return ""
