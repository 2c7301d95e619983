"""Clients of an engine, embedded, vLLM or external: admin calls and scoring of given tokens."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

CONNECT_SECONDS = 10.0
MAX_ATTEMPTS = 10
FIRST_WAIT, LONGEST_WAIT = 1.0, 10.0
BUDGET_FACTOR = 2.0
"""All attempts at a call together may take this many times what one may."""
READY_SECONDS = 1800.0
READY_POLL_SECONDS = 0.2
CONNECTIONS = 256

logger = logging.getLogger(__name__)


class EngineClient:
    """JSON calls to one engine, each attempt bounded by `timeout` seconds, retried while that can help.

    Server errors (5xx), time-outs and connection errors are retried: at most 10 attempts within twice
    `timeout`, 1 to 10 s apart. Anything in 4xx is final.
    """

    def __init__(self, base_url: str, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The decoded JSON answer. Raises ValueError on 4xx with the engine's words, ConnectionError when
        the attempts are used up."""
        deadline = time.monotonic() + BUDGET_FACTOR * self.timeout
        wait = FIRST_WAIT
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return await self._attempt(method, path, body)
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                if attempt == MAX_ATTEMPTS or time.monotonic() + wait > deadline:
                    raise ConnectionError(
                        f"{method} {self.root}{path} failed {attempt} times; last: {reason}"
                    ) from error
            logger.warning("%s %s%s: %s; next attempt in %.0f s", method, self.root, path, reason, wait)
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError("the last attempt returns or raises")

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _attempt(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with self._open().request(method, f"{self.root}{path}", json=body) as response:
            if 400 <= response.status < 500:
                raise ValueError(f"{method} {self.root}{path}: {response.status}: {await _message(response)}")
            if response.status >= 500:
                raise aiohttp.ClientResponseError(
                    response.request_info, (), status=response.status, message=await _message(response)
                )
            return await response.json(content_type=None) if await response.read() else None

    def _open(self) -> aiohttp.ClientSession:
        """The session, opened by the first call because it belongs to a running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_SECONDS, sock_read=self.timeout
                ),
            )
        return self._session


class EngineAdmin:
    """The orchestrator's calls to one engine, apart from generation traffic."""

    def __init__(self, base_url: str, timeout: float) -> None:
        """`base_url` with or without /v1; `timeout` bounds one attempt, seconds."""
        self._client = EngineClient(base_url, timeout)

    def __str__(self) -> str:
        return f"engine {self._client.root}"

    async def wait_ready(self, model: str, seconds: float = READY_SECONDS) -> None:
        """Return once the engine is healthy and serves `model`.

        Raises TimeoutError after so many `seconds`, ValueError if it serves other models only.
        """
        deadline = time.monotonic() + seconds
        reason = "no answer"
        while time.monotonic() < deadline:
            try:
                await self._check_health()
                listed = await self._client._attempt("GET", "/v1/models", None)
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = f"{type(error).__name__}: {error}"
                await asyncio.sleep(READY_POLL_SECONDS)
                continue
            served = [card["id"] for card in listed["data"]]
            if model in served:
                return
            raise ValueError(f"{self._client.root} serves {', '.join(served) or 'nothing'}, not {model!r}")
        raise TimeoutError(f"{self._client.root} was not ready within {seconds:.0f} s; last: {reason}")

    async def pause(self) -> None:
        """Freeze what is in flight, keeping its keys and values."""
        await self._client.call("POST", "/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self._client.call("POST", "/resume")

    async def update_weights(self, weight_dir: str, version: int) -> dict[str, Any]:
        """Serve a published version: `{"version", "fingerprint", "seconds"}`. Files may be loaded again."""
        body = {"weight_dir": weight_dir, "version": version}
        return await self._client.call("POST", "/update_weights", body)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _check_health(self) -> None:
        try:
            await self._client._attempt("GET", "/health", None)
        except ValueError as error:
            if ": 404:" not in str(error):
                raise


class LogprobScorer:
    """Log-probabilities that a served model gives to tokens that it did not sample."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_var: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """`api_key_var` names the environment variable that holds the bearer token, if there is one."""
        self.model = model
        all_headers = dict(headers or {})
        if key := os.environ.get(api_key_var or ""):
            all_headers["Authorization"] = f"Bearer {key}"
        self._client = EngineClient(base_url, timeout, all_headers)

    async def score(self, token_ids: list[int], cache_salt: str | None = None) -> list[float]:
        """Natural log-probability of each token given those before it, at temperature 1; 0.0 for the first.

        Raises ValueError if the engine refuses or does not score every token, ConnectionError if it stays
        out of reach.
        """
        sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
        body: dict[str, Any] = {"model": self.model, "token_ids": token_ids, "sampling_params": sampling}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        answer = await self._client.call("POST", "/inference/v1/generate", body)
        entries = answer.get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(token_ids):
            got = "no prompt_logprobs" if entries is None else f"{len(entries)} prompt_logprobs"
            raise ValueError(
                f"{self._client.root} answered {got} for {len(token_ids)} tokens of {self.model}"
            )
        return [_own_logprob(token, entry) for token, entry in zip(token_ids, entries, strict=True)]

    async def aclose(self) -> None:
        await self._client.aclose()


def _own_logprob(token: int, entry: Mapping[str, Any] | None) -> float:
    """The prompt's own token by its id; the map's first entry is another token with some engines."""
    if entry is None:
        return 0.0
    if str(token) not in entry:
        raise ValueError(f"prompt_logprobs hold no entry for the prompt's token {token}")
    return float(entry[str(token)]["logprob"])


async def _message(response: aiohttp.ClientResponse) -> str:
    """The engine's own words, whatever form they take."""
    text = await response.text()
    try:
        error = await response.json(content_type=None)
        return str(error["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500] or "no message"
