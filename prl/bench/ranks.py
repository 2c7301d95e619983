"""`prl bench trainer ranks=1,2`: the same cases on several numbers of ranks, and how well they scale."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prl.bench.words import write_results

WORDS = ("ranks=", "cluster.train_ranks=")
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0

Result = dict[str, Any]


def run_groups(words: Sequence[str], numbers: Sequence[int], json_path: Path | None) -> int:
    """The benchmark once for each number of ranks, one after the other; the worst exit code.

    Results of all groups go to `json_path`, those of several numbers with `efficiency` beside one rank.
    """
    results: list[Result] = []
    rest = [word for word in words if not word.startswith(WORDS)]
    with tempfile.TemporaryDirectory() as scratch:
        for number in numbers:
            found = Path(scratch) / f"ranks_{number}.json"
            code = start_ranks(_command([*rest, f"ranks={number}", "--json", str(found)]), number)
            results += json.loads(found.read_text()) if found.is_file() else []
            compare(results)
            write_results(json_path, results)
            if code:
                return code
    if len(numbers) > 1:
        print("\n".join(scaling_table(results)), flush=True)
    return 0


def start_ranks(command: Callable[[int], list[str]], ranks: int) -> int:
    """`command(rank)` for each rank, told so by the usual variables; the first exit code that is not 0.

    When a rank fails the others are ended: they would wait for it in a collective.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(command(rank), env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        return _first_failure(processes)
    finally:
        _end(processes)


def _command(words: list[str]) -> Callable[[int], list[str]]:
    return lambda rank: [sys.executable, "-m", "prl", "bench", "trainer", *words]


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [abs(code) for code in codes if code]
        if failed or None not in codes:
            return failed[0] if failed else 0
        time.sleep(POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def compare(results: Sequence[Result]) -> None:
    """Give every measured case the `efficiency` of its ranks: tokens/s of a rank over that of one rank alone.

    The work of a rank is the same in both (each rank has rows of its own), so 1.0 is perfect.
    """
    alone = {_case(r): r["tok_s_rank"] for r in results if r["ranks"] == 1 and "tok_s_rank" in r}
    for result in results:
        if "tok_s_rank" in result and (base := alone.get(_case(result))):
            result["efficiency"] = result["tok_s_rank"] / base


def scaling_table(results: Sequence[Result]) -> list[str]:
    """One line a case and number of ranks, for those that ran on several."""
    lines = [f"{'ranks':>5}{'tok/s a rank':>14}{'efficiency':>12}{'GiB':>8}  case"]
    for result in (r for r in results if "efficiency" in r):
        numbers = f"{result['ranks']:>5}{result['tok_s_rank']:>14,.0f}{100 * result['efficiency']:>10.1f} %"
        lines.append(f"{numbers}{result['peak_gib']:>8.1f}  {_title(result)}")
    return lines


def _title(result: Result) -> str:
    changed = [f"{key.rpartition('.')[2]}={value}" for key, value in _overrides(result).items()]
    return " ".join([result["model"], f"{result['seq_len']} x {result['micro_batches']}", *changed])


def _case(result: Result) -> str:
    own = {key: result[key] for key in ("model", "seq_len", "docs", "micro_batches", "engine")}
    return json.dumps([own, _overrides(result)], sort_keys=True)


def _overrides(result: Result) -> dict[str, str]:
    return {key: value for key, value in result["overrides"].items() if key != "cluster.train_ranks"}
