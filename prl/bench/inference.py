"""`prl bench inference`: an engine behind its server, beside the bare engine and HF generate, in one run.

`python -m prl bench inference --engine embedded --model 1m --batch 1,8,64`. Words of the form key=value go to
`prl inference` as they are. All engines are up at once and take turns, round by round, so that other work on
the machine slows them alike; CPU time per token stands beside the rates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from prl.bench.inference_bare import READY, SHARE, cpu_seconds, prompts_of
from prl.bench.inference_server import serving
from prl.bench.inference_shapes import SHAPES, kv_bytes, write_shape

COLUMNS = ("who", "batch", "requests_per_second", "tokens_per_second", "first_token_seconds")
COLUMNS += ("cpu_microseconds_per_token", "relative")
HEADS = ("engine", "batch", "requests/s", "tokens/s", "first token s", "CPU us/token", "of bare")
Rounds = list[dict[str, float]]
REQUEST_SECONDS = 3600.0


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write `--json`; 0."""
    args = _parse(words)
    with tempfile.TemporaryDirectory(prefix="prl-bench-") as scratch:
        model = write_shape(args.model, Path(scratch) / "model")
        rows = _measured(model, args, Path(scratch))
    for row in rows:
        bare = next(r for r in rows if r["batch"] == row["batch"])
        row["relative"] = row["tokens_per_second"] / bare["tokens_per_second"]
    rows.sort(key=lambda row: row["batch"])
    print(_table(args, rows))
    if args.json:
        facts = {"engine": args.engine, "model": args.model, "prompt": args.prompt, "tokens": args.tokens}
        Path(args.json).write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prl bench inference", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    shapes = f"{', '.join(SHAPES)}, or a directory with config.json"
    parser.add_argument("--model", default="1m", help=shapes)
    parser.add_argument("--batch", default="1,8,64", type=_numbers, help="requests at once, e.g. 1,8,64")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each engine")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, of which the best counts")
    parser.add_argument("--python", help="interpreter of an environment with vLLM")
    parser.add_argument("--no-hf", action="store_true", help="leave out HF generate")
    parser.add_argument("--json", help="also write the rows here")
    parser.add_argument("overrides", nargs="*", help="key=value for `prl inference`")
    return parser.parse_args(list(words))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@contextlib.contextmanager
def _bare(
    kind: str, model: Path, batch: int, args: argparse.Namespace, python: str | None
) -> Iterator[Callable[[], dict[str, float]]]:
    """The engine in a process of its own, which starts at once; what is yielded waits for it and measures a
    round."""
    numbers = map(str, (batch, args.prompt, args.tokens, args.threads))
    words = [python or sys.executable, "-m", "prl.bench.inference_bare", kind, str(model), *numbers]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}  # as the server has it
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, **pipes, stderr=errors, env=environment, text=True)
        assert process.stdin is not None and process.stdout is not None
        lines = (line for line in process.stdout if line.startswith((READY, '{"first"')))

        def answer() -> str:
            if line := next(lines, ""):
                return line
            process.wait()
            errors.seek(0)
            raise RuntimeError(f"{kind} failed: {errors.read()[-2000:]}")

        ready = False

        def ask() -> dict[str, float]:
            nonlocal ready
            ready = ready or answer().startswith(READY)
            print(file=process.stdin, flush=True)
            return json.loads(answer())

        try:
            yield ask
        finally:
            process.stdin.close()
            process.wait(60)


