"""How long the parts of a training step take, by marks in the stream of work: nothing waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

PHASES = ("forward", "head", "backward", "optimizer")


class Phases:
    """Watches an engine's layers, LM head, backward and update from outside.

    Marks are CUDA events on a GPU, clock readings on a CPU. `rest` is what lies between the phases: loading
    rows, the loss, statistics. The head's own backward, and recomputation, belong to `backward`.
    """

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []
        self._whole: Any = None
        self._steps: list[dict[str, float]] = []
        self._in_backward = False
        self._watch_module("forward", engine.model.base_model)
        self._watch_module("head", engine.model.get_output_embeddings())
        engine.backward = self._watched("backward", engine.backward)
        engine.step = self._watched("optimizer", engine.step)

    def clear(self) -> None:
        """Begin a step."""
        self._marks = []
        self._whole = self._mark()

    def close_step(self, keep: bool) -> None:
        """End a step whose work is done; its times are kept or forgotten."""
        whole = self._seconds(self._whole, self._mark())
        found = dict.fromkeys(PHASES, 0.0)
        for name, start, end in self._marks:
            found[name] += self._seconds(start, end)
        if keep:
            self._steps.append(found | {"rest": whole - sum(found.values())})

    def mean(self) -> dict[str, float]:
        """Mean seconds of each phase over the kept steps."""
        return {name: sum(step[name] for step in self._steps) / len(self._steps) for name in self._steps[0]}

    def _watch_module(self, name: str, module: torch.nn.Module) -> None:
        starts: list[Any] = []

        def before(*_: Any) -> None:
            starts.append(self._mark())

        def after(*_: Any) -> None:
            start = starts.pop()
            if not self._in_backward:
                self._marks.append((name, start, self._mark()))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            start, self._in_backward = self._mark(), True
            try:
                return call(*args)
            finally:
                self._in_backward = False
                self._marks.append((name, start, self._mark()))

        return watched

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if not self._on_gpu:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3
