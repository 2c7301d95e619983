"""How loaded the engines are, read from their `/metrics` (Prometheus text under vLLM's names)."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
FETCH_SECONDS = 5.0
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One look at one engine. `usage` is the used share of its keys-and-values memory, which holds
    `capacity` tokens (None: it does not tell). Counters count since the engine started."""

    running: float = 0.0
    waiting: float = 0.0
    usage: float = 0.0
    capacity: float | None = None
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0


def parse_load(text: str) -> EngineLoad:
    """The load in an exposition. Values of several processes behind one address are added up, usage averaged.

    Raises ValueError when it holds none of the values, as another program's page would.
    """
    found: dict[str, list[float]] = defaultdict(list)
    capacity = 0.0
    for line in text.splitlines():
        if not (match := _LINE.match(line)):
            continue
        name, labels, value = match.groups()
        name = name.removeprefix("vllm:").removesuffix("_total")
        if name == "cache_config_info":
            table = dict(_LABEL.findall(labels or ""))
            capacity += _tokens(table)
        else:
            found[name].append(float(value))
    if "num_requests_running" not in found:
        raise ValueError("no vllm:num_requests_running in it")
    usage = found.get("kv_cache_usage_perc") or found.get("gpu_cache_usage_perc") or [0.0]
    totals = {name: sum(values) for name, values in found.items()}
    return EngineLoad(
        running=totals["num_requests_running"],
        waiting=totals.get("num_requests_waiting", 0.0),
        usage=sum(usage) / len(usage),
        capacity=capacity or None,
        preemptions=totals.get("num_preemptions", 0.0),
        prompt_tokens=totals.get("prompt_tokens", 0.0),
        generation_tokens=totals.get("generation_tokens", 0.0),
        prefix_queries=totals.get("prefix_cache_queries", 0.0),
        prefix_hits=totals.get("prefix_cache_hits", 0.0),
    )


def _tokens(labels: Mapping[str, str]) -> float:
    """Tokens of a cache of `num_gpu_blocks` blocks (`num_cpu_blocks` where that is all there is)."""
    for key in ("num_gpu_blocks", "num_cpu_blocks"):
        blocks, size = labels.get(key, ""), labels.get("block_size", "")
        if blocks.isdigit() and size.isdigit() and int(blocks):
            return float(int(blocks) * int(size))
    return 0.0


def load_metrics(
    before: Mapping[str, EngineLoad], now: Mapping[str, EngineLoad], seconds: float
) -> dict[str, float]:
    """`inference/<engine>/*` and `inference/agg/*`: state, and rates over the `seconds` since `before`."""
    values: dict[str, float] = {}
    engines = dict(now) if len(now) > 1 else {}
    pairs = [(name, before.get(name), load) for name, load in engines.items()]
    both = now.keys() & before.keys()
    pairs.append(("agg", _sum([before[name] for name in both]) if both else None, _sum(list(now.values()))))
    for name, old, new in pairs:
        prefix = f"inference/{name}/"
        values |= {
            f"{prefix}requests_running": new.running,
            f"{prefix}requests_waiting": new.waiting,
            f"{prefix}kv_cache_usage": new.usage,
            f"{prefix}preemptions": new.preemptions,
        }
        if old is not None and seconds > 0:
            values |= _rates(prefix, old, new, seconds)
    return values


def _rates(prefix: str, old: EngineLoad, new: EngineLoad, seconds: float) -> dict[str, float]:
    prompt, generation = new.prompt_tokens - old.prompt_tokens, new.generation_tokens - old.generation_tokens
    rates = {
        f"{prefix}prompt_tokens_per_second": max(0.0, prompt) / seconds,
        f"{prefix}generation_tokens_per_second": max(0.0, generation) / seconds,
    }
    if (queries := new.prefix_queries - old.prefix_queries) > 0:
        rates[f"{prefix}prefix_cache_hit_rate"] = (new.prefix_hits - old.prefix_hits) / queries
    return rates


def _sum(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Loads of several engines as one; usage is that of the fullest."""
    known = [load.capacity for load in loads if load.capacity is not None]
    return EngineLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        usage=max(load.usage for load in loads),
        capacity=sum(known) if known else None,
        preemptions=sum(load.preemptions for load in loads),
        prompt_tokens=sum(load.prompt_tokens for load in loads),
        generation_tokens=sum(load.generation_tokens for load in loads),
        prefix_queries=sum(load.prefix_queries for load in loads),
        prefix_hits=sum(load.prefix_hits for load in loads),
    )


class LoadPoll:
    """Asks every engine now and then; `tell(loads)` gets those that answered, `report(values)` the metrics.

    An engine without `/metrics` costs one warning, nothing more.
    """

    def __init__(
        self,
        roots: Sequence[str],
        tell: Callable[[list[EngineLoad]], object],
        report: Callable[[dict[str, float]], object],
    ) -> None:
        self._roots = roots
        self._tell = tell
        self._report = report
        self._before: dict[str, EngineLoad] = {}
        self._silent: set[str] = set()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        last = clock()
        limits = aiohttp.ClientTimeout(total=FETCH_SECONDS)
        async with aiohttp.ClientSession(timeout=limits) as http:
            while True:
                found = await asyncio.gather(*(self._look(http, root) for root in self._roots))
                loads = {str(i): load for i, load in enumerate(found) if load is not None}
                now = clock()
                self._tell(list(loads.values()))
                if loads:
                    self._report(load_metrics(self._before, loads, now - last))
                self._before, last = loads, now
                await asyncio.sleep(POLL_SECONDS)

    async def _look(self, http: aiohttp.ClientSession, root: str) -> EngineLoad | None:
        try:
            async with http.get(f"{root}/metrics") as response:
                response.raise_for_status()
                load = parse_load(await response.text())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if root not in self._silent:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                log.warning("%s/metrics tells nothing (%s): rollouts in flight are not adapted", root, reason)
                self._silent.add(root)
            return None
        self._silent.discard(root)
        return load
