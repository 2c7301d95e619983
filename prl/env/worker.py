"""What an environment worker does before its first rollout, so that the first one is as quick as the rest."""

from __future__ import annotations

import gc
import logging
import multiprocessing

from renderers import create_renderer
from verifiers.v1.clients.train import ElasticRendererPool, RendererSlot

from prl.config.schema import LogConfig
from prl.config.training import ModelConfig
from prl.env.engine_client import use_engine_client
from prl.env.patient_http import use_patient_http
from prl.env.plugins import register_harness, register_taskset
from prl.env.quiet_end import stay_quiet_at_the_end
from prl.env.renderers import parity_gap, policy_tokenizer, renderer_config
from prl.log_lines import configure
from prl.model_path import resolve_model_path

RENDERER_MULTIPLEX = 1024
"""Rollouts that share one renderer of a worker."""


def prepare(taskset_id: str, model: ModelConfig | None, log: LogConfig, role: str, workers: int) -> None:
    """Set up logging, plugins and the renderer of this process. Picklable: spawned workers call it too.

    The process that only hands requests on to `workers` of its own builds no renderer, and text-only
    episodes (no `model`) need none.
    """
    configure(log, role)
    stay_quiet_at_the_end()
    use_engine_client()
    use_patient_http()
    register_harness()
    register_taskset(taskset_id)
    if model and (workers == 1 or multiprocessing.parent_process() is not None):
        build_renderer(model)
    gc.collect()
    gc.freeze()


def build_renderer(model: ModelConfig) -> None:
    """Put the model's renderer where rollouts look for it. Warns if the model's own chat template differs."""
    path, config = resolve_model_path(model), renderer_config(model)
    pool = ElasticRendererPool(str(path), config, multiplex=RENDERER_MULTIPLEX)
    if pool.renderers:
        return
    tokenizer = policy_tokenizer(path)
    renderer = create_renderer(tokenizer, config)
    pool.renderers.append(RendererSlot(renderer))
    if tokenizer.chat_template and (gap := parity_gap(renderer, tokenizer)):
        logging.getLogger(__name__).warning("model.renderer=%s: %s", model.renderer, gap)
