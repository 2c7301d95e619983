"""Reference logprobs of sampled tokens: what opd and opsd share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prl.records import Node, Trace, TraceError


def fitting(traces: list[Trace], longest: int | None, prefix: int = 0) -> list[Trace]:
    """The traces whose branches can be scored behind `prefix` tokens within `longest`.

    The others fail as `TooLongToScore`: they are counted and left out, and the run goes on.
    """
    if longest is None:
        return traces
    for trace in traces:
        size = prefix + max(sum(len(trace.nodes[i].token_ids) for i in branch) for branch in trace.branches)
        if size > longest:
            what = f"{size} tokens ({prefix} of them a prefix), {longest} can be scored"
            trace.error = TraceError("TooLongToScore", what)
    return [trace for trace in traces if trace.error is None]


async def attach_reference(
    traces: list[Trace], score: Callable[[Trace, int, list[int]], Coroutine[Any, Any, list[float]]]
) -> None:
    """Asks `score(trace, branch number, token ids)` for every branch with sampled tokens, all at once.

    Where branches share a node, the first branch's values stay. Raises ValueError when an answer does not
    have one value per token; any error of a request cancels the others.
    """
    asked = [
        (trace, number, [trace.nodes[i] for i in branch])
        for trace in traces
        for number, branch in enumerate(trace.branches)
    ]
    asked = [entry for entry in asked if any(node.num_sampled for node in entry[2])]
    try:
        async with asyncio.TaskGroup() as requests:
            answers = [
                requests.create_task(
                    score(trace, number, [token for node in nodes for token in node.token_ids])
                )
                for trace, number, nodes in asked
            ]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    for (trace, number, nodes), answer in zip(asked, answers, strict=True):
        _write(trace, number, nodes, answer.result())


def _write(trace: Trace, number: int, nodes: list[Node], logprobs: list[float]) -> None:
    tokens = sum(len(node.token_ids) for node in nodes)
    if len(logprobs) != tokens:
        raise ValueError(
            f"trace {trace.id}, branch {number}: {len(logprobs)} reference logprobs for {tokens} tokens; "
            "the reference model must score the policy's own token ids"
        )
    start = 0
    for node in nodes:
        own = logprobs[start : start + len(node.token_ids)]
        start += len(node.token_ids)
        if node.num_sampled and node.ref_logprobs is None:
            node.ref_logprobs = [value for value, sampled in zip(own, node.mask, strict=True) if sampled]
