"""Connection to one environment server: requests with a time-out, and word of its death."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import zmq
import zmq.asyncio
from verifiers.v1.serve import EnvClient
from zmq.utils.monitor import recv_monitor_message  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

READY_SECONDS = 60.0
PING_SECONDS = 3.0


class EnvServerDied(ConnectionError):
    """The environment server is gone; its rollouts are lost."""


class EnvServerClient:
    """verifiers' `EnvClient`, which waits for ever on a dead server, with a watch on the connection."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._client = EnvClient(address)
        self._death = asyncio.create_task(self._await_death())

    async def wait_ready(self) -> None:
        """Return once the server answers. Raises EnvServerDied if it does not."""
        try:
            await self._client.wait_for_server_startup(timeout=READY_SECONDS, interval=0.5)
        except TimeoutError as error:
            raise EnvServerDied(f"env/{self.name} at {self.address} does not answer") from error

    async def run(self, request: dict[str, Any], patience: float) -> Any:
        """The `WireEpisode` of one run. Cancels the run in the server if it is not awaited to its end.

        Raises TimeoutError after `patience` seconds, EnvServerDied, and RuntimeError with the server's words
        if it refused the request.
        """
        running = asyncio.create_task(self._client.run(**request))
        try:
            await asyncio.wait({running, self._death}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            if not self._death.done():
                raise TimeoutError(f"no end after {patience:g} s")
            self._death.result()
            raise EnvServerDied(f"env/{self.name} at {self.address} died")
        finally:
            if not running.done():
                running.cancel()

    async def close(self) -> None:
        self._death.cancel()
        await asyncio.wait({self._death})
        await self._client.close()

    async def _await_death(self) -> None:
        """Return when the connection was lost and the server does not answer any more."""
        monitor = self._client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            while True:
                await recv_monitor_message(monitor)
                logger.warning("env/%s: connection to %s lost", self.name, self.address)
                if not await self._client.health(timeout=PING_SECONDS):
                    return
        finally:
            self._client.socket.disable_monitor()
            monitor.close()
