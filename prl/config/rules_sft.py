"""Rules of `prl sft`: its data, how it is packed, and what the renderer can tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.config import rules_serving
from prl.config.errors import Problem, suggest
from prl.config.schema import SftConfig
from prl.config.sft import RowsDataConfig, SftDataConfig


def datasets_of(config: SftConfig) -> Iterator[tuple[str, Any]]:
    """(path in the config, data) of what is trained and validated on."""
    yield "data", config.data
    if config.val.data is not None:
        yield "val.data", config.val.data


def batches_fit_the_ranks(config: SftConfig) -> Iterator[Problem]:
    data, ranks = config.data, config.cluster.train_ranks // config.trainer.sequence_parallel
    unit = data.micro_batch_size * ranks
    if data.packing != "fit" and data.batch_size % unit:
        shared = " / trainer.sequence_parallel" if config.trainer.sequence_parallel > 1 else ""
        reason = f"not a multiple of data.micro_batch_size * cluster.train_ranks{shared} = {unit}"
        involves = ("data.micro_batch_size", "cluster.train_ranks")
        yield Problem("data.batch_size", data.batch_size, reason, f"Write {_next(data, unit)}.", involves)
    if data.packing == "fit" and data.micro_batch_size != 1:
        reason = "packing=fit makes rows of trainer.seq_len"
        yield Problem(
            "data.micro_batch_size",
            data.micro_batch_size,
            reason,
            "Choose data.packing=cat.",
            ("data.packing",),
        )


def parts_have_the_same_length(config: SftConfig) -> Iterator[Problem]:
    for path, data in datasets_of(config):
        if not isinstance(data, RowsDataConfig):
            continue
        for key in ("subsets", "splits", "probabilities"):
            if getattr(data, key) == []:
                yield Problem(f"{path}.{key}", [], "an empty list names nothing", "Write null for all.")
        lengths = {key: len(getattr(data, key) or []) for key in ("subsets", "splits")}
        parts = max(*lengths.values(), 1)
        if min(lengths.values()) > 1 and len(set(lengths.values())) > 1:
            reason = f"{lengths['splits']} splits for {lengths['subsets']} subsets"
            yield Problem(
                f"{path}.splits",
                data.splits,
                reason,
                "Give one for each, or one for all.",
                (f"{path}.subsets",),
            )
        elif data.probabilities and len(data.probabilities) != parts:
            reason = f"{len(data.probabilities)} shares for {parts} subsets or splits"
            yield Problem(f"{path}.probabilities", data.probabilities, reason)


def data_is_there(config: SftConfig) -> Iterator[Problem]:
    """Looks for local data without opening it; names of the hub are asked for when the run starts."""
    for path, data in datasets_of(config):
        if isinstance(data, RowsDataConfig) and (fault := _missing(data.path)):
            yield Problem(f"{path}.path", data.path, *fault)


def something_is_learned(config: SftConfig) -> Iterator[Problem]:
    for path, data in datasets_of(config):
        mask = data.loss_mask
        if not (mask.system or mask.user or mask.assistant or mask.tool):
            yield Problem(f"{path}.loss_mask", NOTHING, "no role is learned", "Set one of its roles to true.")
    if config.model.renderer == "default":
        reason = "it wraps a chat template, which does not tell which tokens are the assistant's"
        yield Problem("model.renderer", "default", reason, "Name the model's family, or chatml.")


def validation_ends(config: SftConfig) -> Iterator[Problem]:
    data = config.val.data
    if data is not None and not isinstance(data, RowsDataConfig):
        reason = "it has no end, so there is no full pass over it"
        yield Problem("val.data.name", data.name, reason, "Choose data@val.data=rows and set val.data.path.")
    if data is None and config.val.at_start:
        yield Problem(
            "val.at_start", True, "there is nothing to validate on", "Choose data@val.data=<option>."
        )


def evaluations_are_served(config: SftConfig) -> Iterator[Problem]:
    """What concerns the engine counts only where there is one."""
    if not config.eval.env:
        return
    for rule in rules_serving.RULES:
        yield from rule(config)
    if config.sync.name != "filesystem":
        reason = "evaluations of `prl sft` read weights from files, so that training need not wait for them"
        yield Problem("sync", config.sync.name, reason, "Choose sync=filesystem.")
    if not config.eval.pin_version:
        reason = "an epoch of `prl sft` is always of one version"
        yield Problem("eval.pin_version", False, reason, "Remove it.")


def _missing(path: str) -> tuple[str, str] | None:
    """(reason, remedy) if `path` can only be local and is not there."""
    from prl.assets import ROOT

    if not path.strip():
        return "a file, a folder or a name is needed", ""
    if path.startswith("bundled:"):
        shipped = sorted(entry.name for entry in (ROOT / "data").iterdir() if entry.is_dir())
        name = path.removeprefix("bundled:")
        return None if name in shipped else ("prl ships no such data", suggest(name, shipped))
    local = path.startswith(("/", "./", "../", "~")) or Path(path).suffix in (
        ".jsonl",
        ".json",
        ".parquet",
        ".arrow",
    )
    if not local or "*" in path or Path(path).expanduser().exists():
        return None
    return "no such file or folder", "Hugging Face names have the form owner/name."


def _next(data: SftDataConfig, unit: int) -> int:
    """The nearest batch size that fits, at least one row for each rank."""
    return max(round(data.batch_size / unit), 1) * unit


NOTHING = "all false"

RULES = [
    batches_fit_the_ranks,
    parts_have_the_same_length,
    data_is_there,
    something_is_learned,
    validation_ends,
    evaluations_are_served,
]
