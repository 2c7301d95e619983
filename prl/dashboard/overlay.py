"""Tokens of a trace's message with what is known of each: mask, advantage, logprobs of both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from prl.config.training import ModelConfig
from prl.model_path import resolve_model_path

MOST_TOKENS = 20_000
Column = list[float | None]


def node_tokens(
    trace: dict[str, Any],
    node: int,
    credit: dict[str, Any] | None,
    trained: Sequence[dict[str, Any]],
    text_of: Callable[[int], str],
) -> dict[str, Any]:
    """Per token of message `node`: `ids`, `texts`, `mask`, `logprobs`, `advantages`, `trainer`, `gap`.

    `trainer` are the trainer's logprobs and `gap` those minus the sampler's; None where not known.
    """
    record = trace["nodes"][node]
    ids = record["token_ids"]
    mask = expand(record["mask"], len(ids))
    advantages = (credit or {}).get("advantages") or []
    given = advantages[node] if node < len(advantages) else None
    trainer = trainer_logprobs(trace, trained)[node]
    behaviour = spread(record["logprobs"], mask)
    gap = [
        t - b if t is not None and b is not None else None for t, b in zip(trainer, behaviour, strict=True)
    ]
    shown = slice(0, MOST_TOKENS)
    return {
        "ids": ids[shown],
        "texts": [text_of(token) for token in ids[shown]],
        "mask": [int(bool(flag)) for flag in mask[shown]],
        "logprobs": behaviour[shown],
        "advantages": spread(given, mask)[shown],
        "trainer": trainer[shown],
        "gap": gap[shown],
        "left_out": max(0, len(ids) - MOST_TOKENS),
    }


def expand(values: Any, length: int) -> list[Any]:
    """A list of `length` from a list, or from the one value that stands for equal ones."""
    return list(values) if isinstance(values, list) else [values] * length


def spread(values: Any, mask: Sequence[Any]) -> Column:
    """One entry a token from one entry a sampled token (or one value for all of them); None elsewhere."""
    if values is None or values == []:
        return [None] * len(mask)
    given = iter(expand(values, sum(map(bool, mask))))
    return [next(given, None) if flag else None for flag in mask]


def trainer_logprobs(trace: dict[str, Any], trained: Sequence[dict[str, Any]]) -> list[Column]:
    """The trainer's logprobs, per message and token.

    A sample is a branch, cut where it was too long. A message that branches share is trained in the first
    of them only, and the first token of a branch never: what is not trained has no logprob here.
    """
    nodes = trace["nodes"]
    columns: list[Column] = [[None] * len(node["token_ids"]) for node in nodes]
    left, seen = list(trained), set()
    for branch in trace["branches"]:
        places = [
            (node, at, at == 0 and node == branch[0]) for node in branch for at in range(len(columns[node]))
        ]
        masks = {node: expand(nodes[node]["mask"], len(columns[node])) for node in branch}
        members = [bool(masks[n][at]) and n not in seen and not first for n, at, first in places]
        sample = next((line for line in left if _is_sample(line, members)), None)
        if sample is None:
            continue
        left.remove(sample)
        seen.update(branch)
        values = iter(sample["logprobs"])
        for (node, at, _), member in zip(places[: sample["tokens"]], members, strict=False):
            if member:
                columns[node][at] = next(values, None)
    return columns


def _is_sample(line: dict[str, Any], members: Sequence[bool]) -> bool:
    tokens = line["tokens"]
    return tokens <= len(members) and sum(members[:tokens]) == len(line["logprobs"]) > 0


def token_text(model: dict[str, Any] | None) -> tuple[Callable[[int], str], bool]:
    """(text of a token id, whether a tokenizer is known) for the model table of a config.

    Where the model is not on this machine (a copied run) an id stands for itself.
    """
    path = _tokenizer_file(model or {})
    if path is None:
        return (lambda token: f"⟨{token}⟩"), False
    tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
    return (lambda token: tokenizer.decode([token], skip_special_tokens=False) or f"⟨{token}⟩"), True


def _tokenizer_file(model: dict[str, Any]) -> Path | None:
    try:
        place = resolve_model_path(ModelConfig(name=str(model.get("name")), path=model.get("path")))
    except (ValueError, OSError):
        return None
    path = place / "tokenizer.json"
    return path if path.is_file() else None


@lru_cache(maxsize=4)
def _tokenizer(path: Path, changed: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
