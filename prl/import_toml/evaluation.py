"""`eval` files: a model at an endpoint, and sources that inherit what they do not say themselves."""

from __future__ import annotations

from typing import Any

from prl.import_toml import common, silence
from prl.import_toml.sources import CLIENT_WITHOUT, sources
from prl.import_toml.translation import Translation
from prl.import_toml.tree import Tree


def translate(tree: Tree, notes: Translation) -> None:
    """Take an `eval` file apart."""
    if tree.table.get("resume") is False:
        tree.take("resume")
    common.run_keys(tree, notes)
    common.variables(tree, "all", notes)
    notes.choose("inference", "external", "")
    notes.move(tree, {"group_size": "rollout.group_size"})
    _model(tree.take("model", None), notes)
    client = tree.branch("client")
    notes.move(client, {key: f"client.{key}" for key in ("base_url", "api_key_var", "headers")})
    notes.drop(client, {"wait_for_ready_timeout": "client.timeout", **CLIENT_WITHOUT})
    notes.refuse_rest(client, dict.fromkeys(("base_url", "api_key_var", "headers")))
    common.select(tree.branch("select"), "select", notes)
    common.sampling(tree.branch("sampling"), "rollout.sampling", notes)
    _concurrency(tree, notes)
    notes.drop(tree, {"tasks_per_minute": "eval.rollouts_per_minute bounds rollouts"})
    shared = {"env": tree.take("env", {})}
    sources(tree.take("source", []), "env", shared, notes, "source")
    known = (
        "model client source select group_size concurrency sampling env run output_dir log monitors resume"
    )
    notes.refuse_rest(tree, dict.fromkeys(known.split()))
    silence.of_eval(notes)


def _model(value: Any, notes: Translation) -> None:
    """A name, or a table that holds one."""
    block = Tree(value if isinstance(value, dict) else {} if value is None else {"name": value}, "model")
    notes.move(block, {"name": "model.name"})
    notes.refuse_rest(block, {"name": ""})


def _concurrency(tree: Tree, notes: Translation) -> None:
    """A number, or bounds between which the format adapts; prl keeps to the upper one."""
    value = tree.take("concurrency", None)
    origin = tree.full("concurrency")
    if isinstance(value, dict):
        block = Tree(value, origin)
        notes.drop(block, dict.fromkeys(("min_inflight", "min", "initial_inflight"), "concurrency is fixed"))
        notes.move(block, {"max_inflight": "concurrency", "max": "concurrency"})
        notes.refuse_rest(block, dict.fromkeys(("max_inflight", "min_inflight", "initial_inflight")))
    elif value is not None:
        notes.put("concurrency", value, origin)
