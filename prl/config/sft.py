"""Schema of what only `prl sft` has: its data, validation and export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prl.config.fields import opt


@dataclass
class LossMaskConfig:
    """Which roles are learned. The assistant's tokens include its end of turn, the others' content only."""

    system: bool = opt(False, "Learn the content of system messages.")
    user: bool = opt(False, "Learn the content of user messages.")
    assistant: bool = opt(True, "Learn what the assistant emits, with its end-of-turn token.")
    tool: bool = opt(False, "Learn the content of tool results.")


@dataclass
class ColumnsConfig:
    """Names of the columns in the data."""

    messages: str = opt("messages", "List of turns; wins over prompt and completion.")
    prompt: str = opt("prompt", "Text of the user, or a list of turns.")
    completion: str = opt("completion", "Text of the assistant, or a list of turns.")
    tools: str = opt("tools", "Function schemas: a list, or JSON text of one.")
    renderer: dict[str, str] = opt(
        factory=lambda: {"reasoning_effort": "reasoning_effort"},
        doc="Option of the renderer: column with its value for this row (null = the renderer's own).",
        replaced=True,
    )


@dataclass
class SftDataConfig:
    """What every kind of training data has."""

    name: str = opt(doc="Which data.")
    batch_size: int = opt(
        32,
        "Per step, all ranks together: rows (packing=cat), documents (stack) or samples (fit).",
        ge=1,
    )
    micro_batch_size: int = opt(
        1, "cat: a row holds so many times seq_len tokens; stack: so many documents.", ge=1
    )
    packing: str = opt(
        "cat",
        "cat: fill rows, carry over what does not fit; stack: documents of like length; "
        "fit: exactly batch_size samples a step, every rank reads all.",
        choices=("cat", "stack", "fit"),
    )
    seed: int | None = opt(None, "Seed of the order; null = the run's seed.", ge=0, lt=2**31)
    workers: int = opt(1, "Processes per rank that tokenise ahead; 0 = the trainer does it.", ge=0)
    loss_mask: LossMaskConfig = opt(factory=LossMaskConfig, doc="Which roles are learned.")


@dataclass
class WarmStartDataConfig(SftDataConfig):
    """Generated answers to the tiny model's tasks, most of them without the format that RL then teaches."""

    name: str = "warm_start"
    packing: str = opt("fit", "See `packing` of the other data.", choices=("cat", "stack", "fit"))
    workers: int = opt(0, "Processes per rank that tokenise ahead; 0 = the trainer does it.", ge=0)
    format_share: float = opt(0.3, "Share of the answers that carry the format.", ge=0, le=1)
    arithmetic_share: float = opt(0.15, "Share of sums among the tasks.", ge=0, le=1)


@dataclass
class RowsDataConfig(SftDataConfig):
    """Rows of conversations from files, folders or the Hugging Face hub."""

    name: str = "rows"
    path: str = opt(
        doc="File or pattern (.jsonl .json .parquet .arrow), folder, Hugging Face name, or bundled:<name>."
    )
    revision: str | None = opt(None, "Revision of a Hugging Face dataset.")
    subsets: list[str] | None = opt(
        None, "Configurations of a Hugging Face dataset, or folders below `path`, to be mixed."
    )
    splits: list[str] | None = opt(None, "Splits to be mixed; null = train, or all where there are none.")
    probabilities: list[float] | None = opt(
        None, "Share of each subset or split; null = they take turns.", gt=0, le=1
    )
    stopping: str = opt(
        "all_exhausted",
        "An epoch of a mixture ends when all parts, or the first of them, were seen.",
        choices=("all_exhausted", "first_exhausted"),
    )
    shuffle: bool = opt(True, "Shuffle each epoch, by seed + epoch.")
    columns: ColumnsConfig = opt(factory=ColumnsConfig, doc="Names of the columns.")


@dataclass
class FakeDataConfig(SftDataConfig):
    """Tokens without meaning, to measure and to test the plumbing."""

    name: str = "fake"
    workers: int = opt(0, "Processes per rank that tokenise ahead; 0 = the trainer does it.", ge=0)
    length: str = opt("fixed", "Whole rows, or any length up to them.", choices=("fixed", "variable"))
    tokens: str = opt("increasing", "Which ids.", choices=("increasing", "random"))


@dataclass
class ValConfig:
    """Validation: a full pass over `data` without learning."""

    data: Any = opt(None, "What is validated on: `data@val.data=<option>`; null = no validation.")
    interval: int = opt(50, "Validate every so many steps, and after the last.", ge=1)
    at_start: bool = opt(False, "Also before the first step.")


@dataclass
class SftExportConfig:
    """The result as a model directory."""

    at_end: bool = opt(False, "Write `weights/` of the run after the last step, for `from_pretrained`.")
