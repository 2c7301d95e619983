"""Environment sources, their algorithms and curricula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prl.config.errors import Problem, suggest
from prl.config.store import conf_dir
from prl.import_toml import common
from prl.import_toml.renamed import refuse_renamed_of_source
from prl.import_toml.silence import ENGINE_KEY
from prl.import_toml.translation import Translation, kind_of
from prl.import_toml.tree import Tree, merged

ALGOS = {name: name for name in ("grpo", "max_rl", "rae", "hierarchical_grpo", "opd", "opsd", "sft", "echo")}
ALGO_KEYS = {
    "decay": "decay",
    "episode_agents": "episode_agents",
    "demo_key": "demo_key",
    "template": "template",
    "loss_aggregation": "loss_aggregation",
    "roles": "roles",
    "filter.kwargs": "filter.kwargs",
}
ENV_WITHOUT = {
    "retries": "rollouts with faults are dropped, and counted",
    "timeout.finalize": "env.<name>.timeout is for the whole episode",
    "max_concurrent_agents": "rollout.max_inflight bounds them",
    "interception": "prl's harness needs none",
}
ELASTIC_WORKERS = 16
"""Workers of an elastic server at most, where a file sets no bound; prl needs one."""
EPISODE_SECONDS = 86400.0
"""What an episode may take where a file sets no limit; prl needs one."""
SERVE_WITHOUT = {
    "address": "prl starts its own environment servers",
    "max_concurrent": "rollout.max_inflight bounds them",
}


def sources(listed: Any, prefix: str, shared: Mapping[str, Any], notes: Translation, origin: str) -> None:
    """A list of sources as `<prefix>.<name>`; `shared` holds what each inherits key by key."""
    if not isinstance(listed, list) or not listed:
        notes.problems.append(Problem(origin, "[]", "at least one source is needed"))
        return
    taken: list[str] = []
    for index, entry in enumerate(listed):
        tree = Tree(merged(shared, entry), f"{origin}[{index}]")
        notes.problems += refuse_renamed_of_source(tree)
        taskset = tree.take("env.taskset.id", None) or tree.take("env.id", None)
        name = tree.take("name", None) or taskset
        if taskset is None:
            notes.problems.append(Problem(tree.full("env.taskset.id"), "null", "no environment is selected"))
            continue
        key = environment_name(str(name))
        if key in taken:
            notes.problems.append(
                Problem(tree.full("name"), name, "given twice", "Name one of them otherwise.")
            )
            continue
        taken.append(key)
        notes.put(f"{prefix}.{key}.id", taskset_id(str(taskset)), tree.full("env.taskset.id"))
        _source(tree, f"{prefix}.{key}", notes)
    if prefix == "env":
        notes.environments += taken


def environment_name(name: str) -> str:
    """A name that can be a key: `owner/my-set@1` -> `my_set`."""
    return re.sub(r"\W", "_", name.rsplit("/", 1)[-1].split("@", 1)[0])


def taskset_id(taskset: str) -> str:
    """An id, or the one that prl ships by the same name in its own spelling."""
    own = environment_name(taskset)
    return own if (conf_dir() / "env" / f"{own}.yaml").is_file() else taskset


def _source(tree: Tree, prefix: str, notes: Translation) -> None:
    rules = {"group_size": f"{prefix}.group_size", "ratio": f"{prefix}.ratio"}
    rules |= {"min_abs_advantage": f"{prefix}.min_abs_advantage"}
    if prefix.startswith("eval"):
        rules = {"group_size": f"{prefix}.group_size", "interval": f"{prefix}.interval"}
    notes.move(tree, dict(rules))
    common.select(tree.branch("select"), f"{prefix}.select", notes)
    common.sampling(tree.branch("sampling"), f"{prefix}.sampling", notes)
    _serving(tree.branch("serve"), prefix, notes)
    _environment(tree.branch("env"), prefix, notes)
    if tree.has("algo"):
        algorithm(tree.branch("algo"), f"{prefix}.algo", notes, f"algo@{prefix}.algo")
    if tree.has("curriculum"):
        curriculum(tree.branch("curriculum"), f"{prefix}.curriculum", notes)
    notes.refuse_rest(
        tree, {**rules, "name": "", "env": "", "serve": "", "select": "", "sampling": "", "algo": ""}
    )


def _serving(tree: Tree, prefix: str, notes: Translation) -> None:
    stated = tree.has("pool.type")
    pool = tree.take("pool.type", "elastic")
    if pool not in ("elastic", "static"):
        remedy = suggest(str(pool), ("elastic", "static"))
        notes.problems.append(Problem(tree.full("pool.type"), pool, "no such variant", remedy))
    notes.move(
        tree,
        {
            "pool.max_workers": f"{prefix}.workers",
            "pool.num_workers": f"{prefix}.workers",
            "pool.multiplex": f"{prefix}.multiplex",
        },
    )
    if pool == "elastic":
        notes.default(f"{prefix}.workers", ELASTIC_WORKERS)
        notes.default(f"{prefix}.elastic", notes.values[f"{prefix}.workers"] != 1)
    if stated:
        notes.became[tree.full("pool.type")] = f"{prefix}.elastic"
    if pool == "static":
        notes.default(f"{prefix}.workers", 4)
    notes.drop(tree, SERVE_WITHOUT)
    notes.refuse_rest(tree, {"pool": "", "address": "", "max_concurrent": ""})


def _environment(tree: Tree, prefix: str, notes: Translation) -> None:
    """The verifiers block: its taskset's options, limits, and one block per agent, all handed on."""
    notes.move(tree, {"timeout.episode": (f"{prefix}.timeout", lambda limit: limit or EPISODE_SECONDS)})
    notes.default(f"{prefix}.timeout", EPISODE_SECONDS)
    notes.drop(tree, ENV_WITHOUT)
    notes.refuse_rest(tree.branch("timeout"), {"episode": "", "finalize": ""})
    for key, value in dict(tree.take("taskset", {})).items():
        notes.put(f"{prefix}.taskset.{key}", value, tree.full(f"taskset.{key}"))
    for agent, value in list(tree.table.items()):
        origin = tree.full(agent)
        tree.take(agent)
        if isinstance(value, dict):
            notes.put(f"{prefix}.agents.{agent}", value, origin)
        else:
            notes.problems.append(Problem(origin, value, "unknown key", "Agents are tables."))


