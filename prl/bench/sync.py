"""`prl bench sync`: seconds and bytes per second of a weight update, beside a plain copy of the same bytes.

`python -m prl bench sync --model 6m --sync filesystem,collective`. This process is the trainer: it holds
random weights of the shape, publishes them, and does to the engine what the orchestrator does. On GPUs
`--engine-gpus 0 --trainer-gpu 1` places the two ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prl.bench.inference_server import serving
from prl.bench.inference_shapes import SHAPES, write_shape
from prl.config.serving import CollectiveConfig, SyncConfig
from prl.records import WeightVersion
from prl.sync.versions import newest_version

COLUMNS = ("seconds", "paused_seconds", "bytes_per_second", "relative")
HEADS = ("update s", "engine paused s", "GB/s", "times a copy")
WAIT_SECONDS = 600.0


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write `--json`; 0."""
    args = _parse(words)
    rows = []
    with tempfile.TemporaryDirectory(prefix="prl-bench-", dir=args.scratch) as scratch:
        model = write_shape(args.model, Path(scratch) / "model")
        if args.trainer_gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = args.trainer_gpu
        weights = _weights(model)
        copies = {
            "filesystem": _file_copy_seconds(weights, Path(scratch) / "copy", args.rounds),
            "collective": _memory_copy_seconds(weights, args.rounds),
        }
        for name in args.sync:
            rows.append(_updates(name, model, weights, args, Path(scratch), copies[name]))
            print(f"{name}: {rows[-1]['seconds']:.3g} s an update", file=sys.stderr)
    print(_table(args, rows))
    if args.json:
        facts = {"model": args.model, "engine": args.engine, "rounds": args.rounds}
        Path(args.json).write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prl bench sync", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    shapes = f"{', '.join(SHAPES)}, or a directory with config.json"
    parser.add_argument("--model", default="6m", help=shapes)
    parser.add_argument("--sync", default="filesystem,collective", type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=5, help="updates, of which the median counts")
    parser.add_argument("--engine-gpus", help="CUDA ids of the engine; empty = CPU")
    parser.add_argument("--trainer-gpu", help="CUDA id of this process; empty = CPU")
    parser.add_argument("--scratch", help="where files go, e.g. /dev/shm; default: the temporary directory")
    parser.add_argument("--python", help="interpreter of an environment with vLLM")
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("overrides", nargs="*", help="key=value for `prl inference`")
    return parser.parse_args(list(words))


def _weights(model: Path) -> dict[str, Any]:
    """Random tensors under the Hugging Face names and shapes of the model, in the compute type."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype)
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def _updates(
    name: str,
    model: Path,
    weights: dict[str, Any],
    args: argparse.Namespace,
    scratch: Path,
    copy_seconds: float,
) -> dict[str, Any]:
    """Median of the updates of one transport against a server of its own."""
    words = [f"inference={args.engine}", f"sync={name}", "inference.max_model_len=256"]
    if args.engine == "vllm":
        words += ["inference.vllm.skip_tokenizer_init=true", "inference.gpu_memory_utilization=0.5"]
        words += [f"inference.python={args.python}"] if args.python else []
    with serving(model, [*words, *args.overrides], scratch, args.engine_gpus) as url:
        timings = asyncio.run(_run(url, name, weights, scratch / name, args.rounds))
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    seconds = statistics.median(whole for whole, _ in timings)
    return {
        "sync": name,
        "bytes": num_bytes,
        "seconds": seconds,
        "paused_seconds": statistics.median(paused for _, paused in timings),
        "bytes_per_second": num_bytes / seconds,
        "copy_seconds": copy_seconds,
        "relative": seconds / copy_seconds,
    }


async def _run(
    url: str, name: str, weights: dict[str, Any], broadcasts: Path, rounds: int
) -> list[tuple[float, float]]:
    """(seconds of an update, seconds that the engine was paused) of each round; the first joins and warms."""
    from prl.inference.client import EngineAdmin
    from prl.sync.publishers import make_publisher

    def tensors() -> Iterator[tuple[str, Any]]:
        yield from weights.items()

    device = next(iter(weights.values())).device
    config = CollectiveConfig() if name == "collective" else SyncConfig()
    publisher = make_publisher(broadcasts, config, 0, device)
    admin = EngineAdmin(url, WAIT_SECONDS)
    timings = []
    for version in range(1, rounds + 2):
        for tensor in weights.values():
            tensor.add_(1e-4)
        _finish(device)
        started = time.perf_counter()
        sending = asyncio.create_task(asyncio.to_thread(publisher.publish, version, tensors))
        found = await asyncio.to_thread(_wait_for, broadcasts, version)
        paused = time.perf_counter()
        await admin.pause()
        answer = await admin.update_weights(found.path, version)
        await admin.resume()
        ended = time.perf_counter()
        published = await sending
        if answer["fingerprint"] != published.fingerprint:
            raise RuntimeError(f"{url} serves {answer['fingerprint']}, published was {published.fingerprint}")
        timings.append((ended - started, ended - paused))
    await admin.aclose()
    return timings[1:]


def _wait_for(broadcasts: Path, version: int) -> WeightVersion:
    """A version, once it is complete or offered."""
    deadline = time.monotonic() + WAIT_SECONDS
    while (found := newest_version(broadcasts)) is None or found.version < version:
        if time.monotonic() > deadline:
            raise TimeoutError(f"v{version} did not come within {WAIT_SECONDS:.0f} s")
        time.sleep(0.0005)
    return found


def _file_copy_seconds(weights: dict[str, Any], directory: Path, rounds: int) -> float:
    """Writing the same bytes to one plain file and reading them back."""
    host = {name: tensor.cpu().contiguous().view(-1) for name, tensor in weights.items()}
    import torch

    directory.mkdir()
    blobs = [tensor.view(torch.uint8).numpy() for tensor in host.values()]

    def copy() -> None:
        file = directory / "plain"
        with file.open("wb") as out:
            for blob in blobs:
                out.write(memoryview(blob))
        file.read_bytes()
        file.unlink()

    return _median_seconds(copy, rounds)


def _memory_copy_seconds(weights: dict[str, Any], rounds: int) -> float:
    """Copying the same bytes to other memory of the same device."""
    others = {name: tensor.clone() for name, tensor in weights.items()}
    device = next(iter(weights.values())).device

    def copy() -> None:
        for name, tensor in weights.items():
            others[name].copy_(tensor)
        _finish(device)

    return _median_seconds(copy, rounds)


def _median_seconds(work: Callable[[], None], rounds: int) -> float:
    work()
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _finish(device: Any) -> None:
    """Wait until the device has done what it was told."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _table(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    size = rows[0]["bytes"] / 1e9
    lines = [f"{args.model} on {args.engine}: {size:.3g} GB, median of {args.rounds} updates"]
    lines.append(f"{'sync':12}" + "".join(f"{head:>17}" for head in HEADS))
    for row in rows:
        values = {**row, "bytes_per_second": row["bytes_per_second"] / 1e9}
        lines.append(f"{row['sync']:12}" + "".join(f"{values[key]:>17.3g}" for key in COLUMNS))
    lines += [f"plain copy for {row['sync']}: {row['copy_seconds']:.3g} s" for row in rows]
    return "\n".join(lines)
