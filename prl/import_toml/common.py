"""What every file of the format has: run, log, checkpoints, trackers, and the tables of the trainer."""

from __future__ import annotations

from typing import Any

from prl.config.errors import Problem
from prl.import_toml.translation import Rule, Translation, kind_of
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
}
RUN_WITHOUT = {
    "run.dir": "the directory has the run's name",
    "log.log_data": "traces/ holds every episode",
    "log.interval": FIXED,
    "log.ranks_filter": "each rank has a log of its own",
    "monitors.file": "metrics/ and traces/ are always written",
    "monitors.prime": "there is no such platform",
    "matmul_precision": FIXED,
    "trace_path": "there is no profiler",
    "memory_profiler_path": "there is no profiler",
}

WANDB_WITHOUT = {
    "entity": "MLflow has none",
    "offline": "MLflow's store is a file unless tracking.uri says otherwise",
    "name": "MLflow runs have the run's name",
}

LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
}
LOG: dict[str, Rule] = {
    "log.level": ("log.level", lambda level: LEVELS[str(level or "info").lower()]),
    "log.vf_level": ("log.levels.env", lambda level: LEVELS[str(level or "info").lower()]),
    "log.json_logging": ("log.format", lambda on: "json" if on else "text"),
}


def run_keys(tree: Tree, notes: Translation) -> None:
    """Identity, limits, logs and trackers. Silence about a tracker means none, about an end means forever."""
    notes.move(tree, RUN)
    notes.move(tree, LOG)
    notes.move(tree, {"dashboard": ("monitor.dashboard", lambda on: "auto" if on else "never")})
    notes.choose("tracking", "none", "")
    _watchers(tree, notes)
    notes.drop(tree, RUN_WITHOUT)
    _resume(tree, notes)


def _watchers(tree: Tree, notes: Translation) -> None:
    """Trackers and servers of metrics; each block switches its own on, even empty."""
    if tree.has("metrics_server"):
        notes.put("monitor.endpoints", True, tree.full("metrics_server"))
        server = tree.branch("metrics_server")
        notes.move(server, {"host": "monitor.host"})
        notes.drop(server, {"port": "every process has a port of its own, which the system picks"})
        notes.refuse_rest(server, dict.fromkeys(("port", "host")))
    if tree.has("monitors.wandb"):
        notes.choose("tracking", "mlflow", tree.full("monitors.wandb"))
        board = tree.branch("monitors.wandb")
        notes.move(board, {"project": "tracking.experiment", "group": "run.tags.group"})
        for tag in board.take("tags", None) or []:
            notes.put(f"run.tags.{tag}", "true", board.full("tags"))
        notes.drop(board, WANDB_WITHOUT)
        notes.refuse_rest(board, dict.fromkeys(("project", "group", "tags", *WANDB_WITHOUT)))


def _resume(tree: Tree, notes: Translation) -> None:
    if not tree.has("resume"):
        return
    origin, block = tree.full("resume"), tree.take("resume")
    if isinstance(block, bool):
        block = {} if block else None
    if block is None:
        return
    block = Tree(block if isinstance(block, dict) else {"": block}, origin)
    step, directory = block.take("step", None), block.take("dir", None)
    notes.refuse_rest(block, dict.fromkeys(("step", "dir")))
    if step is not None and directory is not None:
        notes.problems.append(Problem(origin, step, "step and dir exclude each other"))
    which = str(step) if step is not None else directory or "latest"
    notes.put("run.resume", which, origin)


def checkpoints(tree: Tree, notes: Translation) -> None:
    """The block alone means: after the last step. No block means no checkpoint."""
    if not tree.has("ckpt"):
        notes.choices.setdefault("ckpt", "none")
        return
    notes.choose("ckpt", "end", tree.full("ckpt"))
    block = tree.branch("ckpt")
    names = {
        "interval": "interval",
        "keep_last": "keep_last",
        "keep_interval": "keep_interval",
        "output_dir": "dir",
        "skip_progress": "skip_progress",
        "skip_scheduler": "skip_scheduler",
        "skip_optimizer": "skip_optimizer",
    }
    notes.move(block, {old: f"ckpt.{new}" for old, new in names.items()})
    reasons = {
        "wait_for_weights_timeout": "sync.timeout",
        "skip_dataloader": "ckpt.skip_progress is for both",
    }
    notes.drop(block, reasons)
    notes.refuse_rest(block, {**names, **reasons})


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
            "optim_cpu_offload": ("zero.offload_optimizer", bool),
            "cp": "trainer.sequence_parallel",
        },
    )
    _adapters(tree, notes)
    notes.drop(tree, MODEL_WITHOUT)
    _switch(tree, "compile", notes, "trainer.compile")
    _recompute(tree, notes)
    reshard = tree.take("reshard_after_forward")
    stage = "2" if reshard is False else "3"
    origin = tree.full("reshard_after_forward") if reshard is not ABSENT else ""
    for key in ("fsdp_cpu_offload", "full_offload"):
        block = tree.take(key, False)
        if block or block == {}:
            stage, origin = "3", tree.full(key)
            notes.values["zero.offload_optimizer"] = True
            notes.put("zero.offload_parameters", True, origin)
            _inner(block, origin, ("numa_bind", "cpu_optimizer_backend"), "DeepSpeed decides it", notes)
        elif block is not ABSENT and block is not False:
            notes.without[tree.full(key)] = "nothing is switched on by it"
    notes.choose("zero", stage, origin)


