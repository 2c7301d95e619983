"""The page and its JSON routes. Every route reads; runs are named by id, rows and attempts by number."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from prl.dashboard import configs, logs, timeline
from prl.dashboard.catalog import Catalog, UnknownRun
from prl.dashboard.charts import curated
from prl.dashboard.episode_routes import episode_routes
from prl.dashboard.reply import reply
from prl.dashboard.security import Gate
from prl.dashboard.shelf import OpenRun, Shelf
from prl.dashboard.summary import Summaries, status_text

STATIC = Path(__file__).parent / "static"
MOST_RUNS = 8
MOST_KEYS = 64
MOST_POINTS = 2000


def make_app(roots: Callable[[], Sequence[Path]]) -> Gate:
    """The ASGI application over the runs below `roots()`."""
    app = FastAPI(title="prl dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    catalog, shelf, summaries = Catalog(roots), Shelf(), Summaries()

    def opened(run_id: str) -> OpenRun:
        return shelf.take(catalog.get(run_id))

    app.add_exception_handler(UnknownRun, _no_such_run)
    app.add_exception_handler(IndexError, _no_such_row)
    app.include_router(_run_list(catalog, summaries), prefix="/api")
    app.include_router(_metric_routes(opened), prefix="/api/runs/{run_id}")
    app.include_router(_text_routes(catalog, summaries), prefix="/api/runs/{run_id}")
    app.include_router(episode_routes(opened, summaries), prefix="/api/runs/{run_id}")
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/")
    def front_page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/health")
    def health() -> Response:
        return reply({"service": "prl dashboard", "host": socket.gethostname()})

    return Gate(app)


def _run_list(catalog: Catalog, summaries: Summaries) -> APIRouter:
    routes = APIRouter()

    @routes.get("/runs")
    def runs() -> Response:
        rows = [summaries.row(run) for run in catalog.runs()]
        return reply(sorted(rows, key=lambda row: (-(row["heard"] or 0.0), row["path"])))

    @routes.get("/diff")
    def diff(run: Annotated[list[str], Query(max_length=MOST_RUNS)]) -> Response:
        """Where the newest configs of up to eight runs differ."""
        chosen = [catalog.get(run_id) for run_id in run]
        trees = [summaries.config(one, max(one.attempts(), default=0)) for one in chosen]
        rows = configs.differences([configs.flat(tree) for tree in trees])
        return reply({"runs": [{"id": one.id, "name": one.name} for one in chosen], "rows": rows})

    return routes


def _metric_routes(opened: Callable[[str], OpenRun]) -> APIRouter:
    routes = APIRouter()

    @routes.get("/metrics")
    def metrics(run_id: str) -> Response:
        """Names and newest values of all curves, and the curated charts."""
        table = opened(run_id).metrics
        revision = table.refresh()
        values = table.last_values()
        return reply({"revision": revision, "values": values, "charts": curated(values)})

    @routes.get("/series")
    def series(
        run_id: str,
        key: Annotated[list[str], Query(max_length=MOST_KEYS)],
        axis: Annotated[str, Query(pattern="^(step|time)$")] = "step",
        points: Annotated[int, Query(ge=2, le=MOST_POINTS)] = 600,
        revision: int | None = None,
    ) -> Response:
        """Points of the named curves; 204 if nothing was added since `revision`."""
        table = opened(run_id).metrics
        newest = table.refresh()
        if newest == revision:
            return Response(status_code=204)
        found = {name: table.points(name, axis, points) for name in key}
        return reply({"revision": newest, "series": {n: p for n, p in found.items() if p is not None}})

    @routes.get("/timeline")
    def who_waits(run_id: str, last: Annotated[int, Query(ge=1, le=200)] = 40) -> Response:
        """Lanes of the newest steps, and the rollouts in flight over the same time."""
        from prl.dashboard.episode_query import in_flight

        found = opened(run_id)
        found.metrics.refresh()
        told = timeline.timeline(found.metrics, last)
        edges = [
            at
            for lane in told["lanes"]
            for step in lane["steps"]
            for _, begin, length in step["segments"]
            for at in (begin, begin + length)
        ]
        if edges:
            found.episodes.refresh()
            told["in_flight"] = in_flight(found.episodes, min(edges), max(edges))
        return reply(told)

    return routes


def _text_routes(catalog: Catalog, summaries: Summaries) -> APIRouter:
    routes = APIRouter()

    @routes.get("")
    def summary(run_id: str) -> Response:
        run = catalog.get(run_id)
        results = run.inside(run.path / "results.md")
        text = results.read_text(errors="replace") if results else None
        return reply({**summaries.row(run), "attempt_numbers": run.attempts(), "results": text})

    @routes.get("/config")
    def config(run_id: str, attempt: int) -> Response:
        run = catalog.get(run_id)
        values = configs.flat(summaries.config(run, attempt))
        return reply({"values": values, "command": configs.command_of(run, attempt)})

    @routes.get("/attempts/diff")
    def attempts_diff(run_id: str) -> Response:
        """Where the configs of the attempts of one run differ."""
        run = catalog.get(run_id)
        flat = [configs.flat(summaries.config(run, attempt)) for attempt in run.attempts()]
        return reply({"attempts": run.attempts(), "rows": configs.differences(flat)})

    @routes.get("/logs")
    def merged_logs(
        run_id: str,
        attempt: int,
        level: str = "DEBUG",
        component: Annotated[list[str] | None, Query()] = None,
        text: str = "",
        limit: Annotated[int, Query(ge=1, le=logs.MOST_LINES)] = 1000,
    ) -> Response:
        asked = logs.Filter(level, tuple(component or ()), text, limit)
        return reply(logs.merged(catalog.get(run_id), attempt, asked))

    @routes.get("/status")
    def status(run_id: str) -> Response:
        return reply({"text": status_text(catalog.get(run_id))})

    return routes


async def _no_such_run(request: Any, error: Exception) -> Response:
    return Response(json.dumps({"error": "no such run"}), status_code=404, media_type="application/json")


async def _no_such_row(request: Any, error: Exception) -> Response:
    return Response(json.dumps({"error": "no such episode"}), status_code=404, media_type="application/json")
