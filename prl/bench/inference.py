"""`prl bench inference`: an engine behind its server, beside the bare engine and HF generate, in one run.

`python -m prl bench inference --engine embedded --model 1m --batch 1,8,64`. Words of the form key=value go to
`prl inference` as they are. On CPUs the rounds of all are interleaved, so that other work on the machine
slows them alike; CPU time per token stands beside the rates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from prl.bench.inference_bare import READY, prompts_of
from prl.bench.inference_server import serving
from prl.bench.inference_shapes import SHAPES, write_shape

COLUMNS = ("who", "batch", "requests_per_second", "tokens_per_second", "first_token_seconds")
COLUMNS += ("cpu_microseconds_per_token", "relative")
HEADS = ("engine", "batch", "requests/s", "tokens/s", "first token s", "CPU us/token", "of bare")
Rounds = list[dict[str, float]]
REQUEST_SECONDS = 3600.0


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write `--json`; 0."""
    args = _parse(words)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="prl-bench-") as scratch:
        model = write_shape(args.model, Path(scratch) / "model")
        if args.engine == "vllm":  # a GPU has no room for two engines
            for batch in args.batch:
                with _bare("vllm", model, batch, args, args.python) as ask:
                    rows.append(_row("vllm, bare", batch, args, [ask() for _ in range(args.rounds)]))
                _tell(rows[-1])
        rows += _served(model, args, Path(scratch))
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
    """The engine in a process of its own; what is yielded measures a round."""
    numbers = map(str, (batch, args.prompt, args.tokens, args.threads))
    words = [python or sys.executable, "-m", "prl.bench.inference_bare", kind, str(model), *numbers]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        lines = (line for line in process.stdout if line.startswith((READY, '{"first"')))

        def answer() -> str:
            if line := next(lines, ""):
                return line
            process.wait()
            errors.seek(0)
            raise RuntimeError(f"{kind} failed: {errors.read()[-2000:]}")

        def ask() -> dict[str, float]:
            print(file=process.stdin, flush=True)
            return json.loads(answer())

        try:
            answer()
            yield ask
        finally:
            process.stdin.close()
            process.wait(60)


def _served(model: Path, args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Rows of the server, between rounds of the bare engines where they have room beside it."""
    context = args.prompt + args.tokens
    words = [f"inference={args.engine}", f"inference.max_model_len={context}"]
    words.append(f"inference.threads={args.threads}")
    if args.engine == "vllm":
        words += ["inference.vllm.skip_tokenizer_init=true", "inference.gpu_memory_utilization=0.6"]
        words += [f"inference.python={args.python}"] if args.python else []
    else:
        words.append(f"inference.max_slots={max(args.batch)}")
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    rows = []
    with serving(model, [*words, *args.overrides], scratch) as url:
        server = psutil.Process().children(recursive=True)
        for batch in args.batch:
            prompts = prompts_of(batch, args.prompt, vocab)
            asyncio.run(_load(url, prompts, 2))
            with contextlib.ExitStack() as stack:
                asks: dict[str, Callable[[], dict[str, float]]] = {}
                if args.engine == "embedded":
                    kinds = {"embedded, bare": "embedded"} | ({} if args.no_hf else {"HF generate": "hf"})
                    for who, kind in kinds.items():
                        asks[who] = stack.enter_context(_bare(kind, model, batch, args, None))
                asks[f"{args.engine}, served"] = partial(_round, url, prompts, args.tokens, server)
                found: dict[str, Rounds] = {who: [] for who in asks}
                for _ in range(args.rounds):
                    for who, ask in asks.items():
                        found[who].append(ask())
            for who, rounds in found.items():
                rows.append(_row(who, batch, args, rounds))
                _tell(rows[-1])
    return rows


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


def _tell(row: dict[str, Any]) -> None:
    """A line at once: large engines take minutes to start, and what was measured should not be lost."""
    print(f"{row['who']}, {row['batch']} at once: {row['tokens_per_second']:.3g} tokens/s", file=sys.stderr)


def _round(url: str, prompts: list[list[int]], tokens: int, server: list[psutil.Process]) -> dict[str, float]:
    first = asyncio.run(_load(url, prompts, 1))
    busy = _cpu_seconds(server)
    whole = asyncio.run(_load(url, prompts, tokens))
    return {"first": first, "whole": whole, "cpu": _cpu_seconds(server) - busy}


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(each.user + each.system for each in times)


async def _load(url: str, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until all prompts, sent at once, have `tokens` tokens with their logprobs."""
    import aiohttp

    sampling = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 1}
    bodies = [{"model": "bench", "token_ids": prompt, "sampling_params": sampling} for prompt in prompts]
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def ask(body: dict[str, Any]) -> None:
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                answer = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{url}: {response.status}: {answer[:500]!r}")

        started = time.perf_counter()
        await asyncio.gather(*(ask(body) for body in bodies))
        return time.perf_counter() - started


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
