"""Routes of the trace browser: the table, an episode, its tokens, its group, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import Response

from prl.dashboard import episode_query
from prl.dashboard.overlay import node_tokens, token_text
from prl.dashboard.reply import reply
from prl.dashboard.shelf import OpenRun
from prl.dashboard.summary import Summaries


def episode_routes(opened: Callable[[str], OpenRun], summaries: Summaries) -> APIRouter:
    """Routes below `/api/runs/{run_id}`; `opened(run_id)` gives the run's readers."""
    routes = APIRouter()

    @routes.get("/episodes")
    def episodes(
        run_id: str,
        step_from: int | None = None,
        step_to: int | None = None,
        env: str | None = None,
        reward_from: float | None = None,
        reward_to: float | None = None,
        truncated: bool | None = None,
        error: str | None = None,
        attempt: int | None = None,
        sort: Annotated[str, Query(pattern=f"^({'|'.join(episode_query.SORTS)})$")] = "row",
        descending: bool = True,
        start: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=episode_query.MOST_ROWS)] = 50,
        revision: int | None = None,
    ) -> Response:
        """A page of the table; 204 if no episode came since `revision`."""
        index = opened(run_id).episodes
        index.refresh()
        newest = index.revision
        if newest == revision:
            return Response(status_code=204)
        query = episode_query.Query(
            step_from, step_to, env, reward_from, reward_to, truncated, error, attempt, sort, descending,
            start, limit,
        )  # fmt: skip
        return reply({"revision": newest, **episode_query.page(index, query)})

    @routes.get("/episodes/{row}")
    def episode(run_id: str, row: int) -> Response:
        """The transcript without its tokens, with the credit of each trace."""
        found = opened(run_id)
        return reply(_episode(found, row))

    @routes.get("/episodes/{row}/tokens")
    def tokens(run_id: str, row: int, trace: int, node: int) -> Response:
        """The tokens of one message, with what is known of each."""
        found = opened(run_id)
        record = _record(found, row)["traces"]
        if not (0 <= trace < len(record) and 0 <= node < len(record[trace]["nodes"])):
            raise IndexError(node)
        attempts = found.run.attempts()
        config = summaries.config(found.run, attempts[-1]) if attempts else {}
        text_of, known = token_text(config.get("model"))
        trace_id = record[trace]["id"]
        credit = found.annotations.credit(trace_id)
        told = node_tokens(record[trace], node, credit, found.annotations.trainer(trace_id), text_of)
        return reply({**told, "tokenizer": known})

    @routes.get("/episodes/{row}/group")
    def group(run_id: str, row: int) -> Response:
        """The episodes of the same group beside each other, best reward first."""
        found = opened(run_id)
        found.episodes.refresh()
        members = episode_query.group_of(found.episodes, row)
        return reply({"members": [_episode(found, member["row"]) for member in members]})

    @routes.get("/errors")
    def errors(run_id: str) -> Response:
        index = opened(run_id).episodes
        index.refresh()
        return reply({**episode_query.errors_by_type(index), "share_read": index.share_read})

    return routes


def _record(found: OpenRun, row: int) -> dict[str, Any]:
    index = found.episodes
    if not 0 <= row < len(index):
        index.refresh(seconds=5.0)  # a link that was followed before the table was ever shown
    try:
        return index.record(row)
    except IndexError:
        raise
    except LookupError as error:
        raise HTTPException(409, f"{error}; reload the table") from error


def _episode(found: OpenRun, row: int) -> dict[str, Any]:
    record = _record(found, row)
    traces = [_trace(found, trace) for trace in record["traces"]]
    return {**record, "row": row, "rows": len(found.episodes), "traces": traces}


def _trace(found: OpenRun, trace: dict[str, Any]) -> dict[str, Any]:
    credit = found.annotations.credit(trace["id"])
    nodes = [
        {
            "parent": node["parent"],
            "role": node["role"],
            "sampled": node["sampled"],
            "content": node["content"],
            "tokens": len(node["token_ids"]),
        }
        for node in trace["nodes"]
    ]
    known = {"advantage": credit["advantage"], "trained_at": credit["step"]} if credit else {}
    return {**trace, "advantage": None, "trained_at": None, **known, "nodes": nodes}
