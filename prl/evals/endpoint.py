"""Is the endpoint there, does it take the key, does it serve the model? Asked once, before any rollout."""

from __future__ import annotations

import difflib
import logging
import os
from typing import Any

import aiohttp

from prl.config.schema import EvalConfig

log = logging.getLogger(__name__)


async def check_endpoint(config: EvalConfig, base_url: str) -> None:
    """Return if the endpoint answers and lists the model, or does not list models at all.

    Raises ConnectionError (not there), ValueError (key refused, another model served): one line each.
    """
    client = config.client
    key_var = config.inference.api_key_var
    headers = {"Authorization": f"Bearer {os.environ.get(key_var) or 'EMPTY'}", **client.headers}
    timeout = aiohttp.ClientTimeout(total=client.timeout)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
            http.get(f"{base_url.rstrip('/')}/models") as response,
        ):
            status, text = response.status, await response.text()
            listing: Any = await response.json(content_type=None) if status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ConnectionError(f"client.base_url = {base_url}: no answer ({reason})") from error
    if status in (401, 403):
        held = "is set" if os.environ.get(key_var) else "is not set"
        raise ValueError(
            f"client.api_key_var = {key_var}: {base_url} refuses the key ({status}); ${key_var} {held}"
        )
    if status >= 500 or status == 429:
        raise ConnectionError(
            f"client.base_url = {base_url}: answers {status}: {' '.join(text.split())[:200]}"
        )
    if status != 200:
        log.warning(
            "%s lists no models (%d): whether it has %s will show", base_url, status, config.model.name
        )
        return
    _check_model(config.model.name, base_url, listing)


def _check_model(model: str, base_url: str, listing: Any) -> None:
    try:
        served = [str(card["id"]) for card in listing["data"]]
    except (KeyError, TypeError):
        log.warning("%s/models is no list of models", base_url)
        return
    if model in served:
        return
    near = difflib.get_close_matches(model, served, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    shown = ", ".join(served[:10]) + (f" and {len(served) - 10} more" if len(served) > 10 else "")
    raise ValueError(
        f"model.name = {model}: {base_url} does not serve it; {hint}it serves {shown or 'nothing'}"
    )
