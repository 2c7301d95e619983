"""prl's routes on vLLM's server, as an ASGI middleware (`--middleware`): weights, pause, liveness.

It stands before vLLM's application and knows it by two public objects: the engine client, and the table of
adapters by the model name that requests use. Everything else passes through. Requests that sample get a
cache salt of the current weights, so no block of the prefix cache that other weights computed is ever found.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prl.inference.join_call import join_arguments
from prl.inference.vllm_generate import expressible, generate
from prl.sync.fingerprint import MODES
from prl.sync.offer import read_offer
from prl.sync.weight_files import ADAPTER_CONFIG, WeightFiles

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LIVENESS_SECONDS = 30.0
GENERATE_PATH = "/inference/v1/generate"
TEXT_PATHS = ("/v1/chat/completions", "/v1/completions")
ADAPTER_ID = 1

logger = logging.getLogger(__name__)


@dataclass
class Settings:
    """What the middleware must know of the run; `listening` is called once requests are answered."""

    model: str = ""
    fingerprint_mode: str = "sampled"
    frozen: bool = False
    listening: Callable[[], None] = lambda: None
    updates: int = 0
    """Updates begun: part of every cache salt."""
    told_unproven: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


SETTINGS = Settings()
"""Of this process: vLLM builds the middleware itself and hands it nothing but the application."""


class AdminMiddleware:
    """Answers prl's routes; passes everything else on."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, _announcing(send))
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif handler := ROUTES.get(scope["path"]):
            if not await self._serve(handler, scope, receive, send):
                await self._app(scope, receive, send)
        elif scope["path"] == GENERATE_PATH and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        elif scope["path"] in TEXT_PATHS and scope["method"] == "POST":
            await self._pass_salted(await _read(receive), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from the engine; what it refuses, or what is not for here, is vLLM's own handler's."""
        body = await _read(receive)
        asked = expressible(body, SETTINGS.model) if body is not None and _authorized(scope) else None
        state = scope["app"].state
        if asked is None or state.engine_client.errored:
            await self._pass_salted(body, scope, receive, send)
            return
        adapter = state.openai_serving_models.lora_requests.get(SETTINGS.model)
        try:
            answer = await generate(state, asked, _salt(), adapter, receive)
        except ValueError:  # vLLM's handler names the reason in its own words
            await self._pass_salted(body, scope, receive, send)
            return
        except Exception as error:
            logger.exception("%s failed", GENERATE_PATH)
            answer, status = json.dumps(_error(500, f"{type(error).__name__}: {error}")).encode(), 500
        else:
            status = 200
        if answer is not None:
            await _send(send, status, answer)

    async def _pass_salted(self, body: bytes | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request that samples to vLLM with the salt of the current weights."""
        await self._app(scope, _replaying(body, receive), send)

    async def _serve(self, handler: _Handler, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer by `handler`; errors as JSON: 400 for the caller's, 503 for what may pass, 500 else."""
        if scope["method"] != handler.method:
            await _reply(send, 405, _error(405, f"{scope['path']} takes {handler.method}"))
            return True
        try:
            body = json.loads(await _read(receive) or b"{}") if handler.method == "POST" else {}
            if not isinstance(body, dict):
                raise ValueError("the body must be a JSON object")
            answer = await handler.function(scope["app"].state, body)
            await _reply(send, 200, answer)
        except ValueError as error:
            await _reply(send, 400, _error(400, str(error)))
        except (FileNotFoundError, TimeoutError) as error:
            await _reply(send, 503, _error(503, str(error) or "no answer in time"))
        except Exception as error:
            logger.exception("%s failed", scope["path"])
            await _reply(send, 500, _error(500, f"{type(error).__name__}: {error}"))
        return True


async def pause(state: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Freeze requests where they are; they keep their keys and values."""
    await _freeze(state.engine_client)
    return {"status": "paused"}


async def _freeze(client: Any) -> None:
    """vLLM's pause, without the 20 ms that it waits afterwards for output of requests that it aborts: none is
    aborted here."""
    core = getattr(client, "engine_core", None)
    if pause_scheduler := getattr(core, "pause_scheduler_async", None):
        await pause_scheduler(mode="keep", clear_cache=False)
    else:
        await client.pause_generation(mode="keep", clear_cache=False)


async def resume(state: Any, body: dict[str, Any]) -> dict[str, Any]:
    await state.engine_client.resume_generation()
    return {"status": "resumed"}


async def liveness(state: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A round trip through every worker."""
    async with asyncio.timeout(LIVENESS_SECONDS):
        ranks = await state.engine_client.collective_rpc("prl_ping")
    return {"status": "ok", "workers": len(ranks)}


async def world_size(state: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Workers that join a group of this engine."""
    return {"world_size": state.engine_client.vllm_config.parallel_config.world_size_across_dp}


async def init_broadcaster(state: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Every worker joins the trainer's group, from `rank_offset` on."""
    _refuse_frozen()
    ranks = await state.engine_client.collective_rpc("prl_join", args=join_arguments(body))
    return {"status": "joined", "ranks": ranks}


async def update_weights(state: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Serve the version `{"weight_dir", "version"}`, whole weights or an adapter, by files or broadcast.

    400 for weights that do not fit, 503 for files that are not there (yet); 500 when loading broke off, after
    which the engine's weights are not to be trusted.
    """
    _refuse_frozen()
    directory, version = body.get("weight_dir"), body.get("version")
    if not isinstance(directory, str) or isinstance(version, bool) or not isinstance(version, int):
        raise ValueError('update_weights needs {"weight_dir": <directory>, "version": <integer>}')
    mode = body.get("fingerprint", SETTINGS.fingerprint_mode)
    if mode not in MODES:
        raise ValueError(f"fingerprint={mode!r}: must be one of {', '.join(MODES)}")
    started = time.monotonic()
    loaded = await _apply(state, Path(directory), str(version), mode)
    seconds = time.monotonic() - started
    logger.info("policy version %d served after %.3f s (%s)", version, seconds, loaded["fingerprint"])
    return {"version": version, **loaded, "seconds": seconds}


async def load_lora_adapter(state: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Serve the adapter at `lora_path` under the model's own name, in place of the one before."""
    _refuse_frozen()
    name, path = body.get("lora_name", SETTINGS.model), body.get("lora_path")
    if name != SETTINGS.model or not isinstance(path, str):
        raise ValueError(
            f'load_lora_adapter needs {{"lora_path": <directory>, "lora_name": {SETTINGS.model!r}}}'
        )
    return await _apply(state, Path(path), None, SETTINGS.fingerprint_mode)


async def _apply(state: Any, directory: Path, version: str | None, mode: str) -> dict[str, Any]:
    """Pause unless that is done, load, drop the prefix cache; the `fingerprint` that all workers found, and
    how many tensors are `unproven`."""
    client = state.engine_client
    async with SETTINGS.lock:
        was_paused = await client.is_paused()
        if not was_paused:
            await _freeze(client)
        try:
            SETTINGS.updates += 1
            loaded = await _load(state, directory, mode)
            await client.reset_prefix_cache()
            if version is not None and hasattr(client, "update_weight_version"):
                await client.update_weight_version(version)
        finally:
            if not was_paused:
                await client.resume_generation()
    return loaded


async def _load(state: Any, directory: Path, mode: str) -> dict[str, Any]:
    client = state.engine_client
    offer = await asyncio.to_thread(read_offer, directory)
    if offer and offer.adapter is not None:
        with tempfile.TemporaryDirectory(prefix="prl-adapter-") as into:
            args = (str(directory), into)
            await client.collective_rpc("prl_receive_adapter", args=args)
            return await _serve_adapter(state, Path(into), mode)
    if (directory / ADAPTER_CONFIG).is_file():
        return await _serve_adapter(state, directory, mode)
    if offer is None:
        await asyncio.to_thread(_check_fit, state, directory)
    proofs = await client.collective_rpc("prl_load", args=(str(directory), mode))
    state.openai_serving_models.lora_requests.pop(SETTINGS.model, None)  # it lay over other weights
    return _agreed(proofs)


def _agreed(proofs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the workers found, together. Each holds a part of the model, so one that differs is enough: its
    fingerprint is then in the answer, which is nobody's."""
    prints = sorted({proof["fingerprint"] for proof in proofs})
    if different := sorted({name for proof in proofs for name in proof["different"]}):
        logger.error("served are other values than were received: %s", _few(different))
    unproven = sorted(set.intersection(*(set(proof["unproven"]) for proof in proofs)))
    if unproven and not SETTINGS.told_unproven:
        SETTINGS.told_unproven = True
        logger.warning(
            "%d tensors lie where they cannot be read back, so only their receipt is proven: %s",
            *(len(unproven), _few(unproven)),
        )
    return {"fingerprint": " and ".join(prints), "unproven": len(unproven)}


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_fit(state: Any, directory: Path) -> None:
    """Compares headers with those of the version before, or of the model's files for the first one.

    Raises ValueError if tensors have other shapes, are unknown or missing; FileNotFoundError without files.
    """
    specs = {name: spec.shape for name, spec in WeightFiles(directory).specs().items()}
    known = getattr(state, "prl_shapes", None)
    missing = set() if known is None else set(known) - set(specs)
    if known is None:
        known = _model_shapes(Path(state.engine_client.model_config.model))
    faults = {name for name in specs if known is not None and known.get(name) != specs[name]} | missing
    if faults:
        raise ValueError(f"{directory}: these weights do not fit: {_few(sorted(faults))}")
    state.prl_shapes = specs


def _model_shapes(directory: Path) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape in the model's own files; None for a model of random weights, which has none: vLLM's
    loader and the proof then judge what does not fit."""
    try:
        return {name: spec.shape for name, spec in WeightFiles(directory).specs().items()}
    except FileNotFoundError:
        return None


async def _serve_adapter(state: Any, directory: Path, mode: str) -> dict[str, Any]:
    """Requests for the policy's name get the adapter from now on; the base answers to no name any more."""
    from vllm.lora.request import LoRARequest

    request = LoRARequest(SETTINGS.model, ADAPTER_ID, str(directory), load_inplace=True)
    await state.engine_client.add_lora(request)
    served = LoRARequest(SETTINGS.model, ADAPTER_ID, str(directory))
    state.openai_serving_models.lora_requests[SETTINGS.model] = served
    args = (str(directory), ADAPTER_ID, mode)
    return _agreed(await state.engine_client.collective_rpc("prl_prove_adapter", args=args))


def _refuse_frozen() -> None:
    if SETTINGS.frozen:
        raise ValueError(f"this engine serves the frozen model {SETTINGS.model}: it takes no weights")


@dataclass(frozen=True)
class _Handler:
    method: str
    function: Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]


ROUTES = {
    "/pause": _Handler("POST", pause),
    "/resume": _Handler("POST", resume),
    "/liveness": _Handler("GET", liveness),
    "/world_size": _Handler("GET", world_size),
    "/init_broadcaster": _Handler("POST", init_broadcaster),
    "/update_weights": _Handler("POST", update_weights),
    "/load_lora_adapter": _Handler("POST", load_lora_adapter),
}


def salt_body(body: bytes, salt: str) -> bytes:
    """The JSON object `body` with its `cache_salt` replaced. A key given twice counts as given last, so the
    body need not be parsed. Anything else than an object is left as it is, for vLLM to refuse."""
    text = body.rstrip()
    if not text.endswith(b"}") or text[:-1].strip() == b"{":
        return body
    return text[:-1] + b',"cache_salt":' + json.dumps(salt).encode() + b"}"


def _salt() -> str:
    return f"prl-{SETTINGS.updates}"


def _replaying(body: bytes | None, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, with the current salt, and then what follows it."""
    done = False

    async def wrapped() -> MutableMapping[str, Any]:
        nonlocal done
        if done:
            return await receive()
        done = True
        if body is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": salt_body(body, _salt()), "more_body": False}

    return wrapped


def _authorized(scope: Scope) -> bool:
    """Whether the request has the key that the server was started with, if any: vLLM checks it further in."""
    for middleware in getattr(scope["app"], "user_middleware", ()):
        if middleware.cls.__name__ == "AuthenticationMiddleware":
            from starlette.datastructures import Headers

            check = middleware.cls(None, *middleware.args, **middleware.kwargs)
            return bool(check.verify_token(Headers(scope=scope)))
    return True


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None if the client left before it was whole."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _announcing(send: Send) -> Send:
    async def wrapped(message: MutableMapping[str, Any]) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            SETTINGS.listening()

    return wrapped


def _error(status: int, message: str) -> dict[str, Any]:
    kinds = {400: "BadRequestError", 405: "MethodNotAllowed", 503: "ServiceUnavailableError"}
    kind = kinds.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _reply(send: Send, status: int, content: dict[str, Any]) -> None:
    await _send(send, status, json.dumps(content).encode())


async def _send(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
