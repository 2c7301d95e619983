"""Routes of the orchestrator and of whoever watches: weights, pause, health, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

from aiohttp import web

from prl.inference.http import SERVED, Served, error_response, read_json
from prl.inference.join_call import join_arguments
from prl.sync.fingerprint import MODES

LIVENESS_SECONDS = 30.0

logger = logging.getLogger(__name__)


async def models(request: web.Request) -> web.Response:
    served = request.app[SERVED]
    card = {
        "id": served.model,
        "object": "model",
        "owned_by": "prl",
        "root": str(served.directory),
        "max_model_len": served.max_model_len,
    }
    return web.json_response({"object": "list", "data": [card]})


async def health(request: web.Request) -> web.Response:
    """200 while the sampler can work; which policy version it serves, and whether it is paused."""
    engine = request.app[SERVED].engine
    if engine.failure.done():
        return error_response(503, "ServiceUnavailableError", "the sampler has died")
    return web.json_response({"status": "ok", "version": engine.sampler.version, "paused": engine.paused})


async def liveness(request: web.Request) -> web.Response:
    """200 after a round trip through the sampler's thread."""
    try:
        await asyncio.wait_for(request.app[SERVED].engine.call(lambda: None), LIVENESS_SECONDS)
    except TimeoutError:
        return error_response(503, "ServiceUnavailableError", f"no answer within {LIVENESS_SECONDS:.0f} s")
    return web.json_response({"status": "ok"})


async def pause(request: web.Request) -> web.Response:
    """Freeze requests where they are; they keep their keys and values. No other `mode` is served."""
    if (mode := request.query.get("mode", "keep")) != "keep":
        raise ValueError(f"pause mode {mode!r}: the embedded engine only keeps requests (mode=keep)")
    await request.app[SERVED].engine.pause()
    return web.json_response({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    await request.app[SERVED].engine.resume()
    return web.json_response({"status": "resumed"})


async def update_weights(request: web.Request) -> web.Response:
    """Load `{"weight_dir", "version"}` in place, between two tokens of whatever is in flight.

    Answers the fingerprint of what is served now. 400 if the weights do not fit, 503 if they are not there
    (yet); the served weights are then unchanged.
    """
    served = request.app[SERVED]
    body = await read_json(request)
    directory, version = body.get("weight_dir"), body.get("version")
    if served.frozen:
        raise ValueError(f"this engine serves the frozen model {served.model}: it takes no weights")
    if not isinstance(directory, str) or isinstance(version, bool) or not isinstance(version, int):
        raise ValueError('update_weights needs {"weight_dir": <directory>, "version": <integer>}')
    started = time.monotonic()
    sampler, mode = served.engine.sampler, body.get("fingerprint", served.fingerprint_mode)
    if mode not in MODES:
        raise ValueError(f"fingerprint={mode!r}: must be one of {', '.join(MODES)}")
    served_print = await served.engine.call(lambda: sampler.update_weights(Path(directory), version, mode))
    seconds = time.monotonic() - started
    logger.info("policy version %d served after %.3f s (%s)", version, seconds, served_print)
    return web.json_response({"version": version, "fingerprint": served_print, "seconds": seconds})


async def load_lora_adapter(request: web.Request) -> web.Response:
    """Merge the adapter at `lora_path` in place of the one before. Its name must be the served model's."""
    served = request.app[SERVED]
    body = await read_json(request)
    if served.frozen:
        raise ValueError(f"this engine serves the frozen model {served.model}: it takes no adapter")
    if body.get("lora_name") not in (None, served.model) or not isinstance(body.get("lora_path"), str):
        raise ValueError(
            f'load_lora_adapter needs {{"lora_path": <directory>, "lora_name": {served.model!r}}}'
        )
    sampler, directory = served.engine.sampler, Path(body["lora_path"])
    mode = served.fingerprint_mode
    printed = await served.engine.call(lambda: sampler.update_weights(directory, sampler.version, mode))
    return web.json_response({"fingerprint": printed})


async def init_broadcaster(request: web.Request) -> web.Response:
    """Join the trainer's group: `{"host", "port", "session_id", "rank_offset", "inference_world_size",
    "timeout"}`. Sampling goes on meanwhile."""
    served = request.app[SERVED]
    if served.frozen:
        raise ValueError(f"this engine serves the frozen model {served.model}: it joins no group")
    call = join_arguments(await read_json(request))
    await asyncio.to_thread(lambda: served.engine.sampler.receiver.join(*call))
    return web.json_response({"status": "joined", "rank": call[3]})


async def world_size(request: web.Request) -> web.Response:
    """How many workers of this engine join a group: the embedded one is a single process."""
    return web.json_response({"world_size": 1})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text under vLLM's names, so that one reader serves both engines."""
    return web.Response(
        text=_exposition(request.app[SERVED]), headers={"Content-Type": "text/plain; version=0.0.4"}
    )


def _exposition(served: Served) -> str:
    sampler = served.engine.sampler
    running = sampler.slots.active
    values = [
        ("gauge", "vllm:num_requests_running", running),
        ("gauge", "vllm:num_requests_waiting", len(sampler.waiting)),
        ("gauge", "vllm:kv_cache_usage_perc", running / sampler.slots.size),
        ("counter", "vllm:num_preemptions_total", 0),
        ("counter", "vllm:prompt_tokens_total", sampler.prompt_tokens),
        ("counter", "vllm:generation_tokens_total", sampler.generated_tokens),
    ]
    label = json.dumps(served.model, ensure_ascii=False)
    lines = []
    for kind, name, value in values:
        lines += [f"# TYPE {name} {kind}", f"{name}{{model_name={label}}} {value}"]
    return "\n".join(lines) + "\n"
