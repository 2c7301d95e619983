"""The two HTTP calls that a training rollout makes to an engine, without an SDK in between.

verifiers' `TrainClient` sends through `AsyncOpenAI` on httpx, which costs more CPU than all other parts of a
single-turn rollout. `use_engine_client` puts this class in its place: it has the three members that
`renderers.client.generate` uses and raises the same errors.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import httpx
import openai
from verifiers.v1.clients import train
from verifiers.v1.configs.client import BaseClientConfig, resolve_api_key, resolve_headers


def use_engine_client() -> None:
    """Make the training rollouts of this process use `EngineClient`."""
    train.build_async_openai = EngineClient


class EngineClient:
    """`post`, `get` and `base_url` of an `AsyncOpenAI`, on aiohttp. No retries: the harness owns those."""

    def __init__(self, config: BaseClientConfig) -> None:
        self.base_url = config.base_url.rstrip("/")
        self._headers = {
            "Authorization": f"Bearer {resolve_api_key(config)}",
            "Content-Type": "application/json",
            **resolve_headers(config),
        }
        limits = config.timeout
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.connect, sock_read=limits.read)
        self._http: aiohttp.ClientSession | None = None

    async def post(self, url: str, *, cast_to: Any, body: Any, options: Any = None) -> httpx.Response:
        """The engine's answer. Raises openai.APIStatusError, APITimeoutError and APIConnectionError."""
        headers = (options or {}).get("headers")
        return await self._request("POST", url, data=json.dumps(body).encode(), headers=headers)

    async def get(self, path: str, *, cast_to: Any) -> Any:
        """JSON at `path` below the base URL. Same errors as `post`."""
        return json.loads((await self._request("GET", self.base_url + path)).content)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _request(self, method: str, url: str, **options: Any) -> httpx.Response:
        request = httpx.Request(method, url)
        try:
            async with self._session().request(method, url, **options) as reply:
                response = httpx.Response(reply.status, content=await reply.read(), request=request)
        except TimeoutError as error:
            raise openai.APITimeoutError(request) from error
        except aiohttp.ClientError as error:
            raise openai.APIConnectionError(message=repr(error), request=request) from error
        if response.is_error:
            message = f"Error code: {response.status_code} - {response.text}"
            raise openai.APIStatusError(message, response=response, body=None)
        return response

    def _session(self) -> aiohttp.ClientSession:
        """Built on first use: sessions belong to the running event loop."""
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(
                headers=self._headers, timeout=self._timeout, connector=connector
            )
        return self._http
