"""Clients of an engine, embedded, vLLM or external: admin calls and scoring of given tokens."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from prl.sync.offer import Offer, read_offer
from prl.sync.versions import published_mode

CONNECT_SECONDS = 10.0
MAX_ATTEMPTS = 10
FIRST_WAIT, LONGEST_WAIT = 1.0, 10.0
BUDGET_FACTOR = 2.0
"""All attempts at a call together may take this many times what one may."""
READY_SECONDS = 1800.0
READY_POLL_SECONDS = 0.2
ROUTES = ("/inference/v1/generate", "/pause", "/resume", "/update_weights")
"""POST routes without which a policy cannot be trained."""
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

    async def call_once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """As `call`, without a second attempt, for what is not safe to repeat."""
        try:
            return await self._attempt(method, path, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ConnectionError(
                f"{method} {self.root}{path} failed, and is not repeated: {reason}"
            ) from error

    async def has_route(self, path: str) -> bool:
        """Whether a POST route is there: asked for by GET, a known one answers 405 and never acts."""
        async with self._open().get(f"{self.root}{path}") as response:
            return response.status != 404

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

    def __init__(
        self,
        base_url: str,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        api_key_var: str | None = None,
        routes: Sequence[str] = (),
    ) -> None:
        """`base_url` with or without /v1; `timeout` bounds one attempt, in seconds; an engine without all of
        `routes` is refused."""
        self._client = EngineClient(base_url, timeout, _with_key(headers, api_key_var))
        self._routes = routes
        self._joined: str | None = None

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
                await self.check_routes()
                return
            raise ValueError(f"{self._client.root} serves {', '.join(served) or 'nothing'}, not {model!r}")
        raise TimeoutError(f"{self._client.root} was not ready within {seconds:.0f} s; last: {reason}")

    async def pause(self) -> None:
        """Freeze what is in flight, keeping its keys and values."""
        await self._client.call("POST", "/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self._client.call("POST", "/resume")

    async def check_routes(self) -> None:
        """Raises ValueError naming the routes that are needed and that this engine does not have."""
        missing = [path for path in self._routes if not await self._client.has_route(path)]
        if missing:
            raise ValueError(
                f"{self._client.root} has no {', '.join(missing)}: start the engine by `prl inference`, "
                "which serves every route that training needs"
            )

    async def update_weights(self, weight_dir: str, version: int) -> dict[str, Any]:
        """Serve a published version: `{"version", "fingerprint", "seconds"}`.

        Files may be loaded again, so that call is retried. A broadcast is received once: the engine joins the
        trainer's group first if it has not, and any failure is final.
        """
        body: dict[str, Any] = {"weight_dir": weight_dir, "version": version}
        if mode := await asyncio.to_thread(published_mode, Path(weight_dir)):
            body["fingerprint"] = mode
        offer = await asyncio.to_thread(read_offer, Path(weight_dir))
        if offer is None:
            return await self._client.call("POST", "/update_weights", body)
        if offer.session != self._joined:
            await self._join(offer)
        return await self._client.call_once("POST", "/update_weights", body)

    async def _join(self, offer: Offer) -> None:
        """All workers behind this address join the trainer's group; the trainer itself is rank 0."""
        workers = (await self._client.call("GET", "/world_size"))["world_size"]
        body = {
            "host": offer.host,
            "port": offer.port,
            "session_id": offer.session,
            "rank_offset": 1,
            "inference_world_size": workers,
            "timeout": offer.timeout,
        }
        await self._client.call_once("POST", "/init_broadcaster", body)
        self._joined = offer.session

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
        self._client = EngineClient(base_url, timeout, _with_key(headers, api_key_var))

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


def _with_key(headers: Mapping[str, str] | None, api_key_var: str | None) -> dict[str, str]:
    """`headers`, with the key that the variable holds, if it holds one."""
    key = os.environ.get(api_key_var or "")
    return {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}


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
