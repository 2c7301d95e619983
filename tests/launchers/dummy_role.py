"""A stand-in for a role: `dummy_role.py <behaviour> [argument]`. Starts in milliseconds, knows no prl."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def serve() -> None:
    """A well-behaved server: until SIGTERM, then exit 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("serving", flush=True)
    while True:
        time.sleep(60)


def stubborn() -> None:
    """Hears no SIGTERM, nor does its child, which lives in a session of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    serve_forever()


SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def family(pid_file: str) -> None:
    """A server whose worker has a worker; writes all their pids."""
    worker = subprocess.Popen([sys.executable, "-S", __file__, "worker"], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    pids = [os.getpid(), worker.pid, int(worker.stdout.readline())]
    Path(f"{pid_file}.tmp").write_text(json.dumps(pids))
    Path(f"{pid_file}.tmp").replace(pid_file)
    serve()


def worker() -> None:
    print(subprocess.Popen(SLEEP).pid, flush=True)
    serve_forever()


def serve_forever() -> None:
    while True:
        time.sleep(60)


def work(seconds: str) -> None:
    """A job that is done after so many seconds."""
    time.sleep(float(seconds))


def fail(code: str) -> None:
    print("some output")
    print("the reason is this", file=sys.stderr, flush=True)
    sys.exit(int(code))


def steps(run: str) -> None:
    """A job that writes one metric line of each producer per tenth of a second, without end."""
    metrics = Path(run) / "metrics"
    metrics.mkdir(exist_ok=True)
    for step in range(1, 10_000):
        line = {"producer": "orchestrator", "step": step, "time": time.time()}
        append(metrics, "orchestrator", {**line, "train/agg/effective/agent/reward/mean": step / 100})
        append(metrics, "trainer", {**line, "producer": "trainer", "optim/lr": 1e-4})
        time.sleep(0.1)


def append(metrics: Path, producer: str, line: dict) -> None:
    with (metrics / f"{producer}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
