"""The process of a served model: embedded engine, vLLM, or the router before several. Ends on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from prl.config.serving import EmbeddedConfig, VllmConfig
from prl.config.training import ModelConfig
from prl.inference import admin_routes, openai_routes, token_routes, vllm_server
from prl.inference.dense import DenseDecoder
from prl.inference.engine_thread import EngineThread
from prl.inference.http import SERVED, Served, errors_as_json
from prl.inference.roles import (
    engine_port,
    fingerprint_mode,
    is_policy,
    replicas,
    served_model,
    weight_dtype,
)
from prl.inference.router import Router
from prl.inference.sampler import Sampler
from prl.model_path import resolve_model_path
from prl.run_dir import RunDir, bind_address

MAX_BODY_BYTES = 256 << 20
SHUTDOWN_SECONDS = 0.3

logger = logging.getLogger(__name__)


def main(config: Any, run: RunDir, role: str) -> None:
    """Serve the policy (role `inference`, or `inference/<replica>` behind a router that is then `inference`)
    or a frozen teacher (`teacher/<environment or shared>`).

    Publishes the address once it listens, runs until SIGTERM or SIGINT and then returns. Raises ValueError
    for a model that cannot be served, and whatever kills the engine.
    """
    if role == "inference" and replicas(config) > 1:
        asyncio.run(_route(config, run))
        return
    model = served_model(config, role)
    directory = resolve_model_path(model)
    if isinstance(config.inference, VllmConfig):
        vllm_server.serve(config, run, role, model, directory)
        return
    started = time.monotonic()
    torch.set_num_threads(engine_settings(config).threads)
    sampler = build_sampler(config, model, directory)
    logger.info("%s: %s loaded from %s in %.1f s", role, model.name, directory, time.monotonic() - started)
    gc.freeze()  # what start-up built stays: walking it would delay tokens now and the exit later
    stopped = asyncio.run(_serve(config, run, role, model.name, directory, sampler))
    if not stopped:  # a step outlives the grace period; its thread cannot be ended in any other way
        logging.shutdown()
        os._exit(0)


def build_sampler(config: Any, model: ModelConfig, directory: Path) -> Sampler:
    """Load the model in the type that the trainer computes with, which published weights have too."""
    engine = engine_settings(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = DenseDecoder.from_directory(
        directory,
        max_length=engine.max_model_len,
        device=device,
        dtype=getattr(torch, weight_dtype(config, device.type == "cuda")),
        num_layers=model.num_layers,
        random_init=model.random_init,
    )
    return Sampler(
        decoder, max_slots=engine.max_slots, seed=config.seed if engine.seed is None else engine.seed
    )


def engine_settings(config: Any) -> EmbeddedConfig:
    """Settings of the embedded engine. A teacher beside an external policy engine takes the defaults."""
    if isinstance(config.inference, EmbeddedConfig):
        return config.inference
    return EmbeddedConfig(max_model_len=config.inference.max_model_len)


def make_app(served: Served) -> web.Application:
    """All routes of the engine."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_json])
    app[SERVED] = served
    app.router.add_post("/inference/v1/generate", token_routes.generate)
    app.router.add_post("/v1/chat/completions", openai_routes.chat_completions)
    app.router.add_post("/v1/completions", openai_routes.completions)
    app.router.add_get("/v1/models", admin_routes.models)
    app.router.add_get("/health", admin_routes.health)
    app.router.add_get("/liveness", admin_routes.liveness)
    app.router.add_post("/pause", admin_routes.pause)
    app.router.add_post("/resume", admin_routes.resume)
    app.router.add_post("/update_weights", admin_routes.update_weights)
    app.router.add_post("/load_lora_adapter", admin_routes.load_lora_adapter)
    app.router.add_post("/init_broadcaster", admin_routes.init_broadcaster)
    app.router.add_get("/world_size", admin_routes.world_size)
    app.router.add_get("/metrics", admin_routes.metrics)
    return app


async def _serve(config: Any, run: RunDir, role: str, name: str, directory: Path, sampler: Sampler) -> bool:
    """Serve until a signal; True if the sampler's thread has ended. Raises what killed the sampler."""
    engine = EngineThread(sampler, threads=engine_settings(config).threads)
    served = Served(
        engine=engine,
        model=name,
        directory=directory,
        fingerprint_mode=fingerprint_mode(config),
        frozen=not is_policy(role),
    )
    engine.start()
    runner = web.AppRunner(
        make_app(served), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS
    )
    await runner.setup()
    try:
        await _listen(config, run, role, runner, name)
        await _until_told(engine.failure)
    finally:
        stopped = await engine.stop()
        await runner.cleanup()
    return stopped


async def _route(config: Any, run: RunDir) -> None:
    """The router, once every engine behind it answers."""
    names = [f"inference/{replica}" for replica in range(replicas(config))]
    patience = config.inference.ready_timeout
    urls = await asyncio.gather(*(run.wait_for_address(name, patience) for name in names))
    runner = web.AppRunner(
        Router(urls).app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS
    )
    await runner.setup()
    try:
        await _listen(config, run, "inference", runner, f"{len(urls)} engines")
        await _until_told(None)
    finally:
        await runner.cleanup()


async def _listen(config: Any, run: RunDir, role: str, runner: web.AppRunner, what: str) -> None:
    """Bind and publish the address."""
    site = web.TCPSite(runner, bind_address(config.inference.host), engine_port(config, role))
    await site.start()
    host, bound = runner.addresses[0][:2]
    run.publish_address(role, f"http://{host}:{bound}")
    logger.info("%s: serving %s on http://%s:%d", role, what, host, bound)


async def _until_told(failure: asyncio.Future[Any] | None) -> None:
    """Return on SIGTERM or SIGINT; raise when `failure` does."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    waiter = loop.create_task(told.wait())
    await asyncio.wait({waiter, failure} if failure else {waiter}, return_when=asyncio.FIRST_COMPLETED)
    if failure and failure.done():
        waiter.cancel()
        failure.result()
