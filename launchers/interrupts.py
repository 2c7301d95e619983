"""Signals that end a run become a request that the supervisor answers at its next look."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Context manager of the main thread. `signum` is the first signal that came, `count` how many did.

    A second signal means: at once. SIGHUP stays ignored where the caller ignores it (nohup). `warned` tells
    that SLURM's warning came: it ends nothing by itself, and only counts with `warning=True`.
    """

    def __init__(self, warning: bool = False) -> None:
        self.signum: int | None = None
        self.count = 0
        self.warned = False
        self._warning = warning
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for signum in SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)
        if self._warning:
            self._previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._note_warning)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @property
    def urgent(self) -> bool:
        """Whether someone asked twice."""
        return self.count > 1

    def since_now(self) -> Callable[[], bool]:
        """A question: has another signal come since this call?"""
        seen = self.count
        return lambda: self.count > seen

    def _note_warning(self, signum: int, frame: FrameType | None) -> None:
        self.warned = True

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        self.count += 1
