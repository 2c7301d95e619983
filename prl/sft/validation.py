"""A full pass over held-out data without learning: mean cross-entropy and its exponential."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count, takewhile

import torch

from prl.config.loss import IpoConfig
from prl.config.schema import SftConfig
from prl.config.sft import SftDataConfig
from prl.loss.batch import from_micro_batch
from prl.loss.components import compute_loss
from prl.orchestrator.packing import zero_loss_clone
from prl.records import MicroBatch
from prl.sft.documents import Document
from prl.sft.packing import Cat, as_micro_batch
from prl.sft.position import start
from prl.sft.reader import Reader
from prl.trainer.distributed import all_gather_json
from prl.trainer.engine import TrainEngine

PERPLEXITY_LIMIT = 20.0
"""Largest loss that is raised to a perplexity."""


def perplexity(loss: float) -> float:
    return math.exp(min(loss, PERPLEXITY_LIMIT))


class Validation:
    """Validates on `val.data`, every sample once over all ranks."""

    def __init__(self, config: SftConfig, engine: TrainEngine) -> None:
        self._config, self._engine = config, engine
        self._data: SftDataConfig = config.val.data

    def is_due(self, step: int) -> bool:
        """Whether to validate after `step`; step 0 is before the first."""
        if step == 0:
            return self._config.val.at_start
        return step % self._config.val.interval == 0 or step == self._config.max_steps

    def run(self) -> dict[str, float]:
        """`val/loss`, `val/perplexity` and `val/num_tokens`, the same on every rank. Collective.

        Raises ValueError for data without an end and for data without a token to learn.
        """
        engine, world = self._engine, self._engine.world
        engine.deepspeed.eval()
        total, learned, rows = 0.0, 0, 0
        last: MicroBatch | None = None
        with torch.no_grad():
            for row in self._rows():
                loss, tokens = self._one(row)
                total, learned, rows, last = total + loss, learned + tokens, rows + 1, row
            found = all_gather_json([rows, total, learned], world)[:: world.sequence]
            for _ in range(max(rank[0] for rank in found) - rows):  # ranks step together under ZeRO 3
                self._one(zero_loss_clone(last or FILLER))
        engine.deepspeed.train()
        total, learned = sum(rank[1] for rank in found), sum(rank[2] for rank in found)
        if not learned:
            raise ValueError(f"val.data={self._data.name}: no token to learn within trainer.seq_len")
        loss = total / learned
        return {"val/loss": loss, "val/perplexity": perplexity(loss), "val/num_tokens": learned}

    def _one(self, row: MicroBatch) -> tuple[float, int]:
        """(sum of the cross-entropy, learned tokens) of one row."""
        tensors = from_micro_batch(row, self._engine.device)
        logprobs, _ = self._engine.forward(
            tensors.input_ids, tensors.position_ids, tensors.temperatures, tuple(tensors.sequence_lengths)
        )
        loss, _ = compute_loss(tensors, logprobs, {"ce": 1.0}, IpoConfig())
        return float(loss), len(tensors.members["ce"])

    def _rows(self) -> Iterator[MicroBatch]:
        trainer, data = self._config.trainer, self._data
        packer = Cat(trainer.seq_len * data.micro_batch_size)
        for document in self._documents():
            if document.trainable and (row := packer.add(document)):
                yield as_micro_batch(row, data.name)
        for row in packer.flush():
            yield as_micro_batch(row, data.name)

    def _documents(self) -> Iterator[Document]:
        """The documents of this rank, each once."""
        world = self._engine.world
        position = start(world.data_rank, world.data_size)
        reader = Reader(
            self._data, self._config.model, self._config.trainer.seq_len, self._config.seed, position
        )
        size = reader.documents.size
        try:
            if size is None:
                raise ValueError(
                    f"val.data={self._data.name}: it has no end; validate on files or a hub data set"
                )
            own = takewhile(lambda index: index < size, count(world.data_rank, world.data_size))
            for _ in own:
                yield next(reader)
        finally:
            reader.close()


FILLER = MicroBatch(
    input_ids=[0, 0],
    position_ids=[0, 1],
    loss_mask=[False, False],
    advantages=[0.0, 0.0],
    inference_logprobs=[0.0, 0.0],
    temperatures=[1.0, 1.0],
    sequence_lengths=[2],
    envs=[""],
    trace_ids=[""],
)
"""What a rank without any row computes while the others do."""
