"""Documents: samples as tokens with a mask of what is learned, each a pure function of its index."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from prl.config.sft import FakeDataConfig, RowsDataConfig, SftDataConfig, WarmStartDataConfig
from prl.config.training import ModelConfig
from prl.sft.conversation import read_row
from prl.sft.files import open_rows
from prl.sft.generated import FakeDocuments, WarmStart
from prl.sft.mixture import Order
from prl.sft.tokens import ConversationRenderer, Tokens


class Document(NamedTuple):
    """Sample `index` of the run: where it comes from, its tokens, and which of them are learned.

    `part` is its subset and split, `name` the row in it. `truncated`: it was cut at `seq_len`.
    """

    index: int
    part: str
    name: str
    token_ids: list[int]
    mask: list[bool]
    truncated: bool = False

    @property
    def trainable(self) -> bool:
        return any(self.mask)


class Documents(Protocol):
    """Documents by index, without end. `size`: how many make an epoch; None where nothing repeats."""

    size: int | None
    parts: list[str]

    def document(self, index: int) -> Document:
        """Raises ValueError naming the row when it is bad."""


def build_documents(data: SftDataConfig, model: ModelConfig, seq_len: int, seed: int) -> Documents:
    """The documents that a config names, cut at `seq_len`. Raises ValueError if they cannot be read."""
    seed = seed if data.seed is None else data.seed
    if isinstance(data, FakeDataConfig):
        return FakeAsDocuments(FakeDocuments(data, model, seq_len, seed))
    renderer = ConversationRenderer(model, data.loss_mask, seq_len)
    if isinstance(data, WarmStartDataConfig):
        return WarmStartDocuments(WarmStart(data, seed), renderer)
    if isinstance(data, RowsDataConfig):
        return RowDocuments(data, renderer, seed)
    raise ValueError(f"data.name={data.name}: prl has no such data")


class RowDocuments:
    """Rows of files and data sets."""

    def __init__(self, config: RowsDataConfig, renderer: ConversationRenderer, seed: int) -> None:
        self._config, self._renderer = config, renderer
        pairs = part_pairs(config)
        self._rows = [open_rows(config, subset, split) for subset, split in pairs]
        named = ["/".join(filter(None, pair)) for pair in pairs]
        self.parts = named if len(named) > 1 else [config.name]
        self._order = Order(
            [len(rows) for rows in self._rows],
            seed=seed,
            shuffle=config.shuffle,
            probabilities=config.probabilities,
            stopping=config.stopping,
        )
        self.size: int | None = len(self._order)

    def document(self, index: int) -> Document:
        part, number = self._order.place(index)
        try:
            row = self._rows[part][number]
            tokens = self._renderer.render(read_row(row, self._config.columns))
        except ValueError as error:
            of = f" of {self.parts[part]}" if len(self.parts) > 1 else ""
            raise ValueError(f"data.path={self._config.path}: row {number}{of}: {error}") from error
        return _document(index, self.parts[part], f"{self.parts[part]}:{number}", tokens)


class WarmStartDocuments:
    """Generated answers to the tiny model's tasks."""

    size: int | None = None

    def __init__(self, source: WarmStart, renderer: ConversationRenderer) -> None:
        self._source, self._renderer = source, renderer
        self.parts = ["warm_start"]

    def document(self, index: int) -> Document:
        conversation = self._source.conversation(index)
        return _document(
            index, "warm_start", conversation.messages[0]["content"], self._renderer.render(conversation)
        )


class FakeAsDocuments:
    """Tokens without meaning."""

    size: int | None = None

    def __init__(self, source: FakeDocuments) -> None:
        self._source = source
        self.parts = ["fake"]

    def document(self, index: int) -> Document:
        return _document(index, "fake", f"fake:{index}", self._source.tokens(index))


def part_pairs(config: RowsDataConfig) -> list[tuple[str | None, str | None]]:
    """(subset, split) of each part; a single one goes with every entry of the other list."""
    subsets: list[str | None] = list(config.subsets or [None])
    splits: list[str | None] = list(config.splits or [None])
    length = max(len(subsets), len(splits))
    subsets = subsets * length if len(subsets) == 1 else subsets
    splits = splits * length if len(splits) == 1 else splits
    return list(zip(subsets, splits, strict=True))


def _document(index: int, part: str, name: str, tokens: Tokens) -> Document:
    return Document(index, part, name, tokens.token_ids, tokens.mask, tokens.truncated)
