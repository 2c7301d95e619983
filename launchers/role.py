"""`python -m launchers.role <role> <resolved.yaml>`: one process of a run."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prl.config.load import load_resolved
from prl.log_lines import configure, log_uncaught
from prl.monitor.companions import serve_metrics
from prl.run_dir import RunDir

log = logging.getLogger("launchers.role")

LAUNCHER_VAR = "PRL_LAUNCHER_PID"
PR_SET_PDEATHSIG = 1

ENTRY_POINTS = {
    "inference": "prl.inference.server",
    "teacher": "prl.inference.server",
    "env": "prl.env.server",
    "orchestrator": "prl.orchestrator.main",
    "trainer": "prl.trainer.main",
    "sft": "prl.sft.main",
    "evals": "prl.sft.evals",
    "eval": "prl.evals.main",
}
"""First part of a role's name -> module whose `main(config, run, role)` is the process."""

RANKS = ("trainer", "sft")
"""Roles that train. DeepSpeed keeps their process groups alive. A thread of one that drops the last hold on
a tensor asks for the interpreter; if that is just ending, the process aborts though all its work is done."""


def main(arguments: list[str]) -> int:
    """Exit status of the role: 0 when it ended well; an unhandled exception ends the process with 1."""
    if len(arguments) != 2:
        raise SystemExit("usage: python -m launchers.role <role> <resolved.yaml>")
    role, resolved = arguments[0], Path(arguments[1])
    prepare_process()
    command, config = load_resolved(resolved)
    configure(config.log, role)
    log.debug("%s of %s: pid %d, %s", role, command, os.getpid(), resolved)
    try:
        run = RunDir.from_resolved(resolved)
        serve_metrics(config, run, role)
        entry_point(role)(config, run, role)
    except Exception:
        log.exception("%s failed", role)
        end_now(1)
    if role.partition("/")[0] in RANKS:
        end_now(0)
    return 0


def prepare_process() -> None:
    """Die with the launcher, survive SLURM's warning signal, tell where a crash in C code happened."""
    # SLURM sends it to every process of a step; only the launcher answers, the default action would kill.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    faulthandler.enable()
    launcher = os.environ.get(LAUNCHER_VAR)
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        raise SystemExit("the launcher is gone")


def entry_point(role: str) -> Callable[[Any, RunDir, str], None]:
    """The function that is this role. Raises ValueError for a name that is in no placement."""
    kind = role.partition("/")[0]
    if kind not in ENTRY_POINTS:
        raise ValueError(f"role {role!r} is unknown; roles are {', '.join(ENTRY_POINTS)}")
    return importlib.import_module(ENTRY_POINTS[kind]).main


def end_now(code: int) -> None:
    """Leave without waiting for threads and exit handlers, which may hang, or abort the process."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    log_uncaught()
    sys.exit(main(sys.argv[1:]))
