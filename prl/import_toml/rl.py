"""`rl` files: shared keys, trainer, orchestrator, inference, deployment."""

from __future__ import annotations

from typing import Any

from prl.config.errors import Problem, suggest
from prl.import_toml import common, silence
from prl.import_toml.sources import CLIENT_WITHOUT, algorithm, sources
from prl.import_toml.translation import Translation, kind_of
from prl.import_toml.tree import Tree

LOSSES = {name: name for name in ("ipo", "icepop", "ppo", "cispo", "custom")}
SYNCS = {"filesystem": "filesystem", "nccl": "collective"}
TABLES = [
    "trainer",
    "orchestrator",
    "inference",
    "model",
    "tokenizer",
    "renderer",
    "optim",
    "scheduler",
    "ckpt",
    "resume",
    "run",
    "log",
    "monitors",
    "env_vars",
    "deployment",
    "slurm",
    "weight_broadcast",
    "rollout_transport",
    "max_steps",
    "seq_len",
    "output_dir",
    "clean",
    "dry_run",
]

TRAINER_WITHOUT = {
    "tokenizer": common.TOKENIZER,
    "data": "`prl bench trainer` measures without an orchestrator",
    "enable_router_replay": common.MOE,
    "rollout_transport": "stated once, by the run",
}
ORCHESTRATOR_WITHOUT = {
    "tokenizer": common.TOKENIZER,
    "model.lora": "stated once, by the trainer",
    "num_train_workers": "derived from cluster.train_ranks",
    "pad_to_multiple_of": common.FIXED,
    "collect_inference_metrics": "they are always collected",
    "inference_metrics_roles": "prl has no prefill and decode servers",
}
INFERENCE_WITHOUT = {
    "server.liveness_timeout_seconds": "inference.admin_timeout",
    "router": "prl's own router stands before several engines",
    "backend_port": "the system picks ports",
    "use_deep_gemm": "prl serves bfloat16 or float32",
    "weight_broadcast": "stated once, by sync",
    "kv_cache_offload": "pass vLLM's own options by inference.vllm",
    "enable_fp32_lm_head": common.FIXED,
    "enable_fp32_router_logits": common.MOE,
    "enable_return_sampling_mask": "the learner models the whole vocabulary",
    "use_pd_kv_transfer": "prl has no prefill and decode servers",
    "log": "log.level is for all",
    "deployment": "cluster places the engines",
    "slurm": "cluster is for the whole run",
    "output_dir": "the run has one directory",
    "dry_run": "dry_run is for the whole run",
    "vllm.model": "model.path",
    "vllm.dtype": "trainer.dtype is the engine's too",
    "vllm.data_parallel_size_local": "inference.replicas",
    "vllm.data_parallel_rpc_port": "the system picks ports",
    "vllm.api_server_count": "one for each engine",
    "vllm.enable_lora": "lora.publish decides",
    "vllm.max_lora_rank": "lora.rank decides",
}
SLURM = {
    "job_name": "job_name",
    "partition": "partition",
    "nodelist": "nodelist",
    "exclude": "exclude",
    "account": "account",
    "time": "time",
    "pre_run_command": "pre_run",
    "cleanup_grace_period": "failure_grace",
    "max_requeues": "max_requeues",
    "step_timeout": "step_timeout",
}
SLURM_WITHOUT = {
    "project_dir": "cluster.activate names the environment",
    "template_path": "cluster.setup and cluster.extra change the script",
    "shared_fs": "prl needs a shared file system",
    "launch_modelexpress": "prl has no such service",
}


def translate(tree: Tree, notes: Translation) -> None:
    """Take an `rl` file apart. What it leaves unsaid has the format's default where prl's differs."""
    common.run_keys(tree, notes)
    common.checkpoints(tree, notes)
    common.variables(tree, "all", notes)
    notes.drop(tree, {"tokenizer": common.TOKENIZER, "model.vlm": "prl trains text models"})
    notes.move(
        tree, {"model.name": "model.name", "seq_len": "trainer.seq_len", "renderer.name": "model.renderer"}
    )
    notes.drop(tree, {"renderer": "a renderer has no options in prl"})
    transports(tree, notes)
    _trainer(tree.branch("trainer"), notes)
    inference(tree, notes)
    _orchestrator(tree.branch("orchestrator"), notes)
    deployment(tree, notes)
    notes.refuse_rest(tree, dict.fromkeys(TABLES))
    silence.of_rl(notes)


