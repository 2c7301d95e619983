"""One save at a time beside the training: a thread that writes a snapshot, and tells if it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class BackgroundSaver:
    """Runs `work(group)` in a thread; the process group is its own, so that training does not meet it.

    Collective: all ranks start and wait for the same saves. Errors of the thread are raised by `wait` or
    `check`, whichever comes first.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[Any], None]) -> None:
        """Wait for the save before, then begin this one."""
        self.wait()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, args=(work, device), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being saved. Raises what the save raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what a save raised, without waiting for one that is not done."""
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"a checkpoint could not be saved: {error}") from error

    def _run(self, work: Callable[[Any], None], device: int | None) -> None:
        try:
            if device is not None:  # a thread begins on the first GPU, whichever its process has
                torch.cuda.set_device(device)
            work(self._group)
        except BaseException as error:
            self._error = error