def algorithm(tree: Tree, prefix: str, notes: Translation, group: str) -> None:
    """An `algo` block; frozen models become the endpoint that prl calls `teacher`."""
    kind_of(tree, "grpo", ALGOS, notes, group)
    notes.move(tree, {old: f"{prefix}.{new}" for old, new in ALGO_KEYS.items()})
    notes.move(tree, {"filter.import_path": (f"{prefix}.filter.import_path", common.import_path)})
    notes.drop(tree, {"length_penalty.type": "there is one, linear"})
    if tree.has("length_penalty"):
        notes.default(f"{prefix}.length_penalty.turns", 0.1)  # the block alone switches it on
        pairs = {"output": "output_tokens", "input": "input_tokens", "turns": "turns"}
        penalty = tree.branch("length_penalty")
        notes.move(penalty, {old: f"{prefix}.length_penalty.{new}" for old, new in pairs.items()})
        notes.refuse_rest(penalty, {"type": "", **pairs})
    if not isinstance(tree.table.get("sampling", {}).get("source", {}), dict):
        source = tree.take("sampling.source")  # by name there is but one
        if source != "policy":
            remedy = "Write policy, or a table with name and base_url."
            notes.problems.append(Problem(tree.full("sampling.source"), source, "no such source", remedy))
    for table in ("teacher", "sampling.source"):
        endpoint(tree.branch(table), f"{prefix}.teacher", notes)
    notes.drop(tree, {"renderer": "model.renderer is for all"})
    notes.refuse_rest(tree, {**ALGO_KEYS, "type": "", "teacher": "", "length_penalty": ""})


def endpoint(tree: Tree, prefix: str, notes: Translation) -> None:
    notes.move(
        tree,
        {
            "name": f"{prefix}.model",
            "base_url": f"{prefix}.base_url",
            "api_key_var": f"{prefix}.api_key_var",
            "headers": f"{prefix}.headers",
        },
    )
    notes.drop(tree, {"wait_for_ready_timeout": "inference.ready_timeout is for all", **CLIENT_WITHOUT})
    notes.refuse_rest(tree, dict.fromkeys(("name", "base_url", "api_key_var", "headers")))
    if f"{prefix}.base_url" in notes.values:
        notes.default(f"{prefix}.api_key_var", ENGINE_KEY)


CLIENT_WITHOUT = {
    "headers_from_env": "prl reads the key only from the environment",
    "extra_headers_from_state": "prl sends X-Session-ID by itself",
    "skip_model_check": "an engine must serve the model",
    "admin_base_url": "prl asks the engine it was given",
}


GATE = "advantage_range"


def curriculum(tree: Tree, prefix: str, notes: Translation) -> None:
    """Sampler and gates of a curriculum."""
    sampler = tree.branch("sampler")
    kinds = {"standard": "standard", "difficulty_pool": "difficulty_pool"}
    group = "curriculum" if prefix == "curriculum" else f"curriculum@{prefix}"
    kind_of(sampler, "standard", kinds, notes, group)
    pools = dict(sampler.take("pools", {}))
    for name, pool in pools.items():
        inner = Tree(pool, sampler.full(f"pools.{name}"))
        keys = {"threshold": "max_reward", "max_reward": "max_reward", "weight": "weight"}
        notes.move(inner, {old: f"{prefix}.pools.{name}.{new}" for old, new in keys.items()})
        notes.refuse_rest(inner, keys)
    notes.move(sampler, {"seed": f"{prefix}.seed"})
    notes.refuse_rest(sampler, {"type": "", "pools": "", "seed": ""})
    for name, gate in dict(tree.take("gates", {})).items():
        inner = Tree(gate, tree.full(f"gates.{name}"))
        if (kind := inner.take("type", GATE)) != GATE:
            notes.problems.append(Problem(inner.full("type"), kind, "no such variant", f"Valid: {GATE}."))
        for key in ("reject_min", "reject_max"):
            notes.put(f"{prefix}.gates.{name}.{key}", inner.take(key, 0.0), inner.full(key))
        notes.refuse_rest(inner, {"type": "", "reject_min": "", "reject_max": ""})
    notes.refuse_rest(tree, {"sampler": "", "gates": ""})
