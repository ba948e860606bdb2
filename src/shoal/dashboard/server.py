"""The web application: the page, its data as JSON, and changes as server-sent events."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from shoal.dashboard.guard import Guard
from shoal.dashboard.hub import UPDATE_SECONDS, Hub, encode
from shoal.dashboard.runs import Runs
from shoal.errors import DataError, ShoalError

STATIC = Path(__file__).parent / "static"
KEEP_ALIVE_SECONDS = 15.0
"""A stream without changes sends a comment this often: a connection that was cut is noticed."""
MAX_STREAMED_RUNS = 24


def create_app(root: Path, host: str, token: str | None, stopping: threading.Event) -> Starlette:
    """Return the application that shows the runs in `root`. With a token, every request must have it.

    Streams end soon after `stopping` is set.
    """
    hub = Hub(Runs(root))
    routes = [
        Route("/", _page),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/stream", _Stream(hub, stopping)),
        *(Route(f"/api/{name}", _json(read)) for name, read in _readers(hub).items()),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, host=host, token=token)])


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


Reader = Callable[["_Query"], Awaitable[Any]]


def _readers(hub: Hub) -> dict[str, Reader]:
    """Return what the page can read, by name."""

    async def timeline(query: _Query) -> Any:
        start, end = query.number("start"), query.number("end")
        if end <= start:
            raise DataError(f"end = {end:g}: expected a time after start = {start:g}")
        first, count, bins = query.integer("first"), query.integer("count"), max(1, query.integer("bins"))
        return await hub.timeline(query.run, first, count, start, end, bins, query.text("order", "node"))

    async def run_list(query: _Query) -> Any:
        return await hub.all_runs()

    return {
        "runs": run_list,
        "details": lambda query: hub.details(query.run),
        "layout": lambda query: hub.layout(query.run),
        "state": lambda query: hub.state(query.run, query.number("at")),
        "node": lambda query: hub.node(query.run, query.integer("node"), query.integer("offset", "0")),
        "timeline": timeline,
    }


class _Query:
    """The parameters of a request. All methods raise `DataError` for a wrong value."""

    def __init__(self, request: Request) -> None:
        self._values = request.query_params

    @property
    def run(self) -> str:
        return self.text("run")

    def text(self, name: str, default: str | None = None) -> str:
        found = self._values.get(name, default)
        if found is None:
            raise DataError(f"{name}: missing")
        return found

    def number(self, name: str) -> float:
        text = self.text(name)
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise DataError(f"{name} = {text!r}: expected a number")
        return found

    def integer(self, name: str, default: str | None = None) -> int:
        text = self.text(name, default)
        if not text.isascii() or not text.isdecimal() or len(text) > 12:
            raise DataError(f"{name} = {text!r}: expected a whole number")
        return int(text)


def _json(read: Reader) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            content, status = await read(_Query(request)), 200
        except ShoalError as error:
            content, status = {"error": str(error)}, 404
        return Response(encode(content), status, media_type="application/json")

    return respond


class _Stream:
    """Server-sent events: the list of runs, or the changes of runs. One connection per page is enough."""

    def __init__(self, hub: Hub, stopping: threading.Event) -> None:
        self._hub, self._stopping = hub, stopping

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        query = Request(scope).query_params
        runs = query.getlist("run")[:MAX_STREAMED_RUNS]
        cursors = dict(zip(runs, query.getlist("cursor"), strict=False))
        parts = self._runs(runs, cursors, query.get("nodes") == "1") if runs else self._list()
        await StreamingResponse(_kept_alive(parts), media_type="text/event-stream")(scope, receive, send)

    async def _list(self) -> AsyncIterator[bytes | float]:
        sent = b""
        while not self._stopping.is_set():
            found = encode(await self._hub.all_runs())
            if found != sent:
                yield _event("runs", found)
            sent = found
            yield UPDATE_SECONDS

    async def _runs(self, runs: list[str], cursors: dict[str, str], with_nodes: bool) -> AsyncIterator[bytes | float]:
        problems: set[str] = set()
        while not self._stopping.is_set():
            for run in runs:
                try:
                    found = await self._hub.changes(run, cursors.get(run, ""), with_nodes)
                except ShoalError as error:
                    if run not in problems:
                        problems.add(run)
                        yield _event("problem", encode({"run": run, "error": str(error)}))
                    continue
                if found is not None:
                    cursors[run] = found["cursor"]
                    yield _event("run", encode(found))
            yield self._hub.next_update(runs)


def _event(kind: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


async def _kept_alive(parts: AsyncIterator[bytes | float]) -> AsyncIterator[bytes]:
    """Pass events on. A number ends an update: the seconds to wait before the next one."""
    quiet = 0.0
    async for part in parts:
        if isinstance(part, bytes):
            quiet = 0.0
            yield part
            continue
        await asyncio.sleep(part)
        quiet += part
        if quiet >= KEEP_ALIVE_SECONDS:
            quiet = 0.0
            yield b": still here\n\n"
