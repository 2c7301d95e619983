"""Small traces and episodes, built by hand."""

from __future__ import annotations

import itertools

from prl.records import Episode, Node, Trace, TraceError

_ids = itertools.count()


def given(tokens: int, role: str = "user", parent: int | None = None, **fields) -> Node:
    return Node(
        parent=parent,
        role=role,
        sampled=False,
        token_ids=list(range(10, 10 + tokens)),
        mask=[False] * tokens,
        logprobs=[],
        **fields,
    )


def answer(sampled: int, scaffold: int = 1, parent: int | None = 0, **fields) -> Node:
    """An assistant message: template tokens, then sampled ones with logprobs -0.1, -0.2, ..."""
    return Node(
        parent=parent,
        role="assistant",
        sampled=True,
        token_ids=list(range(50, 50 + scaffold + sampled)),
        mask=[False] * scaffold + [True] * sampled,
        logprobs=[-0.1 * (i + 1) for i in range(sampled)],
        **fields,
    )


def trace(
    reward: float | None = 1.0, *, sampled: int = 3, prompt: int = 2, agent: str = "agent", turns: int = 1
):
    """One prompt and one answer; the answer's scaffold token counts as given."""
    return Trace(
        id=f"trace-{next(_ids)}",
        agent=agent,
        nodes=[given(prompt), answer(sampled)],
        branches=[[0, 1]],
        reward=reward,
        num_turns=turns,
    )


def tree(nodes: list[Node], branches: list[list[int]], reward: float = 1.0) -> Trace:
    return Trace(id=f"tree-{next(_ids)}", agent="agent", nodes=nodes, branches=branches, reward=reward)


def errored(reward: float | None = 1.0) -> Trace:
    broken = trace(reward)
    broken.error = TraceError("ValueError", "the harness failed")
    return broken


def episode(*traces: Trace, task: dict | None = None, env: str = "reverse_text") -> Episode:
    return Episode(
        id=f"episode-{next(_ids)}",
        env=env,
        group_id="group",
        task_key="task-0",
        task=task or {},
        traces=list(traces),
    )


def group(rewards: list[float | None], **fields) -> list[Episode]:
    return [episode(trace(reward, **fields)) for reward in rewards]


def advantages(episodes: list[Episode]) -> list[float | None]:
    """The scalar that every sampled token of each trace got; fails if they differ within a trace."""
    found = []
    for ep in episodes:
        for tr in ep.traces:
            values = {value for node in tr.nodes for value in node.advantages or ()}
            assert len(values) <= 1
            found.append(values.pop() if values else None)
    return found
