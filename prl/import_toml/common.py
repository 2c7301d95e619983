"""What every file of the format has: run, log, checkpoints, trackers, and the tables of the trainer."""

from __future__ import annotations

from typing import Any

from prl.config.errors import Problem
from prl.import_toml.translation import Translation, kind_of
from prl.import_toml.tree import ABSENT, Tree

FIXED = "prl decides this itself"
TYPES = "prl computes in trainer.dtype and keeps float32 masters and gradients"
MOE = "experts train as transformers runs them, without options"
TOKENIZER = "prl takes the tokenizer of the model's directory"

MODEL_WITHOUT = {
    "trust_remote_code": "prl runs no code of a model's repository",
    "vlm": "prl trains text models",
    "conversion_dir": "prl reads Hugging Face weights as they are",
    "impl": "prl has one implementation of each family",
    "dp_replicate": "zero.hpz_partition_size is ZeRO's way to the same end",
    "ep": MOE,
    "ep_comm_backend": MOE,
    "deepep_num_sms": MOE,
    "deepep_token_chunk_size": MOE,
    "moe": MOE,
    "moe_router_dtype": MOE,
    "moe_use_grouped_mm": MOE,
    "moe_fused_kernel": MOE,
    "freeze_moe_router": MOE,
    "cp_style": "prl splits rows by heads (Ulysses)",
    "pp": "prl has no pipeline of stages",
    "pp_schedule": "prl has no pipeline of stages",
    "optimization_dtype": TYPES,
    "reduce_dtype": TYPES,
    "quantization": "prl trains in bfloat16 or float32",
    "index_cache": "prl has no sparse attention",
    "fusions": FIXED,
    "debug.force_balanced_routing": MOE,
}

RUN = {
    "run.name": "run.name",
    "output_dir": "output_dir",
    "clean": "run.clean",
    "dry_run": "dry_run",
    "max_steps": "max_steps",
    "heartbeat.url": "monitor.heartbeat_url",
    "heartbeat.min_interval": "monitor.heartbeat_seconds",
    "metrics_server.host": "monitor.host",
}
RUN_WITHOUT = {
    "run.dir": "the directory has the run's name",
    "log.vf_level": "log.level is for all",
    "log.json_logging": "metrics are JSON lines already",
    "log.log_data": "traces/ holds every episode",
    "log.interval": FIXED,
    "log.ranks_filter": "each rank has a log of its own",
    "monitors.file": "metrics/ and traces/ are always written",
    "monitors.prime": "there is no such platform",
    "monitors.wandb.entity": "MLflow has none",
    "monitors.wandb.offline": "MLflow's store is a file unless tracking.uri says otherwise",
    "monitors.wandb.name": "MLflow runs have the run's name",
    "matmul_precision": FIXED,
    "trace_path": "there is no profiler",
    "memory_profiler_path": "there is no profiler",
}

LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
}


def run_keys(tree: Tree, notes: Translation) -> None:
    """Identity, limits, logs and trackers. Silence about a tracker means none, about an end means forever."""
    notes.move(tree, RUN)
    notes.move(tree, {"log.level": ("log.level", lambda level: LEVELS[str(level).lower()])})
    notes.move(tree, {"dashboard": ("monitor.dashboard", lambda on: "auto" if on else "never")})
    if tree.has("metrics_server"):
        notes.put("monitor.endpoints", True, tree.full("metrics_server"))
        tree.take("metrics_server.port")
        tree.take("metrics_server")
    if tree.has("monitors.wandb"):
        notes.choose("tracking", "mlflow", tree.full("monitors.wandb"))
        notes.move(
            tree, {"monitors.wandb.project": "tracking.experiment", "monitors.wandb.group": "run.tags.group"}
        )
        for tag in tree.take("monitors.wandb.tags", []):
            notes.put(f"run.tags.{tag}", "true", tree.full("monitors.wandb.tags"))
    else:
        notes.choose("tracking", "none", "")
    notes.drop(tree, RUN_WITHOUT)
    tree.take("monitors.wandb")
    _resume(tree, notes)


