"""Keys of earlier releases. The format refuses them with the new name, and so does the import."""

from __future__ import annotations

import re

from prl.config.errors import NO_VALUE, Problem
from prl.import_toml.tree import Tree

RENAMED = {
    r"orchestrator\.group_size": "orchestrator.train.group_size",
    r"orchestrator\.rollouts_per_example": "orchestrator.train.group_size",
    r"orchestrator\.algo(\..*)?": r"orchestrator.train.algo\1",
    r"orchestrator\.teacher(\..*)?": r"orchestrator.train.algo.teacher\1",
    r"orchestrator\.sampling(\..*)?": r"orchestrator.train.sampling\1",
    r"orchestrator\.env": "orchestrator.train.source",
    r"orchestrator\.token_batch_size": "orchestrator.batch_size",
    r"orchestrator\.env_server_base_port": "source.serve.address (the system picks ports)",
    r"orchestrator\.eval\.num_examples": "orchestrator.eval.select.limit",
    r"orchestrator\.train\.filter_zero_advantages": "orchestrator.train.constant_trainer_batch_size",
    r"(trainer\.)?wandb(\..*)?": r"monitors.wandb\2",
    r"eval\.sources": "source",
    r"online(\..*)?": "orchestrator.eval (in an `rl` file)",
    r"num_examples": "select.limit",
    r"max_concurrent": "concurrency",
    r"rollouts_per_example": "group_size",
    r"trainer\.loss\.(dppo_mask_low|dppo_mask_high|kl_tau)": 'trainer.loss.eps (type = "ipo")',
    r"trainer\.enable_token_export": "trace annotations, which prl writes to traces/annotations.jsonl",
}
"""Pattern of the old key -> the new one."""

IN_SOURCES = {"num_examples": "select.limit", "rollouts_per_example": "group_size", "id": "env.taskset.id"}


def refuse_renamed(tree: Tree) -> list[Problem]:
    """Problems with old keys; they are taken out of the tree."""
    problems = []
    for key, value in list(tree.leaves()):
        for pattern, new in RENAMED.items():
            if (match := re.fullmatch(pattern, key)) is None:
                continue
            tree.take(key)
            shown = NO_VALUE if isinstance(value, dict | list) else value
            problems.append(Problem(key, shown, "renamed", f"Now: {match.expand(new)}."))
            break
    return problems


def refuse_renamed_of_source(tree: Tree) -> list[Problem]:
    """The same for one environment source."""
    found = [(key, tree.take(key), new) for key, new in IN_SOURCES.items() if tree.has(key)]
    return [Problem(tree.full(key), value, "renamed", f"Now: {new}.") for key, value, new in found]
