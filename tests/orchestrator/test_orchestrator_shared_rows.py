"""Ranks that share rows are sent the same ones, each under its own number."""

from __future__ import annotations

from prl.config.compose import compose_job
from prl.orchestrator.assemble import _packer
from prl.orchestrator.wire import decode_shipment
from prl.records import TrainSample


def sample(size: int, name: str) -> TrainSample:
    mask = [False] + [True] * (size - 1)
    return TrainSample(
        list(range(size)), mask, [-0.1 * m for m in mask], [1.0] * size, "env", name,
        advantages=[0.5 * m for m in mask],
    )  # fmt: skip


def test_neighbours_get_the_same_rows() -> None:
    lines = ["cluster.train_ranks=4", "trainer.sequence_parallel=2", "trainer.seq_len=16"]
    pack = _packer(compose_job("rl", lines))
    shipments = [decode_shipment(m) for m in pack(7, [sample(n, f"t{n}") for n in (5, 9, 12, 3)])]
    assert [(s.step, s.rank) for s in shipments] == [(7, 0), (7, 1), (7, 2), (7, 3)]
    first, again, second, third = (s.micro_batches for s in shipments)
    assert first == again and second == third and first != second
    traces = sorted(trace for rows in (first, second) for row in rows for trace in row.trace_ids)
    assert traces == ["t12", "t3", "t5", "t9"]
