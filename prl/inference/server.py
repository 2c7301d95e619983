"""The embedded engine as a process: loads the model, serves the routes, ends on SIGTERM."""

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

from prl.config.schema import EvalConfig, RlConfig
from prl.config.serving import EmbeddedConfig
from prl.config.training import ModelConfig
from prl.inference import admin_routes, openai_routes, token_routes
from prl.inference.dense import DenseDecoder
from prl.inference.engine_thread import EngineThread
from prl.inference.http import SERVED, Served, errors_as_json
from prl.inference.sampler import Sampler
from prl.model_path import named_model, resolve_model_path
from prl.run_dir import RunDir

MAX_BODY_BYTES = 256 << 20
SHUTDOWN_SECONDS = 0.3

logger = logging.getLogger(__name__)


def main(config: RlConfig | EvalConfig, run: RunDir, role: str) -> None:
    """Serve the policy (role `inference`) or a frozen teacher (`teacher/<environment or shared>`).

    Publishes the address once it listens, runs until SIGTERM or SIGINT and then returns. Raises ValueError
    for a model that cannot be served, and whatever kills the sampler.
    """
    started = time.monotonic()
    torch.set_num_threads(engine_settings(config).threads)
    model = served_model(config, role)
    directory = resolve_model_path(model)
    sampler = build_sampler(config, model, directory)
    logger.info("%s: %s loaded from %s in %.1f s", role, model.name, directory, time.monotonic() - started)
    gc.freeze()  # what start-up built stays: walking it would delay tokens now and the exit later
    stopped = asyncio.run(_serve(config, run, role, model.name, directory, sampler))
    if not stopped:  # a step outlives the grace period; its thread cannot be ended in any other way
        logging.shutdown()
        os._exit(0)


def served_model(config: RlConfig | EvalConfig, role: str) -> ModelConfig:
    """The model of a role. A teacher's is named in its algorithm: a bundled name or a directory."""
    if role == "inference":
        return config.model
    assert isinstance(config, RlConfig), "an evaluation has no teacher"
    owner = role.removeprefix("teacher/")
    algo = config.algo if owner == "shared" else config.env[owner].algo
    name = algo.teacher.model
    if name is None:
        raise ValueError(f"{role}: algo.teacher.model is null; name the model that prl shall serve")
    return named_model(name)


def build_sampler(config: RlConfig | EvalConfig, model: ModelConfig, directory: Path) -> Sampler:
    """Load the model in the type that the trainer computes with, which published weights have too."""
    engine = engine_settings(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = DenseDecoder.from_directory(
        directory,
        max_length=engine.max_model_len,
        device=device,
        dtype=_dtype(config.trainer.dtype if isinstance(config, RlConfig) else "auto", device),
        num_layers=model.num_layers,
        random_init=model.random_init,
    )
    return Sampler(
        decoder, max_slots=engine.max_slots, seed=config.seed if engine.seed is None else engine.seed
    )


def engine_settings(config: RlConfig | EvalConfig) -> EmbeddedConfig:
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
    app.router.add_get("/metrics", admin_routes.metrics)
    return app


async def _serve(
    config: RlConfig | EvalConfig, run: RunDir, role: str, name: str, directory: Path, sampler: Sampler
) -> bool:
    """Serve until a signal; True if the sampler's thread has ended. Raises what killed the sampler."""
    engine = EngineThread(sampler, threads=engine_settings(config).threads)
    served = Served(
        engine=engine,
        model=name,
        directory=directory,
        fingerprint_mode=config.sync.fingerprint if isinstance(config, RlConfig) else "sampled",
        frozen=role != "inference",
    )
    engine.start()
    runner = web.AppRunner(
        make_app(served), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS
    )
    await runner.setup()
    try:
        # A teacher picks its own port: `inference.port` names the policy's.
        port = config.inference.port if role == "inference" else 0
        site = web.TCPSite(runner, config.inference.host, port)
        await site.start()
        host, bound = runner.addresses[0][:2]
        run.publish_address(role, f"http://{host}:{bound}")
        logger.info("%s: serving %s on http://%s:%d", role, name, host, bound)
        await _until_told(engine)
    finally:
        stopped = await engine.stop()
        await runner.cleanup()
    return stopped


async def _until_told(engine: EngineThread) -> None:
    """Return on SIGTERM or SIGINT; raise when the sampler dies."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    waiter = loop.create_task(told.wait())
    either: set[asyncio.Future[Any]] = {waiter, engine.failure}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if engine.failure.done():
        waiter.cancel()
        engine.failure.result()


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