def transports(tree: Tree, notes: Translation) -> None:
    if tree.has("weight_broadcast"):
        weights = tree.branch("weight_broadcast")
        kind_of(weights, "nccl", SYNCS, notes, "sync")
        notes.move(weights, {"timeout": "sync.timeout"})
        reason = "processes of a run find each other"
        notes.drop(
            weights, {"host": reason, "port": reason, "session_id": reason, "inference_world_size": "derived"}
        )
        notes.refuse_rest(weights, dict.fromkeys(("type", "timeout", "host", "port")))
    if tree.has("rollout_transport"):
        batches = tree.branch("rollout_transport")
        notes.move(batches, {"type": "rollout.transport"})
        reason = "the socket binds a free port"
        notes.drop(batches, {"host": reason, "port": reason, "hwm": reason})
        notes.refuse_rest(batches, dict.fromkeys(("type", "host", "port", "hwm")))


def _trainer(tree: Tree, notes: Translation) -> None:
    common.run_keys_of_component(tree, notes)
    common.variables(tree, "trainer", notes)
    notes.drop(tree, TRAINER_WITHOUT)
    model = tree.branch("model")
    common.model_keys(model, notes)
    notes.refuse_rest(model, dict.fromkeys(("name", "seq_len", "attn", "ac", "compile")))
    loss(tree.branch("loss"), notes)
    common.optimizer(tree.branch("optim"), notes, auto_decay=0.0)
    common.scheduler(tree.branch("scheduler"), notes)
    transports(tree, notes)
    notes.move(tree, {"gc.interval": "trainer.gc_interval", "dist_timeout_seconds": "trainer.dist_timeout"})
    notes.refuse_rest(tree, dict.fromkeys(["model", "loss", "optim", "scheduler", "ckpt", "log", "gc"]))


def loss(tree: Tree, notes: Translation) -> None:
    if tree.table.get("type") == "default":
        tree.take("type")
        notes.problems.append(Problem(tree.full("type"), "default", "renamed", "Now: ipo, with eps."))
    kind_of(tree, "ipo", LOSSES, notes, "loss")
    keys = ("eps", "adv_tau", "ratio_low", "ratio_high", "max_importance_ratio", "kwargs")
    notes.move(tree, {key: f"loss.{key}" for key in keys})
    notes.move(tree, {"import_path": ("loss.import_path", common.import_path)})
    notes.refuse_rest(tree, dict.fromkeys(("type", "import_path", *keys)))


def _orchestrator(tree: Tree, notes: Translation) -> None:
    common.run_keys_of_component(tree, notes)
    common.variables(tree, "orchestrator", notes)
    notes.drop(tree, ORCHESTRATOR_WITHOUT)
    notes.move(
        tree,
        {
            "model.name": "model.name",
            "renderer.name": "model.renderer",
            "seq_len": "inference.max_model_len",
            "batch_size": "rollout.batch_size",
            "max_off_policy_steps": "rollout.max_off_policy_steps",
            "concurrency.initial_inflight": "rollout.initial_inflight",
            "concurrency.min_inflight": "rollout.min_inflight",
            "concurrency.max_inflight": "rollout.max_inflight",
            "tasks_per_minute": "rollout.tasks_per_minute",
            "train.group_size": "rollout.group_size",
            "train.constant_trainer_batch_size": "rollout.constant_batch_size",
        },
    )
    engine_client(tree.branch("model.client"), notes)
    transports(tree, notes)
    common.sampling(tree.branch("train.sampling"), "rollout.sampling", notes)
    algorithm(tree.branch("train.algo"), "algo", notes, "algo")
    shared: dict[str, Any] = {"select": tree.take("train.select", {})}
    sources(tree.take("train.source", []), "env", shared, notes, "orchestrator.train.source")
    if tree.has("eval"):
        online_eval(tree.branch("eval"), notes)
    notes.refuse_rest(
        tree, dict.fromkeys(["train", "eval", "model", "batch_size", "seq_len", "concurrency", "ckpt", "log"])
    )


def engine_client(client: Tree, notes: Translation) -> None:
    """How an engine that runs already is reached; prl finds those that it starts."""
    notes.drop(client, CLIENT_WITHOUT)
    keys = ("base_url", "api_key_var", "headers")
    notes.move(client, {"wait_for_ready_timeout": "inference.ready_timeout"})
    if notes.choices.get("inference") == "external":
        notes.move(client, {key: f"inference.{key}" for key in keys})
    else:
        notes.drop(client, dict.fromkeys(keys, "prl finds the engine that it starts"))
    notes.refuse_rest(client, dict.fromkeys((*keys, "wait_for_ready_timeout", *CLIENT_WITHOUT)))


