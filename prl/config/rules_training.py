"""Rules of every training job: model, schedule, ZeRO, checkpoints, tracking, and the run's place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.checkpoint.experts import STACKED
from prl.config import identity
from prl.config.errors import Problem, suggest
from prl.config.schema import RlConfig, SftConfig
from prl.config.serving import MlflowConfig
from prl.config.training import EXPERTS, CosineConfig, LinearConfig, LoraConfig, SchedulerConfig

Training = RlConfig | SftConfig

RENDERERS = (
    *("auto", "role-token", "role-token-tools", "chatml", "default"),
    *("deepseek-r1", "deepseek-v3", "deepseek-v4", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
    *("gpt-oss", "hy3", "inkling", "kimi-k2", "kimi-k2.5", "laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1"),
    *("laguna-xs.2", "llama-3", "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    *("prime-qwen3", "qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"),
)
"""prl's own renderers and the families of `renderers` 0.1.12, which is too heavy to be asked here."""


def model_is_there(config: Training) -> Iterator[Problem]:
    from prl.model_path import newer_checkpoint, resolve_model_path

    if isinstance(config, RlConfig | SftConfig) and newer_checkpoint(config.model):
        return
    try:
        resolve_model_path(config.model)
    except ValueError as error:
        path, value = (
            ("model.path", config.model.path)
            if config.model.path is not None
            else ("model.name", config.model.name)
        )
        reason = str(error).rstrip(".").removeprefix(f"model.path={config.model.path}: ")
        yield Problem(path, value, reason)


def renderer_is_named(config: Training) -> Iterator[Problem]:
    if ":" in config.model.renderer:
        yield from check_import_path("model.renderer", config.model.renderer)
    elif config.model.renderer not in RENDERERS:
        remedy = suggest(config.model.renderer, RENDERERS)
        yield Problem("model.renderer", config.model.renderer, "no such renderer", remedy)


def schedule_fits_the_run(config: Training) -> Iterator[Problem]:
    scheduler = config.scheduler
    yield from _steps_suffice(scheduler, config.max_steps, f"max_steps = {config.max_steps}")
    if isinstance(scheduler, LinearConfig | CosineConfig) and scheduler.min_lr > config.optim.lr:
        reason = f"above the peak, optim.lr = {config.optim.lr:g}"
        yield Problem("scheduler.min_lr", scheduler.min_lr, reason, "", ("optim.lr",))


def schedule_fits_the_rest(config: Training, resumed: int) -> Iterator[Problem]:
    """Whether a schedule that starts anew on resume, from step `resumed`, fits into what is left of the run.

    A run that is at its end has nothing left to schedule.
    """
    steps = config.max_steps
    if config.ckpt.skip_scheduler and steps is not None and 0 < resumed < steps:
        left = steps - resumed
        where = f"{left} of max_steps = {steps} left at step {resumed}, where ckpt.skip_scheduler starts anew"
        yield from _steps_suffice(config.scheduler, left, where)


def _steps_suffice(scheduler: SchedulerConfig, steps: int | None, where: str) -> Iterator[Problem]:
    if isinstance(scheduler, LinearConfig):
        yield from _linear_fits(scheduler, steps, where)
    if isinstance(scheduler, CosineConfig):
        warmup = scheduler.warmup_steps
        if steps is None:
            yield _needs_end("a cosine ends at max_steps", "max_steps")
        elif warmup >= steps:
            reason = f"the warm-up takes all of {where}"
            yield Problem(
                "scheduler.warmup_steps", warmup, reason, f"Set at most {steps - 1}.", ("max_steps",)
            )


def _linear_fits(scheduler: LinearConfig, steps: int | None, where: str) -> Iterator[Problem]:
    warmup, decay = scheduler.warmup_steps, scheduler.decay_steps
    if warmup == decay == 0:
        yield Problem("scheduler", "linear", "neither warms up nor decays", "Choose scheduler=constant.")
    elif decay and steps is None:
        yield _needs_end("a decay ends at max_steps", "scheduler.decay_steps")
    elif steps is not None and warmup + decay > steps:
        reason = f"warm-up and decay take {warmup} + {decay} steps, the run has {where}"
        involves = ("scheduler.decay_steps", "max_steps")
        yield Problem("scheduler.warmup_steps", warmup, reason, f"Their sum may be {steps}.", involves)


def _needs_end(reason: str, involved: str) -> Problem:
    return Problem("max_steps", None, reason, "Set max_steps, or choose scheduler=constant.", (involved,))