def _resume(tree: Tree, notes: Translation) -> None:
    if not tree.has("resume"):
        return
    step, directory = tree.take("resume.step", None), tree.take("resume.dir", None)
    if step is not None and directory is not None:
        notes.problems.append(Problem(tree.full("resume"), step, "step and dir exclude each other"))
    value = tree.take("resume", None)
    if value is not False:
        which = str(step) if step is not None else directory or "latest"
        notes.put("run.resume", which, tree.full("resume"))


def checkpoints(tree: Tree, notes: Translation) -> None:
    """The block alone means: after the last step."""
    if not tree.has("ckpt"):
        return
    origin = tree.full("ckpt")
    notes.choose("ckpt", "end", origin)
    names = {
        "interval": "interval",
        "keep_last": "keep_last",
        "keep_interval": "keep_interval",
        "output_dir": "dir",
        "skip_progress": "skip_progress",
        "skip_scheduler": "skip_scheduler",
        "skip_optimizer": "skip_optimizer",
    }
    notes.move(tree, {f"ckpt.{old}": f"ckpt.{new}" for old, new in names.items()})
    notes.drop(
        tree, {"ckpt.wait_for_weights_timeout": "sync.timeout", "ckpt.skip_dataloader": "ckpt.skip_progress"}
    )
    tree.take("ckpt")


def model_keys(tree: Tree, notes: Translation) -> None:
    """The trainer's `model` table: precision, memory and speed. Full sharding is ZeRO 3."""
    notes.move(
        tree,
        {
            "name": "model.name",
            "seq_len": "trainer.seq_len",
            "attn": ("trainer.attn", lambda kind: "flash" if kind.startswith("flash") else kind),
            "fused_lm_head_token_chunk_size": ("trainer.lm_head_chunk", _chunk),
            "debug.num_layers": "model.num_layers",
            "debug.random_init": "model.random_init",
            "optim_cpu_offload": "zero.offload_optimizer",
            "cp": "trainer.sequence_parallel",
        },
    )
    _adapters(tree, notes)
    notes.drop(tree, MODEL_WITHOUT)
    compiled = _switch(tree, "compile", notes, "trainer.compile")
    _recompute(tree, notes)
    reshard = tree.take("reshard_after_forward")
    stage = "2" if reshard is False or compiled else "3"  # stage 3 would recompile without end
    origin = tree.full("reshard_after_forward") if reshard is not ABSENT else ""
    for key in ("fsdp_cpu_offload", "full_offload"):
        if tree.take(key, False):
            stage, origin = "3", tree.full(key)
            notes.put("zero.offload_optimizer", True, origin)
            notes.put("zero.offload_parameters", True, origin)
    notes.choose("zero", stage, origin)


def _adapters(tree: Tree, notes: Translation) -> None:
    """The block alone means rank 16."""
    if not tree.has("lora"):
        return
    origin = tree.full("lora")
    block = tree.branch("lora")
    notes.put("lora.rank", block.take("rank", 16), origin)
    names = {"alpha": "lora.alpha", "dropout": "lora.dropout", "target_modules": "lora.targets"}
    notes.move(block, dict(names))
    notes.drop(block, {"modules_to_save": "only adapters are trained beside frozen weights"})
    notes.refuse_rest(block, {"rank": "", "modules_to_save": "", **names})


def _recompute(tree: Tree, notes: Translation) -> None:
    if tree.has("ac_offloading"):
        offload = tree.take("ac_offloading")
        notes.put("trainer.offload_activations", bool(offload) or offload == {}, tree.full("ac_offloading"))
        notes.default("trainer.recompute", "full")
    if not tree.has("ac"):
        return
    block = tree.take("ac")
    mode = block.get("mode", "full") if isinstance(block, dict) else "full" if block else "none"
    known = {"full": "full", "none": "none"}
    notes.values.pop("trainer.recompute", None)
    notes.put("trainer.recompute", known.get(mode, "selective"), tree.full("ac"))
    if isinstance(block, dict) and set(block) - {"mode"}:
        extra = ", ".join(sorted(set(block) - {"mode"}))
        notes.without[f"{tree.full('ac')}.{extra}"] = "trainer.recompute has three levels"


def _switch(tree: Tree, key: str, notes: Translation, target: str) -> bool:
    """An optional block whose presence, even empty, switches it on."""
    if not tree.has(key):
        return False
    value = tree.take(key)
    on = value is True or isinstance(value, dict)
    notes.put(target, on, tree.full(key))
    return on