def online_eval(tree: Tree, notes: Translation) -> None:
    keys = ("interval", "group_size", "skip_first_step", "retrigger_on_resume")
    notes.move(tree, {key: f"eval.{key}" for key in keys})
    common.select(tree.branch("select"), "eval.select", notes)
    common.sampling(tree.branch("sampling"), "eval.sampling", notes)
    sources(tree.take("source", []), "eval.env", {}, notes, tree.full("source"))
    notes.refuse_rest(tree, dict.fromkeys((*keys, "select", "sampling", "source")))


def inference(tree: Tree, notes: Translation) -> None:
    """The block's presence starts a server; without it one is expected to run."""
    if not tree.has("inference"):
        notes.choose("inference", "external", "")
        return
    block = tree.branch("inference")
    notes.choose("inference", "vllm", "inference")
    common.variables(block, "inference", notes)
    notes.drop(block, INFERENCE_WITHOUT)
    notes.move(
        block,
        {
            "server.host": "inference.host",
            "server.port": "inference.port",
            "vllm.max_model_len": "inference.max_model_len",
            "vllm.tensor_parallel_size": "inference.tensor_parallel_size",
            "vllm.data_parallel_size": "inference.replicas",
            "vllm.gpu_memory_utilization": "inference.gpu_memory_utilization",
            "vllm.seed": "inference.seed",
        },
    )
    for key, value in dict(block.take("vllm", {})).items():
        notes.put(f"inference.vllm.{key.replace('-', '_')}", value, block.full(f"vllm.{key}"))
    notes.refuse_rest(block, dict.fromkeys(["server", "vllm", "router", "env_vars", "deployment", "slurm"]))


def deployment(tree: Tree, notes: Translation) -> None:
    """One node is `cluster=local` (or one SLURM node), several are nodes of one SLURM job."""
    block = tree.branch("deployment")
    kind = block.take("type", "single_node")
    if kind not in ("single_node", "multi_node"):
        remedy = suggest(str(kind), ("single_node", "multi_node"))
        notes.problems.append(Problem(block.full("type"), kind, "no such variant", remedy))
    slurm = tree.branch("slurm") if tree.has("slurm") else None
    if slurm is not None:
        notes.choose("cluster", "slurm", "slurm")
        notes.move(slurm, {old: f"cluster.{new}" for old, new in SLURM.items()})
        notes.drop(slurm, SLURM_WITHOUT)
        notes.refuse_rest(slurm, SLURM)
    if slurm is None:
        notes.drop(block, {"gpus_per_node": "without SLURM they are this machine's"})
    gpus = block.take("gpus_per_node", 8)
    if slurm is not None:
        notes.put("cluster.gpus_per_node", gpus, block.full("gpus_per_node"))
    if kind == "multi_node":
        _several_nodes(block, notes, gpus, slurm is not None)
    else:
        notes.move(block, {"num_train_gpus": "cluster.train_ranks", "num_infer_gpus": "cluster.infer_gpus"})
    reason = "zero.hpz_partition_size is ZeRO's way to the same end"
    notes.drop(
        block, {"nodes_per_fsdp_group": reason, "orchestrator_on_inference": "it lives with the trainer"}
    )
    notes.refuse_rest(block, dict.fromkeys(("type", "gpus_per_node", "num_train_gpus", "num_infer_gpus")))


def _several_nodes(block: Tree, notes: Translation, gpus: int, slurm: bool) -> None:
    origin = block.full("num_train_nodes")
    trainers = block.take("num_train_nodes", None)
    if trainers is None or not slurm:
        reason = "multi_node needs num_train_nodes and a [slurm] table"
        notes.problems.append(Problem(block.full("type"), "multi_node", reason))
        return
    if block.has("num_infer_replicas"):
        notes.became[block.full("num_infer_replicas")] = "cluster.infer_nodes"
    engines = block.take("num_infer_nodes", 1) * block.take("num_infer_replicas", 1)
    notes.put("cluster.train_nodes", trainers, origin)
    notes.put("cluster.infer_nodes", engines, block.full("num_infer_nodes"))
    notes.put("cluster.train_ranks", trainers * gpus, origin)
    if engines:
        notes.put("cluster.infer_gpus", engines * gpus, block.full("num_infer_nodes"))