def zero_stage_allows(config: Training) -> Iterator[Problem]:
    zero, ranks = config.zero, config.cluster.train_ranks
    if zero.offload_optimizer and zero.stage == 0:
        reason = "stage 0 keeps the optimizer state where the weights are"
        yield Problem("zero.offload_optimizer", True, reason, "Choose zero=1, 2 or 3.", ("zero.stage",))
    if zero.offload_parameters and zero.stage != 3:
        reason = f"zero.stage = {zero.stage} does not shard parameters"
        yield Problem("zero.offload_parameters", True, reason, "Choose zero=3.", ("zero.stage",))
    if zero.offload_optimizer and config.optim.name == "muon":
        reason = "optim=muon orthogonalises on the device"
        yield Problem("zero.offload_optimizer", True, reason, "Choose optim=adamw.", ("optim.name",))
    if zero.hpz_partition_size == 1:
        return
    if zero.stage != 3:
        reason = f"zero.stage = {zero.stage} does not shard parameters"
        yield Problem(
            "zero.hpz_partition_size", zero.hpz_partition_size, reason, "Choose zero=3.", ("zero.stage",)
        )
    elif ranks % zero.hpz_partition_size:
        reason = f"cluster.train_ranks = {ranks} is not a multiple of it"
        yield Problem(
            "zero.hpz_partition_size", zero.hpz_partition_size, reason, "", ("cluster.train_ranks",)
        )


def rows_can_be_shared(config: Training) -> Iterator[Problem]:
    """Sequence parallelism: ranks in whole groups, the packed kernel, and heads for every rank of a group."""
    path, size = "trainer.sequence_parallel", config.trainer.sequence_parallel
    ranks = config.cluster.train_ranks
    if size == 1:
        return
    if ranks % size:
        reason = f"cluster.train_ranks = {ranks} is not a multiple of it"
        yield Problem(path, size, reason, "", ("cluster.train_ranks",))
    if config.trainer.attn in ("sdpa", "flex"):
        reason = f"trainer.attn = {config.trainer.attn} would take each part of a row for a row"
        yield Problem(path, size, reason, "Choose trainer.attn=auto or flash.", ("trainer.attn",))
    for reason in _not_shareable(config, size):
        yield Problem(path, size, reason, "Choose a divisor of both numbers of heads.", ("model.path",))


def _not_shareable(config: Training, size: int) -> Iterator[str]:
    told = _model_config(config)
    if told is None:
        return
    heads = told.get("num_attention_heads", size)
    for key, count in (
        ("num_attention_heads", heads),
        ("num_key_value_heads", told.get("num_key_value_heads") or heads),
    ):
        if count % size:
            yield f"the model's {key} = {count} is not a multiple of it"
    if kinds := set(told.get("layer_types") or []) - {"full_attention"}:
        yield f"the model has layers of {', '.join(sorted(kinds))}, which need whole rows"


def _model_config(config: Training) -> dict[str, Any] | None:
    """The model's config.json; None if it is not there (yet), which the rule about the model tells."""
    from prl.model_path import read_model_config, resolve_model_path

    try:
        directory = resolve_model_path(config.model)
        return read_model_config(directory)
    except (ValueError, OSError):
        return None


def activations_fit(config: Training) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.offload_activations and trainer.recompute == "none":
        reason = "nothing is computed again, so there is nothing to start from"
        remedy = "Set trainer.recompute=full or selective."
        yield Problem("trainer.offload_activations", True, reason, remedy, ("trainer.recompute",))
    elif trainer.offload_activations and trainer.compile and trainer.recompute == "selective":
        reason = "compiled layers would fall apart where a part of them is computed again"
        remedy = "Set trainer.recompute=full or trainer.compile=false."
        involves = ("trainer.recompute", "trainer.compile")
        yield Problem("trainer.offload_activations", True, reason, remedy, involves)


def adapters_have_targets(config: Training) -> Iterator[Problem]:
    if config.lora.rank and not config.lora.targets:
        yield Problem("lora.targets", [], "no layer would get an adapter", "Name some, or choose lora=none.")
    yield from _saved_modules(config.lora)
    yield from _expert_adapters(config)
    saves = config.ckpt.at_end or config.ckpt.interval is not None
    if config.lora.rank and config.model.random_init and saves:
        reason = "checkpoints hold the adapters alone, and random weights beneath them would be lost"
        remedy = "Choose ckpt=none or lora=none."
        yield Problem("model.random_init", True, reason, remedy, ("lora.rank",))


def _saved_modules(lora: LoraConfig) -> Iterator[Problem]:
    path, modules = "lora.modules_to_save", lora.modules_to_save
    if modules and not lora.rank:
        reason = "without adapters every module is trained and saved"
        yield Problem(path, modules, reason, "Choose lora=r16, or leave it empty.", ("lora.rank",))
    if modules and lora.rank and lora.publish == "adapter":
        reason = "engines that serve adapters take no other weights with them"
        yield Problem(path, modules, reason, "Set lora.publish=merged.", ("lora.publish",))
    if both := sorted(set(modules).intersection(lora.targets)):
        reason = f"{both[0]} is in lora.targets too, and cannot be both"
        yield Problem(path, modules, reason, "Name it in one of them.", ("lora.targets",))


