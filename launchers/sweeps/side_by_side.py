"""Elements of a local sweep side by side: a bounded number of processes, each with its share of the GPUs."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import launchers
from launchers.placement import visible_gpus
from launchers.sweep import SWEEP_VAR
from launchers.sweeps.book import Record

STOP_SECONDS = 60.0
"""What a run may take to end after SIGTERM; it then has ended its own processes long since."""


class Runnable(Protocol):
    """What is needed of an element (`launchers.sweeps.element.Element`)."""

    sweep: Path

    def words(self, overrides: Sequence[str], number: int) -> list[str]: ...

    def note(
        self, number: int, overrides: Sequence[str], code: int, *, log: str | None = None
    ) -> float | None: ...

    def finished(self, number: int) -> Record | None: ...


def run_all(element: Runnable, numbered: Mapping[int, list[str]], slots: int) -> dict[int, float | None]:
    """Run each element that is not finished, `slots` at a time; the objective of each, None where it failed.

    On KeyboardInterrupt every run that is at work is told to end, and waited for.
    """
    values = {number: known.objective for number in numbered if (known := element.finished(number))}
    free: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
    for share in shares(visible_gpus(os.environ), slots):
        free.put(share)
    running: set[subprocess.Popen[bytes]] = set()
    over = threading.Event()

    def run(number: int) -> None:
        gpus = free.get()
        try:
            if not over.is_set():
                values[number] = _run(element, number, numbered[number], gpus, running)
        finally:
            free.put(gpus)

    with ThreadPoolExecutor(slots) as pool:
        todo = [pool.submit(run, number) for number in numbered if number not in values]
        try:
            for future in todo:
                future.result()
        except KeyboardInterrupt:
            over.set()
            for process in list(running):
                process.send_signal(signal.SIGTERM)
            raise
    return values


def shares(gpus: list[str], slots: int) -> list[list[str] | None]:
    """GPUs of each slot, as even as they go; None where there are none to share, so nothing is hidden."""
    if not gpus:
        return [None] * slots
    return [gpus[slot * len(gpus) // slots : (slot + 1) * len(gpus) // slots] for slot in range(slots)]


def _run(
    element: Runnable,
    number: int,
    overrides: list[str],
    gpus: list[str] | None,
    running: set[subprocess.Popen[bytes]],
) -> float | None:
    log = element.sweep / "logs" / f"{number}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    root = str(Path(launchers.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, SWEEP_VAR: str(element.sweep), "PYTHONPATH": path}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    words = [sys.executable, "-m", "prl", *element.words(overrides, number)]
    print(f"element {number} begins: {' '.join(overrides)}; log in {log}", flush=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    running.add(process)
    try:
        code = process.wait()
    finally:
        running.discard(process)
    if code in (130, 143):
        return None
    value = element.note(number, overrides, code if code >= 0 else 128 - code, log=str(log))
    print(f"element {number} ended with exit code {code}", flush=True)
    return value if code == 0 else None
