"""`prl bench trainer`: training steps on made-up rows, phase by phase, with and without DeepSpeed."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launchers.role import end_now
from prl.bench.ranks import run_groups
from prl.bench.shapes import shape_names, write_shape
from prl.bench.words import combinations, count, split_options, write_results
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors

ALIASES = {
    "recompute": "trainer.recompute",
    "compile": "trainer.compile",
    "attn": "trainer.attn",
    "dtype": "trainer.dtype",
    "lm_head_chunk": "trainer.lm_head_chunk",
    "threads": "trainer.threads",
    "sequence_parallel": "trainer.sequence_parallel",
    "ranks": "cluster.train_ranks",
    "layers": "model.num_layers",
}
"""Short words for overrides that a benchmark often changes."""

OWN = {
    "model": "tiny",
    "seq_len": "1024",
    "docs": "1",
    "micro_batches": "2",
    "steps": "4",
    "engine": "deepspeed",
}
"""The benchmark's own words and their defaults; `steps` counts measured steps, one more comes before them."""

ENGINES = ("deepspeed", "bare")

USAGE = f"""python -m prl bench trainer [model=SHAPE] [seq_len=N] [word=value[,value...]]... [--json PATH]

Own words: {", ".join(f"{key}={value}" for key, value in OWN.items())}.
Shapes: {", ".join(shape_names())}, or a model directory. Engines: {", ".join(ENGINES)} (a plain torch loop).
Short for overrides: {", ".join(f"{key} ({path})" for key, path in ALIASES.items())}.
Any other word is an override of `prl rl`: zero=3, optim=muon, zero.offload_optimizer=true.
Values that a comma separates are measured one after the other, every combination of them.
Several ranks are started here, each with rows of its own; ranks=1,2 also tells how well two scale.
"""


@dataclass
class Case:
    """One combination: the benchmark's own values, and the overrides of the run's config."""

    model: str
    seq_len: int
    docs: int
    micro_batches: int
    steps: int
    engine: str
    overrides: dict[str, str]

    @property
    def label(self) -> str:
        changed = [f"{key.rpartition('.')[2]}={value}" for key, value in self.overrides.items()]
        own = [f"docs={self.docs}"] if self.docs > 1 else []
        return " ".join([self.engine, *own, *changed])


def main(words: Sequence[str]) -> int:
    """The job of `prl bench trainer`; the exit code."""
    options = split_options("bench trainer", USAGE, words)
    if options is None:
        return 0
    json_path, rest = options
    try:
        cases = read_cases(rest)
        with tempfile.TemporaryDirectory() as scratch:
            configs = [job_config(case, Path(scratch)) for case in cases]
            ranks = sorted({config.cluster.train_ranks for config in configs})
            check_ranks(cases, configs, ranks)
            if ranks != [1] and "RANK" not in os.environ:
                return run_groups(rest, ranks, json_path)
            run_cases(cases, configs, Path(scratch), json_path)
    except (ConfigErrors, ValueError) as error:
        print(f"bench trainer: {error}", file=sys.stderr)
        return 2
    if "RANK" in os.environ:
        end_now(0)
    return 0


def check_ranks(cases: Sequence[Case], configs: Sequence[Any], ranks: Sequence[int]) -> None:
    """Raises ValueError for what one command cannot measure together."""
    if len({config.trainer.sequence_parallel for config in configs}) > 1:
        raise ValueError("sequence_parallel=: one number at a time")
    if max(ranks) > 1 and any(case.engine == "bare" for case in cases):
        raise ValueError("engine=bare knows no other ranks; leave ranks= away or use engine=deepspeed")
    if len(ranks) > 1 and "RANK" in os.environ:
        raise ValueError("ranks=: one number of ranks, as this process is a rank of a group already")


def read_cases(words: Sequence[str]) -> list[Case]:
    """Every combination of the comma-separated values. Raises ValueError for a word that is none."""
    cases = []
    for chosen in combinations(words, OWN):
        numbers = {key: count(key, chosen[key]) for key in ("seq_len", "docs", "micro_batches", "steps")}
        if chosen["engine"] not in ENGINES:
            raise ValueError(f"engine={chosen['engine']}: choose {' or '.join(ENGINES)}")
        overrides = {ALIASES.get(key, key): value for key, value in chosen.items() if key not in OWN}
        cases.append(Case(model=chosen["model"], engine=chosen["engine"], overrides=overrides, **numbers))
    return cases


def job_config(case: Case, scratch: Path) -> Any:
    """The checked `RlConfig` of a case: random weights of the shape, rows of `seq_len` tokens."""
    fixed = {
        "model.path": str(write_shape(case.model, scratch)),
        "model.random_init": "true",
        "trainer.seq_len": str(case.seq_len),
        "optim.lr": "1e-5",
    }
    lines = [f"{key}={value}" for key, value in (fixed | case.overrides).items()]
    return compose_job("rl", lines)


