"""A `prl inference` of its own for a measurement, and what its directory says about it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from prl.run_dir import RunDir

READY_SECONDS = 1800.0


@contextlib.contextmanager
def serving(model: Path, overrides: Sequence[str], scratch: Path, gpus: str | None = None) -> Iterator[str]:
    """Start a server of the random weights of `model`; its URL without /v1. It is stopped at the end.

    `gpus`: CUDA ids that it may see; None = as this process. Raises RuntimeError, with the end of its log,
    when it does not come up.
    """
    run = RunDir(scratch / f"server-{uuid.uuid4().hex[:8]}")  # an earlier one left its address
    words = [
        *("inference", "model.name=bench", f"model.path={model}", "model.random_init=true"),
        *(f"run.name={run.path.name}", f"output_dir={scratch}", "inference.port=0"),
        *(f"inference.ready_timeout={READY_SECONDS}", *overrides),
    ]
    environment = dict(os.environ)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    process = subprocess.Popen(
        [sys.executable, "-m", "prl", *words], env=environment, stdout=subprocess.DEVNULL
    )
    try:
        yield _address(run, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _address(run: RunDir, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if run.address_file("inference").exists():
            return run.wait_for_address_blocking("inference", 1.0)
        time.sleep(0.2)
    log = run.log_file("inference")
    raise RuntimeError(f"no server: {log.read_text()[-3000:] if log.exists() else 'see the lines above'}")