def _inner(block: Any, origin: str, known: tuple[str, ...], reason: str, notes: Translation) -> None:
    """Note what a block that only switches something on has inside; refuse what it cannot have."""
    if isinstance(block, dict):
        inner = Tree(block, origin)
        notes.drop(inner, dict.fromkeys(known, reason))
        notes.refuse_rest(inner, dict.fromkeys(known))


def _adapters(tree: Tree, notes: Translation) -> None:
    """The block alone means rank 16."""
    if not tree.has("lora"):
        return
    origin = tree.full("lora")
    block = tree.branch("lora")
    notes.put("lora.rank", block.take("rank", 16), origin)
    names = {"alpha": "lora.alpha", "dropout": "lora.dropout", "target_modules": "lora.targets"}
    names["modules_to_save"] = "lora.modules_to_save"
    notes.move(block, dict(names))
    notes.refuse_rest(block, {"rank": "", **names})


def _recompute(tree: Tree, notes: Translation) -> None:
    if tree.has("ac_offloading"):
        offload, origin = tree.take("ac_offloading"), tree.full("ac_offloading")
        notes.put("trainer.offload_activations", bool(offload) or offload == {}, origin)
        _inner(
            offload, origin, ("pin_memory", "max_inflight_activations"), "prl copies as memory allows", notes
        )
    if not tree.has("ac"):
        return
    block = tree.take("ac")
    mode = block.get("mode", "full") if isinstance(block, dict) else "full" if block else "none"
    known = {"full": "full", "none": "none"}
    notes.put("trainer.recompute", known.get(mode, "selective"), tree.full("ac"))
    inside = ("mode", "freq", "targets", "layer_modes")
    _inner(block, tree.full("ac"), inside, "trainer.recompute has three levels", notes)
    notes.without.pop(f"{tree.full('ac')}.mode", None)


def _switch(tree: Tree, key: str, notes: Translation, target: str) -> None:
    """An optional block whose presence, even empty, switches it on."""
    if not tree.has(key):
        return
    value = tree.take(key)
    notes.put(target, value is True or isinstance(value, dict), tree.full(key))
    _inner(value, tree.full(key), ("fullgraph", "mode"), "each layer is compiled by itself", notes)


def _chunk(value: Any) -> int:
    return 0 if value in ("disabled", None) else int(value)


OPTIMIZERS = {name: name for name in ("adamw", "sgd", "muon", "sign_sgd")}


def optimizer(tree: Tree, notes: Translation, auto_decay: float) -> None:
    """`auto_decay` is what `weight_decay = "auto"`, the format's default, means for this command."""
    kind = kind_of(tree, "adamw", OPTIMIZERS, notes, "optim")
    notes.move(
        tree,
        {
            "lr": "optim.lr",
            "weight_decay": ("optim.weight_decay", lambda decay: auto_decay if decay == "auto" else decay),
            "max_norm": "optim.max_norm",
            "momentum": "optim.momentum",
            "mu": "optim.momentum",
            "nesterov": "optim.nesterov",
        },
    )
    notes.default("optim.lr", 1e-6)
    notes.default("optim.weight_decay", auto_decay)
    _betas(tree, kind, notes)
    notes.drop(tree, {"apply_in_backward": "the update comes after backward"})
    notes.refuse_rest(
        tree, dict.fromkeys(("type", "lr", "weight_decay", "max_norm", "betas1", "betas2", "mu"))
    )


def _betas(tree: Tree, kind: str | None, notes: Translation) -> None:
    if kind in ("adamw", "muon"):
        betas = [0.9, 0.95 if kind == "muon" else 0.999]
        notes.default("optim.betas", betas)
    for place, key in enumerate(("betas1", "betas2")):
        value = tree.take(key)
        if value is not ABSENT and kind in ("adamw", "muon"):
            betas[place] = value
            notes.became[tree.full(key)] = "optim.betas"
        elif value is not ABSENT:
            notes.problems.append(Problem(tree.full(key), value, f"{kind} has no such key"))


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
    if not prefix.startswith("rollout") or notes.command == "eval":
        rules |= {key: f"{prefix}.{key}" for key in ("min_p", "reasoning_effort")}
    notes.move(tree, dict(rules))
    notes.refuse_rest(tree, rules)


def variables(tree: Tree, component: str, notes: Translation) -> None:
    for name, value in dict(tree.take("env_vars", {})).items():
        notes.put(f"env_vars.{component}.{name}", str(value), tree.full(f"env_vars.{name}"))


def run_keys_of_component(tree: Tree, notes: Translation) -> None:
    """Keys that trainer and orchestrator repeat: those of the run, which must agree with it."""
    notes.move(tree, {key: target for key, target in RUN.items() if key != "run.name"})
    notes.move(tree, LOG)
    _watchers(tree, notes)
    notes.drop(tree, RUN_WITHOUT)
    checkpoints(tree, notes)
    _resume(tree, notes)