def run_cases(
    cases: Sequence[Case], configs: Sequence[Any], scratch: Path, json_path: Path | None
) -> list[dict[str, Any]]:
    """Measure all cases in this process; each is in the table and in the file as soon as it is done."""
    import torch

    from prl.trainer import distributed

    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(configs[0].trainer.threads)
    first = configs[0].trainer
    world = distributed.join(0, 1, scratch / "store", first.dist_timeout, first.sequence_parallel)
    results = []
    for number, (case, config) in enumerate(zip(cases, configs, strict=True)):
        where = {"ranks": world.size, "device": device_name(world.device), "torch": torch.__version__}
        result = asdict(case) | where
        result |= tried(measure, case, config, world)
        results.append(result)
        if world.rank == 0:
            print("\n".join(([] if number else header(result)) + [line(case, result)]), flush=True)
            write_results(json_path, results)
    distributed.leave(world)
    return results


def tried(measure: Callable[..., dict[str, Any]], case: Any, config: Any, world: Any) -> dict[str, Any]:
    """What `measure` finds, or that memory was short; the device is left empty for the next case.

    Several ranks end with the error: one that is out of memory leaves the others waiting in a collective.
    """
    import torch

    try:
        found = measure(case, config, world)
    except torch.OutOfMemoryError:
        if world.size > 1:
            raise
        found = {"error": "out of memory"}
    gc.collect()
    torch._dynamo.reset()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def measure(case: Case, config: Any, world: Any) -> dict[str, Any]:
    """Time `steps` steps after one that warms up. Every number of a result is of this rank but `tok_s`."""
    from prl.bench.bare_engine import BareEngine
    from prl.bench.fake_rows import fake_row
    from prl.bench.phases import Phases
    from prl.trainer.engine import TrainEngine
    from prl.trainer.flops import model_cost, peak_flops, training_flops
    from prl.trainer.step import train_step

    engine: Any = (
        TrainEngine(config, world, None) if case.engine == "deepspeed" else BareEngine(config, world)
    )
    text = engine.model.config.get_text_config()
    rows = [
        fake_row(case.seq_len, case.docs, text.vocab_size, seed=world.data_rank * case.micro_batches + index)
        for index in range(case.micro_batches)
    ]
    phases, seconds, metrics = Phases(engine, world.device), [], {}
    for step in range(1, case.steps + 2):
        phases.clear()
        _synchronize(world.device)
        started = time.perf_counter()
        metrics = train_step(engine, rows, config.loss, step)
        _synchronize(world.device)
        seconds.append(time.perf_counter() - started)
        phases.close_step(keep=step > 1)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters())
    flops = training_flops(model_cost(engine.model.config), [row.sequence_lengths for row in rows])
    flops /= world.sequence
    engine.close()
    measured = sorted(seconds[1:])
    middle, best = measured[len(measured) // 2], measured[0]
    tokens, peak = sum(map(len, rows)), peak_flops(world.device)
    return {
        "parameters": parameters,
        "tokens": tokens * world.data_size,
        "step_s": middle,
        "best_step_s": best,
        "first_step_s": seconds[0],
        "tok_s": tokens * world.data_size / middle,
        "best_tok_s": tokens * world.data_size / best,
        "tok_s_rank": tokens / middle / world.sequence,
        "tflops_rank": flops / middle / 1e12,
        "mfu": None if peak is None else 100 * flops / middle / peak,
        "peak_gib": metrics["perf/peak_memory"],
        "phases": phases.mean(),
        "loss": metrics["loss/mean"],
        "grad_norm": metrics["optim/grad_norm"],
    }


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


COLUMNS = (
    ("tok/s", 9),
    ("best", 9),
    ("MFU %", 6),
    ("TFLOP/s", 8),
    ("GiB", 7),
    ("step s", 8),
    ("forward", 8),
    ("head", 7),
    ("backward", 9),
    ("optim", 7),
    ("rest", 7),
    ("first s", 8),
)


def header(result: dict[str, Any]) -> list[str]:
    """What is measured, and the names of the columns."""
    from prl.trainer.flops import FORMULA

    return [
        f"{result['ranks']} x {result['device']}, torch {result['torch']}; seconds of a step by phase",
        f"FLOPs = {FORMULA}; MFU against the device's dense bfloat16 peak",
        "".join(name.rjust(width) for name, width in COLUMNS) + "  shape, tokens a row x rows, choices",
    ]


def line(case: Case, result: dict[str, Any]) -> str:
    """One row of the table."""
    what = f"  {case.model} {case.seq_len} x {case.micro_batches} {case.label}"
    if "error" in result:
        return result["error"].rjust(sum(width for _, width in COLUMNS)) + what
    phases = result["phases"]
    mfu = "-" if result["mfu"] is None else f"{result['mfu']:.1f}"
    cells = [
        f"{result['tok_s']:,.0f}",
        f"{result['best_tok_s']:,.0f}",
        mfu,
        f"{result['tflops_rank']:.3g}",
        f"{result['peak_gib']:.1f}",
        f"{result['step_s']:.3f}",
        *(f"{phases[name]:.3f}" for name in ("forward", "head", "backward", "optimizer", "rest")),
        f"{result['first_step_s']:.1f}",
    ]
    return "".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)) + what
