"""`prl bench ckpt`: how fast checkpoints are saved, loaded and exported, beside a plain copy of a file."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prl.bench.shapes import shape_names, write_shape
from prl.bench.words import split_options, write_results
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors

USAGE = f"""python -m prl bench ckpt [model=SHAPE] [dir=DIRECTORY] [override]... [--json PATH]

Shapes: {", ".join(shape_names())}, or a model directory. Other words are overrides of `prl rl`: zero=3.
Everything is written below `dir` (default: the temporary directory) and removed again.
"""


def main(words: Sequence[str]) -> int:
    """The job of `prl bench ckpt`; the exit code."""
    options = split_options("bench ckpt", USAGE, words)
    if options is None:
        return 0
    json_path, rest = options
    own = dict(word.split("=", 1) for word in rest if word.startswith(("model=", "dir=")))
    lines = [word for word in rest if not word.startswith(("model=", "dir="))]
    try:
        with tempfile.TemporaryDirectory(dir=own.get("dir")) as scratch:
            shape = write_shape(own.get("model", "tiny"), Path(scratch))
            fixed = [f"model.path={shape}", "model.random_init=true"]
            results = measure(compose_job("rl", [*fixed, *lines]), shape, Path(scratch))
    except (ConfigErrors, ValueError, OSError) as error:
        print(f"bench ckpt: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(results)))
    write_results(json_path, results)
    return 0


def measure(config: Any, shape: Path, scratch: Path) -> dict[str, dict[str, float]]:
    """Bytes and seconds of each action. One step is trained before, so that there is optimizer state."""
    import torch

    from prl.bench.fake_rows import fake_row
    from prl.checkpoint.export import export
    from prl.checkpoint.load import load_trainer
    from prl.checkpoint.marker import mark_complete
    from prl.checkpoint.save import save_trainer
    from prl.trainer import distributed
    from prl.trainer.engine import TrainEngine
    from prl.trainer.step import train_step

    torch.set_num_threads(config.trainer.threads)
    world = distributed.join(0, 1, scratch / "store", config.trainer.dist_timeout)
    engine = TrainEngine(config, world, None)
    row = fake_row(64, 1, engine.model.config.get_text_config().vocab_size, seed=0)
    train_step(engine, [row], config.loss, 1)
    step, out, copies = scratch / "step_1", scratch / "out", scratch / "copies"
    results = {
        "save": _timed(lambda: save_trainer(engine.deepspeed, step / "trainer", {}), step),
        "save again": _timed(lambda: save_trainer(engine.deepspeed, step / "trainer", {}), step),
        "load": _timed(lambda: load_trainer(engine.deepspeed, step / "trainer", config.ckpt), step),
        "copy of the files": _timed(lambda: shutil.copytree(step, copies), copies),
    }
    engine.close()
    distributed.leave(world)
    mark_complete(step, ["trainer"])
    results["export bfloat16"] = _timed(lambda: export(step, out, torch.bfloat16, 5 * 10**9, shape), out)
    again = scratch / "again"
    results["copy of the export"] = _timed(lambda: shutil.copytree(out, again), again)
    return results


def _timed(action: Callable[[], Any], made: Path) -> dict[str, float]:
    """Seconds of `action`, until its bytes are with the file system, and the bytes below `made`."""
    started = time.perf_counter()
    action()
    os.sync()
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
    return {"bytes": size, "seconds": seconds, "mb_s": size / 1e6 / seconds}


def table(results: dict[str, dict[str, float]]) -> list[str]:
    """A line for each action."""
    lines = [f"{'action':<20}{'MB':>10}{'s':>10}{'MB/s':>10}"]
    for name, found in results.items():
        numbers = f"{found['bytes'] / 1e6:>10.1f}{found['seconds']:>10.3f}{found['mb_s']:>10.0f}"
        lines.append(f"{name:<20}{numbers}")
    return lines