def _chunk(value: Any) -> int:
    return 0 if value in ("disabled", None) else int(value)


OPTIMIZERS = {name: name for name in ("adamw", "sgd", "muon", "sign_sgd")}


def optimizer(tree: Tree, notes: Translation) -> None:
    kind = kind_of(tree, "adamw", OPTIMIZERS, notes, "optim")
    notes.move(
        tree,
        {
            "lr": "optim.lr",
            "weight_decay": ("optim.weight_decay", lambda decay: 0.0 if decay == "auto" else decay),
            "max_norm": "optim.max_norm",
            "momentum": "optim.momentum",
            "mu": "optim.momentum",
            "nesterov": "optim.nesterov",
        },
    )
    betas = [tree.take("betas1"), tree.take("betas2")]
    if betas != [ABSENT, ABSENT]:
        default = [0.9, 0.95 if kind == "muon" else 0.999]
        found = [given if given is not ABSENT else own for given, own in zip(betas, default, strict=True)]
        notes.put("optim.betas", found, tree.full("betas1"))
    notes.drop(tree, {"apply_in_backward": "the update comes after backward"})
    notes.refuse_rest(
        tree, dict.fromkeys(("type", "lr", "weight_decay", "max_norm", "betas1", "betas2", "mu"))
    )


def scheduler(tree: Tree, notes: Translation) -> None:
    kind_of(tree, "constant", {name: name for name in ("constant", "linear", "cosine")}, notes, "scheduler")
    keys = {key: f"scheduler.{key}" for key in ("warmup_steps", "decay_steps", "min_lr")}
    notes.move(tree, dict(keys))
    notes.refuse_rest(tree, {"type": "", **keys})


def import_path(path: str) -> str:
    """`package.module.name` as `package.module:name`."""
    if ":" in path:
        return path
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError("package.module.name is needed")
    return f"{module}:{name}"


def select(tree: Tree, prefix: str, notes: Translation) -> None:
    """A `select` block. Positions may be a comma list in the file."""
    rules: dict[str, Any] = {key: f"{prefix}.{key}" for key in ("shuffle", "seed", "skip", "limit")}
    for side in ("include", "exclude"):
        rules[f"{side}.idx"] = (f"{prefix}.{side}.idx", _positions)
        rules |= {f"{side}.{key}": f"{prefix}.{side}.{key}" for key in ("ids", "keys", "names")}
    notes.move(tree, rules)
    notes.refuse_rest(tree, rules)


def _positions(value: Any) -> list[Any]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [int(part) if str(part).strip().isdigit() else str(part).strip() for part in parts]


def sampling(tree: Tree, prefix: str, notes: Translation) -> None:
    rules = {
        "temperature": f"{prefix}.temperature",
        "top_p": f"{prefix}.top_p",
        "top_k": f"{prefix}.top_k",
        "max_completion_tokens": f"{prefix}.max_tokens",
        "max_tokens": f"{prefix}.max_tokens",
        "extra_body": f"{prefix}.extra_body",
    }
    if not prefix.startswith("rollout"):
        rules |= {key: f"{prefix}.{key}" for key in ("min_p", "reasoning_effort")}
    notes.move(tree, dict(rules))
    notes.refuse_rest(tree, rules)


def variables(tree: Tree, component: str, notes: Translation) -> None:
    for name, value in dict(tree.take("env_vars", {})).items():
        notes.put(f"env_vars.{component}.{name}", str(value), tree.full(f"env_vars.{name}"))


def run_keys_of_component(tree: Tree, notes: Translation) -> None:
    """Keys that trainer and orchestrator repeat: those of the run, which must agree with it."""
    notes.move(tree, {key: target for key, target in RUN.items() if key != "run.name"})
    notes.move(tree, {"log.level": ("log.level", lambda level: LEVELS[str(level).lower()])})
    if tree.has("metrics_server"):
        tree.take("metrics_server")
        notes.put("monitor.endpoints", True, tree.full("metrics_server"))
    if tree.has("monitors.wandb"):
        notes.choose("tracking", "mlflow", tree.full("monitors.wandb"))
        notes.move(tree, {"monitors.wandb.project": "tracking.experiment"})
    notes.drop(tree, RUN_WITHOUT)
    tree.take("monitors.wandb")
    checkpoints(tree, notes)
    _resume(tree, notes)
