"""`sft` files: flat, with their data, validation and evaluations."""

from __future__ import annotations

from prl.config.errors import NO_VALUE, Problem
from prl.import_toml import common, silence
from prl.import_toml.rl import deployment, engine_client, inference, online_eval
from prl.import_toml.translation import Translation, kind_of
from prl.import_toml.tree import Tree

KINDS = {"sft": "rows", "fake": "fake"}
DATA = {
    "batch_size": "batch_size",
    "micro_batch_size": "micro_batch_size",
    "num_workers": "workers",
    "seed": "seed",
    "name": "path",
    "revision": "revision",
    "subsets": "subsets",
    "splits": "splits",
    "probabilities": "probabilities",
    "stopping_strategy": "stopping",
    "shuffle": "shuffle",
    "length": "length",
    "input_ids": "tokens",
    "columns": "columns",
    "loss_mask": "loss_mask",
}
EVAL_WITHOUT = {
    "concurrency": "eval.max_inflight bounds them",
    "cancel_on_new_checkpoint": "an evaluation is finished with the weights that it began with",
}
DEFAULT_DATA = "PrimeIntellect/Reverse-Text-SFT"


def translate(tree: Tree, notes: Translation) -> None:
    """Take an `sft` file apart. The optimizer is at the top level here."""
    common.run_keys(tree, notes)
    common.checkpoints(tree, notes)
    common.variables(tree, "all", notes)
    notes.drop(tree, {"tokenizer": common.TOKENIZER})
    model = tree.branch("model")
    common.model_keys(model, notes)
    notes.refuse_rest(model, dict.fromkeys(("name", "seq_len", "attn", "ac", "compile")))
    notes.move(tree, {"renderer.name": "model.renderer"})
    notes.drop(tree, {"renderer": "a renderer has no options in prl"})
    common.optimizer(tree.branch("optim"), notes, auto_decay=0.01)
    common.scheduler(tree.branch("scheduler"), notes)
    notes.move(tree, {"gc.interval": "trainer.gc_interval", "dist_timeout_seconds": "trainer.dist_timeout"})
    _data(tree.branch("data"), "data", notes)
    if tree.has("val"):
        _validation(tree.branch("val"), notes)
    evaluates = tree.has("eval")
    if evaluates:
        _evaluations(tree, notes)
    elif tree.has("inference"):
        tree.take("inference")
        remedy = "Add [eval] with a source, or remove [inference]."
        notes.problems.append(Problem("inference", NO_VALUE, "nothing is evaluated", remedy))
    _broadcasts(tree.branch("weight_broadcast"), notes)
    _deployment(tree, notes, evaluates)
    notes.refuse_rest(
        tree,
        dict.fromkeys(
            [
                "model",
                "data",
                "val",
                "eval",
                "inference",
                "optim",
                "scheduler",
                "ckpt",
                "run",
                "log",
                "monitors",
                "deployment",
            ]
        ),
    )
    silence.of_sft(notes)


def _broadcasts(tree: Tree, notes: Translation) -> None:
    """Evaluations read weights from files, whatever the file names."""
    known = ("type", "timeout", "host", "port", "inference_world_size")
    notes.drop(tree, dict.fromkeys(known, "evaluations read weights from files"))
    notes.refuse_rest(tree, dict.fromkeys(known))


def _data(tree: Tree, prefix: str, notes: Translation) -> None:
    kind = kind_of(tree, "sft", KINDS, notes, "data" if prefix == "data" else f"data@{prefix}")
    if prefix == "data":
        notes.values.pop("trainer.seq_len", None)  # the data's length is what counts here
    notes.move(tree, {"seq_len": "trainer.seq_len"} if prefix == "data" else {})
    notes.drop(tree, {"seq_len": "validation has the trainer's rows"})
    notes.move(tree, {old: f"{prefix}.{new}" for old, new in DATA.items()})
    notes.refuse_rest(tree, {"type": "", "seq_len": "", **DATA})
    if kind == "sft":
        notes.default(f"{prefix}.path", DEFAULT_DATA)


def _validation(tree: Tree, notes: Translation) -> None:
    notes.move(tree, {"interval": "val.interval", "eval_on_start": "val.at_start"})
    _data(tree.branch("data"), "val.data", notes)
    notes.refuse_rest(tree, dict.fromkeys(("interval", "eval_on_start", "data")))


def _evaluations(tree: Tree, notes: Translation) -> None:
    """Evaluations while training, on an engine of the run or one that runs already."""
    inference(tree, notes)
    notes.move(tree, {"weight_broadcast.timeout": "sync.timeout"})
    block = tree.branch("eval")
    engine_client(block.branch("client"), notes)
    notes.drop(block, EVAL_WITHOUT)
    online_eval(block, notes)


def _deployment(tree: Tree, notes: Translation, evaluates: bool) -> None:
    """GPUs and nodes of engines count only where there are engines."""
    if not evaluates:
        reason = "no engine is started without evaluations"
        notes.drop(tree, {f"deployment.{key}": reason for key in ("num_infer_gpus", "num_infer_nodes")})
    table = tree.table.get("deployment", {})
    if table.get("type") == "multi_node":
        table.setdefault("num_train_nodes", 2)
        table.setdefault("num_infer_nodes", 0)
    deployment(tree, notes)