def _expert_adapters(config: Training) -> Iterator[Problem]:
    lora = config.lora
    if not (
        isinstance(config, RlConfig) and lora.rank and lora.publish == "adapter" and EXPERTS in lora.targets
    ):
        return
    if (_model_config(config) or {}).get("model_type") in STACKED:
        reason = "the experts of this model get adapters, which engines take merged only"
        remedy = f"Set lora.publish=merged, or leave {EXPERTS} out of lora.targets."
        yield Problem("lora.publish", lora.publish, reason, remedy, ("lora.targets", "model.path"))


def betas_are_two(config: Training) -> Iterator[Problem]:
    betas = getattr(config.optim, "betas", None)
    if betas is not None and len(betas) != 2:
        yield Problem("optim.betas", betas, "two numbers are needed", "Write optim.betas=[0.9,0.99].")


def checkpoints_happen(config: Training) -> Iterator[Problem]:
    ckpt = config.ckpt
    saves = ckpt.at_end or ckpt.interval is not None
    for key in ("keep_last", "keep_interval"):
        if getattr(ckpt, key) is not None and not saves:
            reason = "nothing is saved, so nothing is kept"
            yield Problem(f"ckpt.{key}", getattr(ckpt, key), reason, "Choose ckpt=interval or ckpt=end.")
    if ckpt.interval and not ckpt.at_end and config.max_steps and ckpt.interval > config.max_steps:
        reason = f"the run ends at max_steps = {config.max_steps}, before the first checkpoint"
        yield Problem(
            "ckpt.interval", ckpt.interval, reason, "Set ckpt.at_end=true.", ("max_steps",), warning=True
        )
    if ckpt.interval and ckpt.keep_interval and ckpt.keep_interval % ckpt.interval:
        reason = f"not a multiple of ckpt.interval = {ckpt.interval}: few or no checkpoints match"
        yield Problem("ckpt.keep_interval", ckpt.keep_interval, reason, "", ("ckpt.interval",), warning=True)


def tracking_store_is_safe(config: Training) -> Iterator[Problem]:
    """MLflow reads a bare path as a file store, which it no longer supports."""
    uri = config.tracking.uri if isinstance(config.tracking, MlflowConfig) else None
    if uri is not None and ("://" not in uri or uri.startswith("file:")):
        remedy = "Write sqlite:////absolute/path/mlflow.db, or http(s)://host:port."
        yield Problem("tracking.uri", uri, "MLflow keeps runs in a database or on a server", remedy)


def run_has_a_place(config: Training) -> Iterator[Problem]:
    name = config.run.name
    if (misplaced := output_fault(config.output_dir)) is not None:
        yield misplaced
        return
    fault = identity.name_fault(name) if name is not None else None
    if fault:
        yield Problem("run.name", name, fault)
    elif name is not None and not config.run.resume and not config.run.clean:
        path = identity.run_path(config)
        if path.is_file() or (path.is_dir() and any(entry.name != ".lock" for entry in path.iterdir())):
            remedy = "Continue it by run.resume=latest, replace it by run.clean=true, or choose another name."
            yield Problem("run.name", name, f"{path} exists", remedy, ("run.resume", "run.clean"))


def output_fault(directory: str) -> Problem | None:
    """What keeps runs from being made there; the directory itself need not exist yet."""
    if not directory.strip():
        return Problem("output_dir", "''", "a directory is needed", "The current one is `.`.")
    place = Path(directory).expanduser().absolute()
    there = next(path for path in (place, *place.parents) if path.exists())
    if not there.is_dir():
        return Problem("output_dir", directory, f"{there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        return Problem("output_dir", directory, f"you may not write to {there}")
    return None


def resume_is_clear(config: Training) -> Iterator[Problem]:
    resume = config.run.resume
    if resume is None:
        return
    if resume == "latest" or resume.isdigit():
        if resume.isdigit() and int(resume) < 1:
            yield Problem("run.resume", resume, "steps count from 1")
        elif config.run.name is None:
            reason = "which run? Without run.name a new one would start from scratch"
            yield Problem("run.resume", resume, reason, "Add run.name=<the run to continue>.", ("run.name",))
    elif not re.fullmatch(r"step_[1-9]\d*", Path(resume).name):
        remedy = "Write latest, a step, or <run>/checkpoints/step_<N>."
        yield Problem("run.resume", resume, "not a checkpoint", remedy)
    elif not Path(resume).expanduser().is_dir():
        yield Problem("run.resume", resume, "no such directory")


def check_import_path(path: str, value: str | None) -> Iterator[Problem]:
    if value is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        yield Problem(path, value, "not an import path", "Write package.module:Name.")
