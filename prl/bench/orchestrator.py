"""`prl bench orchestrator`: what prl adds to verifiers per rollout, with an engine that only waits.

Each line is measured twice on one environment server: by verifiers' client alone, and by the whole
orchestrator (dispatcher, scoring, samples, packing, traces, metrics). Both are measured in the steady state.
Columns: rollouts a second; CPU milliseconds per rollout of bare verifiers (server and client), of the server
under prl, and of prl's own (orchestrator minus bare client); lag of the event loop, median/p99; memory per
rollout in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from launchers.role import LAUNCHER_VAR
from prl.config.compose import compose_job
from prl.config.load import dump_resolved
from prl.run_dir import RunDir

ENVS = {
    "single": ["env=[reverse_text]", "env.reverse_text.timeout=3600"],
    "multi": [
        "env=[word_guess]",
        "env.word_guess.taskset.num_tasks=1",
        "env.word_guess.agents.turns=4",
        "env.word_guess.timeout=3600",
    ],
}
"""Turns -> overrides; the engine finds the one word of word_guess now and then, after 3 turns on average.

One environment server is shared by all rollouts in flight, so on few cores the last of many takes long.
"""

GROUP, BATCH = 8, 64
READY_SECONDS = 300.0
FLOOR_SHARE, FLOOR_LAG = 0.15, 0.05


@dataclass
class Line:
    """One comparison. CPU in milliseconds per rollout; `share`: prl's own part of bare verifiers' CPU."""

    turns: str
    inflight: int
    rollouts: int
    bare_per_second: float
    prl_per_second: float
    verifiers_cpu_ms: float
    server_cpu_ms: float
    own_cpu_ms: float
    share: float
    bare_lag_p50_ms: float
    bare_lag_p99_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    bare_kb_per_rollout: float
    kb_per_rollout: float


def main(words: Sequence[str]) -> int:
    """Run the benchmark; 0 whatever it measures."""
    options = _parser().parse_args(list(words))
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="prl-bench-") as scratch, ExitStack() as stack:
        engine = stack.enter_context(_engine(options.latency, options.tokens))
        print(_head())
        for turns in options.turns.split(","):
            place = Path(scratch) / turns
            server, address = stack.enter_context(_server(place, turns))
            for inflight in map(int, options.in_flight.split(",")):
                rollouts = options.rollouts or 3 * inflight
                line = _compare(place, turns, inflight, rollouts, server, address, engine)
                lines.append(line)
                print(_row(line), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prl bench orchestrator", description=__doc__)
    parser.add_argument("--in-flight", default="64,256,1024", help="rollouts in flight, one line each")
    parser.add_argument("--turns", default="single,multi", help="single, multi or both")
    parser.add_argument("--latency", type=float, default=1.0, help="seconds the engine takes for an answer")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rollouts", type=int, help="measured rollouts of each line; default 3 x in flight")
    parser.add_argument("--json", metavar="PATH", help="write the lines as JSON")
    return parser


def _compare(
    place: Path, turns: str, inflight: int, rollouts: int, server: psutil.Process, address: str, engine: str
) -> Line:
    (bare, bare_server), (own, own_server) = (
        _measure(place, mode, turns, inflight, rollouts, server, address, engine) for mode in ("bare", "prl")
    )
    per_bare = 1e3 / bare["rollouts"]
    verifiers = (bare["cpu"] + bare_server) * per_bare
    own_cpu = 1e3 * own["cpu"] / own["rollouts"] - bare["cpu"] * per_bare
    return Line(
        turns=turns,
        inflight=inflight,
        rollouts=own["rollouts"],
        bare_per_second=bare["rollouts"] / bare["seconds"],
        prl_per_second=own["rollouts"] / own["seconds"],
        verifiers_cpu_ms=verifiers,
        server_cpu_ms=1e3 * own_server / own["rollouts"],
        own_cpu_ms=own_cpu,
        share=own_cpu / verifiers,
        bare_lag_p50_ms=1e3 * bare["lag_median"],
        bare_lag_p99_ms=1e3 * bare["lag_p99"],
        lag_p50_ms=1e3 * own["lag_median"],
        lag_p99_ms=1e3 * own["lag_p99"],
        bare_kb_per_rollout=(bare["bytes_at_end"] - bare["bytes_before"]) / 1024 / inflight,
        kb_per_rollout=(own["bytes_at_end"] - own["bytes_before"]) / 1024 / inflight,
    )


def _measure(
    place: Path,
    mode: str,
    turns: str,
    inflight: int,
    rollouts: int,
    server: psutil.Process,
    address: str,
    engine: str,
) -> tuple[dict[str, Any], float]:
    """(usage of the driver, CPU seconds of the environment server in the measured part)."""
    run = RunDir(place / f"{mode}-{inflight}")
    write_config(run, turns, inflight)
    module = [sys.executable, "-m", "prl.bench.orchestrator_driver"]
    warm = inflight
    command = [*module, mode, str(run.resolved_config), address, engine, str(warm), str(warm + rollouts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as driver:
        assert driver.stdout is not None
        marks: dict[str, float] = {}
        last = ""
        for text in driver.stdout:
            last = text.strip()
            if last in ("START", "STOP"):
                marks[last] = _cpu(server)
    if driver.returncode:
        raise RuntimeError(f"the {mode} driver ended with {driver.returncode}")
    return json.loads(last), marks["STOP"] - marks["START"]


def write_config(run: RunDir, turns: str, inflight: int) -> None:
    """A run whose batches never wait for anything but rollouts."""
    overrides = [
        *ENVS[turns],
        f"rollout.batch_size={BATCH}",
        f"rollout.group_size={GROUP}",
        f"rollout.max_inflight={inflight}",
        "rollout.max_off_policy_steps=100000",
        "rollout.max_fruitless_batches=null",
        "max_steps=null",
        "tracking=none",
        "inference.max_model_len=2048",
        "trainer.seq_len=2048",
        f"output_dir={run.path.parent}",
    ]
    run.resolved_config.parent.mkdir(parents=True)
    run.resolved_config.write_text(dump_resolved("rl", compose_job("rl", overrides)))


@contextmanager
def _engine(latency: float, tokens: int) -> Iterator[str]:
    command = [sys.executable, "-m", "prl.bench.scripted_engine", str(latency), str(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def _server(place: Path, turns: str) -> Iterator[tuple[psutil.Process, str]]:
    """The environment server as a run starts it."""
    run = RunDir(place / "server")
    write_config(run, turns, BATCH)
    role = f"env/{ENVS[turns][0].removeprefix('env=[').removesuffix(']')}"
    command = [sys.executable, "-m", "launchers.role", role, str(run.resolved_config)]
    with (
        (place / "server.log").open(
            "w"
        ) as log,  # it complains of every driver that leaves with work in flight
        subprocess.Popen(command, env=_environment(), stdout=log, stderr=log) as process,
    ):
        try:
            address = run.wait_for_address_blocking(role, READY_SECONDS)
            yield psutil.Process(process.pid), address
        finally:
            process.kill()


def _environment() -> dict[str, str]:
    """Environment of the processes, which end with this one however it ends."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    own = {"OMP_NUM_THREADS": "1", LAUNCHER_VAR: str(os.getpid())}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _cpu(process: psutil.Process) -> float:
    """CPU seconds of a process and its children so far."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in family)


def _head() -> str:
    columns = ("turns", "in flight", "bare/s", "prl/s", "bare ms", "server ms", "own ms", "share")
    lags = ("bare lag ms", "lag ms", "bare KB", "KB")
    return "  ".join(name.rjust(9) for name in columns) + "  " + "  ".join(name.rjust(11) for name in lags)


def _row(line: Line) -> str:
    verdict = "" if line.share <= FLOOR_SHARE else "  above the floor of 15 %"
    if line.inflight <= 256 and line.lag_p99_ms >= 1e3 * FLOOR_LAG:
        verdict += "  lag above 50 ms"
    numbers = [
        line.turns.rjust(9),
        f"{line.inflight:9}",
        *(f"{value:9.1f}" for value in (line.bare_per_second, line.prl_per_second)),
        *(f"{value:9.2f}" for value in (line.verifiers_cpu_ms, line.server_cpu_ms, line.own_cpu_ms)),
        f"{line.share:9.1%}",
        f"{line.bare_lag_p50_ms:.1f}/{line.bare_lag_p99_ms:.0f}".rjust(11),
        f"{line.lag_p50_ms:.1f}/{line.lag_p99_ms:.0f}".rjust(11),
        *(f"{value:11.0f}" for value in (line.bare_kb_per_rollout, line.kb_per_rollout)),
    ]
    return "  ".join(numbers) + verdict