def _measured(model: Path, args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Rows of every batch, the bare engine's first. The first of them starts beside the server."""
    rows = []
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    with contextlib.ExitStack() as stack:
        beside = stack.enter_context(contextlib.ExitStack())
        asks = _others(beside, model, args.batch[0], args)
        before = {child.pid for child in psutil.Process().children()}
        url = stack.enter_context(serving(model, _server_words(model, args), scratch))
        started = [child for child in psutil.Process().children() if child.pid not in before]
        server = [process for root in started for process in (root, *root.children(recursive=True))]
        for batch in args.batch:
            asks = asks or _others(beside, model, batch, args)
            prompts = prompts_of(batch, args.prompt, vocab)
            asks[f"{args.engine}, served"] = partial(_round, url, prompts, args.tokens, server)
            rows += _rounds(asks, batch, args)
            beside.close()
            asks = {}
    return rows


def _others(
    stack: contextlib.ExitStack, model: Path, batch: int, args: argparse.Namespace
) -> dict[str, Callable[[], dict[str, float]]]:
    """The engines that the server is compared with; `stack` ends them."""
    kinds = {f"{args.engine}, bare": args.engine}
    if args.engine == "embedded" and not args.no_hf:
        kinds["HF generate"] = "hf"
    python = args.python if args.engine == "vllm" else None
    return {who: stack.enter_context(_bare(kind, model, batch, args, python)) for who, kind in kinds.items()}


def _server_words(model: Path, args: argparse.Namespace) -> list[str]:
    context = args.prompt + args.tokens
    words = [f"inference={args.engine}", f"inference.max_model_len={context}"]
    words.append(f"inference.threads={args.threads}")
    if args.engine == "embedded":
        return [*words, f"inference.max_slots={max(args.batch)}", *args.overrides]
    import torch

    words.append("inference.vllm.skip_tokenizer_init=true")
    if torch.cuda.is_available():  # of one size with the bare engine beside it
        size = kv_bytes(model, max(args.batch), context, 2)
        words.append(f"inference.vllm.kv_cache_memory_bytes={size}")
        words.append(f"inference.gpu_memory_utilization={SHARE}")
    words += [f"inference.python={args.python}"] if args.python else []
    return [*words, *args.overrides]


def _rounds(
    asks: dict[str, Callable[[], dict[str, float]]], batch: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    found: dict[str, Rounds] = {who: [] for who in asks}
    for _ in range(args.rounds):
        for who, ask in asks.items():
            found[who].append(ask())
            rate = batch * args.tokens / found[who][-1]["whole"]
            print(f"{who}, {batch} at once: {rate:.4g} tokens/s", file=sys.stderr, flush=True)
    return [_row(who, batch, args, rounds) for who, rounds in found.items()]


def _row(who: str, batch: int, args: argparse.Namespace, rounds: Rounds) -> dict[str, Any]:
    """The best of each measure over the rounds."""
    best = {key: min(each[key] for each in rounds) for key in rounds[0]}
    return {
        "who": who,
        "batch": batch,
        "requests_per_second": batch / best["whole"],
        "tokens_per_second": batch * args.tokens / best["whole"],
        "first_token_seconds": best["first"],
        "cpu_microseconds_per_token": 1e6 * best["cpu"] / (batch * args.tokens),
    }


def _round(url: str, prompts: list[list[int]], tokens: int, server: list[psutil.Process]) -> dict[str, float]:
    return asyncio.run(_ask_all(url, prompts, tokens, server))


async def _ask_all(
    url: str, prompts: list[list[int]], tokens: int, server: list[psutil.Process]
) -> dict[str, float]:
    """Seconds until all prompts, sent at once, have their first token, and until they have `tokens` with
    their logprobs; CPU seconds of the latter. Over connections that are there, as an orchestrator has them.
    """
    import aiohttp

    sampling = {"temperature": 1.0, "ignore_eos": True, "logprobs": 1}
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def ask(prompt: list[int], count: int) -> None:
            params = {**sampling, "max_tokens": count}
            body = {"model": "bench", "token_ids": prompt, "sampling_params": params}
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                answer = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{url}: {response.status}: {answer[:500]!r}")

        async def seconds(count: int) -> float:
            started = time.perf_counter()
            await asyncio.gather(*(ask(prompt, count) for prompt in prompts))
            return time.perf_counter() - started

        await seconds(2)
        first = await seconds(1)
        busy = cpu_seconds(server)
        whole = await seconds(tokens)
        return {"first": first, "whole": whole, "cpu": cpu_seconds(server) - busy}


def _table(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    head = (
        f"{args.model}: {args.prompt} + {args.tokens} tokens, best of {args.rounds}, {args.threads} thread(s)"
    )
    lines = [head, f"{HEADS[0]:18}" + "".join(f"{name:>15}" for name in HEADS[1:])]
    for row in rows:
        cells = "".join(
            f"{row[key]:>15d}" if isinstance(row[key], int) else f"{row[key]:>15.3g}" for key in COLUMNS[1:]
        )
        lines.append(f"{row['who']:18}{cells}")
    return "\n".join(lines)
