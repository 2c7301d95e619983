"""Every episode to disk as it arrives: append-only, readable while the run goes on, whole after a crash.

traces/stream.jsonl       one episode a line: traces, messages, tokens, masks, logprobs, rewards, versions
traces/index.jsonl        one line an episode: where its line is in the stream, and a summary
traces/annotations.jsonl  one line a shipped trace: the step that trained it, and its advantages
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from prl.orchestrator.sink import Entry
from prl.records import Episode, Node, Trace
from prl.tracking.stream import JsonLines

FLUSH_SECONDS = 0.2


class TraceLog:
    """Collects episodes on the event loop and writes them from a thread."""

    def __init__(
        self, directory: Path, attempt: int, offload: Callable[..., Awaitable[Any]] = asyncio.to_thread
    ) -> None:
        self._stream = JsonLines(directory / "stream.jsonl")
        self._index = JsonLines(directory / "index.jsonl")
        self._annotations = JsonLines(directory / "annotations.jsonl")
        self._attempt = attempt
        self._offload = offload
        self._waiting: list[tuple[Episode, int, str]] = []
        self._writing = asyncio.Lock()

    def add(self, episode: Episode, step: int, kind: str = "train") -> None:
        """Note an episode that came while batch `step` was collected; of kind "eval": for version `step`."""
        self._waiting.append((episode, step, kind))

    async def run(self) -> None:
        """Write what was added, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        async with self._writing:
            waiting, self._waiting = self._waiting, []
            if waiting:
                await self._offload(self._write, waiting)

    async def annotate(self, shipped: Sequence[Entry], step: int) -> None:
        """Note which traces batch `step` trains, with the credit of their tokens."""
        await self.flush()
        async with self._writing:
            await self._offload(self._write_annotations, shipped, step)

    def close(self) -> None:
        for lines in (self._stream, self._index, self._annotations):
            lines.close()

    def _write(self, waiting: Sequence[tuple[Episode, int, str]]) -> None:
        # One line at a time: encoding all of them in one go would hold the GIL for long.
        for episode, step, kind in waiting:
            extra = {"kind": kind}
            record = episode_record(episode, step, self._attempt) | extra
            ((offset, length),) = self._stream.append(record)
            self._index.append(index_record(episode, step, self._attempt, offset, length) | extra)

    def _write_annotations(self, shipped: Sequence[Entry], step: int) -> None:
        for entry in shipped:
            self._annotations.append(
                {
                    "episode": entry.episode.id,
                    "trace": entry.trace.id,
                    "step": step,
                    "attempt": self._attempt,
                    "advantage": entry.trace.advantage,
                    "advantages": [_constant_or_list(node.advantages) for node in entry.trace.nodes],
                }
            )


def _head(episode: Episode, step: int, attempt: int) -> dict[str, Any]:
    """What both records of an episode begin with."""
    return {
        "id": episode.id,
        "env": episode.env,
        "group": episode.group_id,
        "step": step,
        "attempt": attempt,
        "task_key": episode.task_key,
        "policy": [episode.policy.start, episode.policy.end] if episode.policy else None,
    }


def episode_record(episode: Episode, step: int, attempt: int) -> dict[str, Any]:
    """An episode as it was sampled: credit comes later, as an annotation."""
    return {
        **_head(episode, step, attempt),
        "task": episode.task,
        "started_at": episode.started_at,
        "finished_at": episode.finished_at,
        "traces": [_trace_record(trace) for trace in episode.traces],
    }


def index_record(episode: Episode, step: int, attempt: int, offset: int, length: int) -> dict[str, Any]:
    """Where an episode is in the stream (bytes), and what a table of episodes shows and filters by."""
    traces = episode.traces
    return {
        **_head(episode, step, attempt),
        "agents": [trace.agent for trace in traces],
        "rewards": [trace.reward for trace in traces],
        "errors": [trace.error.type for trace in traces if trace.error],
        "truncated": any(trace.is_truncated for trace in traces),
        "turns": sum(trace.num_turns for trace in traces),
        "tokens": sum(trace.num_tokens for trace in traces),
        "seconds": episode.finished_at - episode.started_at,
        "finished_at": episode.finished_at,
        "offset": offset,
        "length": length,
    }


def _trace_record(trace: Trace) -> dict[str, Any]:
    return {
        "id": trace.id,
        "agent": trace.agent,
        "reward": trace.reward,
        "rewards": trace.rewards,
        "metrics": trace.metrics,
        "error": {"type": trace.error.type, "message": trace.error.message} if trace.error else None,
        "is_truncated": trace.is_truncated,
        "is_completed": trace.is_completed,
        "stop_condition": trace.stop_condition,
        "num_turns": trace.num_turns,
        "timing": trace.timing,
        "info": trace.info,
        "branches": trace.branches,
        "nodes": [_node_record(node) for node in trace.nodes],
    }


def _node_record(node: Node) -> dict[str, Any]:
    return {
        "parent": node.parent,
        "role": node.role,
        "sampled": node.sampled,
        "content": node.content,
        "token_ids": node.token_ids,
        "mask": _constant_or_list([int(flag) for flag in node.mask]),
        "logprobs": node.logprobs,
    }


def _constant_or_list(values: list[Any] | None) -> Any:
    """One value for a list of equal ones: most nodes have one mask and one advantage throughout."""
    if values and all(value == values[0] for value in values):
        return values[0]
    return values
