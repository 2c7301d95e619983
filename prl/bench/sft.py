"""`prl bench sft`: whole supervised steps, from reading and packing the data to the update."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prl.bench.shapes import shape_names, write_shape
from prl.bench.trainer import ALIASES, device_name, tried
from prl.bench.words import combinations, count, split_options, write_results
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors

OWN = {"model": "tiny", "data": "fake", "seq_len": "1024", "rows": "2", "steps": "4"}
"""The benchmark's own words and their defaults; `steps` counts measured steps, one more comes before them."""

USAGE = f"""python -m prl bench sft [model=SHAPE] [data=OPTION] [word=value[,value...]]... [--json PATH]

Own words: {", ".join(f"{key}={value}" for key, value in OWN.items())} (rows of a step, data.batch_size).
Shapes: {", ".join(shape_names())}, or a model directory; data other than fake needs one with a tokenizer.
Short for overrides: {", ".join(f"{key} ({path})" for key, path in ALIASES.items() if key != "ranks")}.
Any other word is an override of `prl sft`: data.packing=stack, data.workers=2, data.length=variable, zero=3.
Values that a comma separates are measured one after the other, every combination of them.
"""


@dataclass
class Case:
    """One combination: the benchmark's own values, and the overrides of the run's config."""

    model: str
    data: str
    seq_len: int
    rows: int
    steps: int
    overrides: dict[str, str]

    @property
    def label(self) -> str:
        changed = [f"{key.rpartition('.')[2]}={value}" for key, value in self.overrides.items()]
        return " ".join([f"{self.model} {self.data} {self.seq_len} x {self.rows}", *changed])


def main(words: Sequence[str]) -> int:
    """The job of `prl bench sft`; the exit code: 0, or 2 for words that make no sense."""
    options = split_options("bench sft", USAGE, words)
    if options is None:
        return 0
    json_path, rest = options
    try:
        cases = read_cases(rest)
        with tempfile.TemporaryDirectory() as scratch:
            configs = [job_config(case, Path(scratch)) for case in cases]
            results = run_cases(cases, configs, Path(scratch))
    except (ConfigErrors, ValueError) as error:
        print(f"bench sft: {error}", file=sys.stderr)
        return 2
    write_results(json_path, results)
    return 0


def read_cases(words: Sequence[str]) -> list[Case]:
    """Every combination of the comma-separated values. Raises ValueError for a word that is none."""
    cases = []
    for chosen in combinations(words, OWN):
        numbers = {key: count(key, chosen[key]) for key in ("seq_len", "rows", "steps")}
        overrides = {ALIASES.get(key, key): value for key, value in chosen.items() if key not in OWN}
        cases.append(Case(chosen["model"], chosen["data"], **numbers, overrides=overrides))
    return cases


def job_config(case: Case, scratch: Path) -> Any:
    """The checked `SftConfig` of a case. Raises ValueError for more than one rank."""
    fixed = {
        "data": case.data,
        "data.batch_size": str(case.rows),
        "model.path": str(write_shape(case.model, scratch)),
        "model.random_init": "true",
        "trainer.seq_len": str(case.seq_len),
        "tracking": "none",
        "max_steps": "null",
    }
    config = compose_job("sft", [f"{key}={value}" for key, value in (fixed | case.overrides).items()])
    if config.cluster.train_ranks != 1:
        raise ValueError("one rank only; `bench trainer ranks=N` measures several")
    return config


def run_cases(cases: Sequence[Case], configs: Sequence[Any], scratch: Path) -> list[dict[str, Any]]:
    """Measure all cases in this process, one line of the table as each is done."""
    import torch

    from prl.trainer import distributed

    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(configs[0].trainer.threads)
    world = distributed.join(0, 1, scratch / "store", configs[0].trainer.dist_timeout)
    device = device_name(world.device)
    print(f"{device}, torch {torch.__version__}; one rank", _header(), sep="\n", flush=True)
    results = []
    for case, config in zip(cases, configs, strict=True):
        result = asdict(case) | {"device": device, "torch": torch.__version__}
        result |= tried(measure, case, config, world)
        results.append(result)
        print(_line(case, result), flush=True)
    distributed.leave(world)
    return results


def measure(case: Case, config: Any, world: Any) -> dict[str, Any]:
    """Medians over `steps` steps after one that warms up."""
    from prl.sft.feed import open_feed
    from prl.sft.main import NO_POLICY_TOKENS
    from prl.sft.metrics import true_lengths
    from prl.trainer.engine import TrainEngine
    from prl.trainer.flops import model_cost, peak_flops, training_flops
    from prl.trainer.step import train_step

    engine, feed = TrainEngine(config, world, None), open_feed(config, 0, 1)
    cost, peak = model_cost(engine.model.config), peak_flops(world.device)
    steps: list[tuple[float, ...]] = []
    memory = 0.0
    for step in range(1, case.steps + 2):
        started = time.perf_counter()
        rows = feed.batch()
        waited = time.perf_counter() - started
        metrics = train_step(engine, rows, NO_POLICY_TOKENS, step)
        seconds = time.perf_counter() - started
        documents = [true_lengths(row) for row in rows]
        room = config.trainer.seq_len * config.data.micro_batch_size * len(rows)
        tokens = sum(map(sum, documents))
        flops = training_flops(cost, documents) / seconds
        steps.append((seconds, waited, tokens / seconds, flops, tokens / room))
        memory = max(memory, metrics["perf/peak_memory"])
    feed.close()
    engine.close()
    seconds, waited, speed, flops, filled = (
        sorted(column)[case.steps // 2] for column in zip(*steps[1:], strict=True)
    )
    return {
        "step_s": seconds,
        "data_s": waited,
        "tok_s": speed,
        "tflops": flops / 1e12,
        "mfu": None if peak is None else 100 * flops / peak,
        "filled": 100 * filled,
        "peak_gib": memory,
        "loss": metrics["loss/mean"],
    }


COLUMNS = (
    ("tok/s", "tok_s", ",.0f", 10),
    ("MFU %", "mfu", ".1f", 7),
    ("TFLOP/s", "tflops", ".3g", 9),
    ("GiB", "peak_gib", ".1f", 7),
    ("step s", "step_s", ".3f", 9),
    ("data s", "data_s", ".3f", 9),
    ("filled %", "filled", ".0f", 9),
)


def _header() -> str:
    return "".join(heading.rjust(width) for heading, _, _, width in COLUMNS) + "  model, data, tokens x rows"


def _line(case: Case, result: dict[str, Any]) -> str:
    width = sum(width for *_, width in COLUMNS)
    if "error" in result:
        return f"{result['error'].rjust(width)}  {case.label}"
    cells = (
        ("-" if result[key] is None else format(result[key], form)).rjust(width)
        for _, key, form, width in COLUMNS
    )
    return "".join(cells) + f"  {case.label}"
