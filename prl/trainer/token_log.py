"""The trainer's own logprobs of some trained traces, beside the sampler's: what a token overlay compares."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from torch import Tensor

from prl.loss.batch import MicroBatchTensors
from prl.run_dir import RunDir
from prl.tracking.stream import JsonLines

DECIMALS = 5


class TokenLog:
    """Appends to `traces/trainer_<rank>.jsonl` one line a sample of the first `traces` traces of each step.

    A line has `trace`, `step`, `attempt`, `tokens` (the sample's length) and `logprobs`, one a sampled
    token, on the weights before the step. The device is not waited for until `write`.
    """

    def __init__(self, path: Path, traces: int, attempt: int) -> None:
        self._lines = JsonLines(path)
        self._traces = traces
        self._attempt = attempt
        self._noted: list[tuple[MicroBatchTensors, Tensor]] = []
        self._chosen: set[str] = set()

    def note(self, row: MicroBatchTensors, logprobs: Tensor) -> None:
        """Keep the logprobs [n] of a row, if traces are wanted still."""
        fresh = [trace for trace in row.trace_ids if trace and trace not in self._chosen]
        room = self._traces - len(self._chosen)
        self._chosen.update(dict.fromkeys(fresh[:room]))
        if self._chosen.intersection(row.trace_ids):
            self._noted.append((row, logprobs.detach()[row.sampled["all"]]))

    def write(self, step: int) -> None:
        """Write what was noted in step `step`."""
        noted, self._noted = self._noted, []
        for row, values in noted:
            self._write_row(row, values, step)
        self._chosen.clear()

    def close(self) -> None:
        self._lines.close()

    def _write_row(self, row: MicroBatchTensors, values: Tensor, step: int) -> None:
        positions, numbers = row.sampled["all"].tolist(), values.tolist()
        ends = list(accumulate(row.sequence_lengths))
        for trace, size, end in zip(row.trace_ids, row.sequence_lengths, ends, strict=True):
            own = [
                round(number, DECIMALS)
                for position, number in zip(positions, numbers, strict=True)
                if end - size <= position < end
            ]
            if own and trace in self._chosen:
                head = {"trace": trace, "step": step, "attempt": self._attempt, "tokens": size}
                self._lines.append({**head, "logprobs": own})


def open_token_log(run: RunDir, rank: int, traces: int) -> TokenLog | None:
    """The log of this rank; None where no trace is wanted."""
    return TokenLog(run.traces / f"trainer_{rank}.jsonl", traces, run.attempt) if traces else None
