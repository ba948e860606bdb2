"""The runs that pages look at. A run is read only while a page shows it, at most twice a second."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec

from shoal.dashboard.details import experiment_details, node_details
from shoal.dashboard.feed import RunFeed
from shoal.dashboard.layout import Points, positions
from shoal.dashboard.runs import RunInfo, Runs, read_summary
from shoal.dashboard.views import changes, state_at, timeline
from shoal.errors import DataError
from shoal.results.progress import Status
from shoal.types import NodeId

UPDATE_SECONDS = 0.5
MAX_SHARE = 0.085
"""The largest share of one processor core that reading a run may take: a longer read makes updates less frequent."""
MAX_FEEDS = 32
"""So many runs stay in memory: more than one page may show at once."""

R = TypeVar("R")
_encode = msgspec.json.Encoder().encode
_FINAL: tuple[Status, ...] = ("completed", "incomplete", "failed", "interrupted")


class WatchedRun:
    """A run in memory. Its methods with `feed` run in a thread, one at a time."""

    def __init__(self, runs: Runs, id: str) -> None:
        self.feed = RunFeed(runs.find(id))
        self._runs, self._id = runs, id
        self._name = secrets.token_hex(4)
        """A cursor of another server, or of a run that was read again, has another name."""
        self._info: RunInfo | None = None
        self._lock = asyncio.Lock()
        self.due = 0.0
        """When the run is read again, on the monotonic clock."""
        self._points: Points | None = None

    async def use(self, work: Callable[[RunFeed], R]) -> R:
        """Read what is new, unless it was read just now, and call `work`."""
        async with self._lock:
            return await asyncio.to_thread(self._use, work)

    def _use(self, work: Callable[[RunFeed], R]) -> R:
        if (now := time.monotonic()) >= self.due:
            began, is_first = time.thread_time(), self.feed.version == 0
            try:
                self.feed.refresh()
                self._read_info()
            finally:
                cost = 0.0 if is_first else time.thread_time() - began
                self.due = now + max(UPDATE_SECONDS, cost / MAX_SHARE)
        return work(self.feed)

    def _read_info(self) -> None:
        info = self._runs.info(self._id)
        if info.status in _FINAL:
            if self._info is None or self._info.status != info.status:
                self.feed.refresh()  # the summary is written after the last record
            try:
                lost = read_summary(self.feed.folder).get("lost", {}) if not self.feed.is_limited else {}
            except DataError:
                lost = {}
            self.feed.end(lost if isinstance(lost, dict) else {})
        if self._info not in (None, info):
            self.feed.version += 1  # pages get it
        self._info = info

    def changes(self, cursor: str, with_nodes: bool) -> Callable[[RunFeed], dict[str, Any] | None]:
        """Return a function that returns what changed since `cursor`; None if nothing did."""

        def work(feed: RunFeed) -> dict[str, Any] | None:
            prefix = f"{self._name}.{feed.incarnation}"
            known, _, number = cursor.rpartition(":")
            since = int(number) if known == prefix and number.isdecimal() else 0
            assert self._info is not None
            if since == feed.version and known == prefix:
                return None
            found = changes(feed, since, with_nodes)
            info = asdict(self._info)
            return {"run": self._id, "cursor": f"{prefix}:{feed.version}", "reset": since == 0, "info": info, **found}

        return work

    def layout(self, feed: RunFeed) -> dict[str, Any]:
        """Return the positions of the nodes; they change only if nodes were added."""
        if self._points is None or len(self._points) != len(feed.ids):
            self._points = positions(feed)
        x, y = self._points.T.round(4).tolist()
        return {"id": feed.ids, "x": x, "y": y}


class Hub:
    """All runs, for all pages."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._watched: OrderedDict[str, WatchedRun] = OrderedDict()

    def watched(self, id: str) -> WatchedRun:
        """Return a run. Raises `DataError` if there is none."""
        found = self._watched.get(id)
        if found is None:
            found = self._watched[id] = WatchedRun(self.runs, id)
            while len(self._watched) > MAX_FEEDS:
                self._watched.popitem(last=False)
        self._watched.move_to_end(id)
        return found

    async def all_runs(self) -> list[RunInfo]:
        return await asyncio.to_thread(self.runs.all)

    async def changes(self, id: str, cursor: str, with_nodes: bool) -> dict[str, Any] | None:
        run = self.watched(id)
        return await run.use(run.changes(cursor, with_nodes))

    def next_update(self, ids: list[str]) -> float:
        """Return the seconds until one of these runs is read again."""
        dues = [self._watched[id].due for id in ids if id in self._watched]
        return max(0.05, min(dues) - time.monotonic()) if dues else UPDATE_SECONDS

    async def layout(self, id: str) -> dict[str, Any]:
        run = self.watched(id)
        return await run.use(run.layout)

    async def state(self, id: str, at: float) -> dict[str, Any]:
        return await self.watched(id).use(lambda feed: state_at(feed, at))

    async def timeline(
        self, id: str, first: int, count: int, start: float, end: float, bins: int, order: str
    ) -> dict[str, Any]:
        return await self.watched(id).use(lambda feed: timeline(feed, first, count, start, end, bins, order))

    async def node(self, id: str, node: NodeId, offset: int) -> dict[str, Any]:
        return await asyncio.to_thread(node_details, self.runs.find(id), node, offset)

    async def details(self, id: str) -> dict[str, Any]:
        return await asyncio.to_thread(experiment_details, self.runs.find(id))


def encode(value: object) -> bytes:
    """Return JSON; NaN becomes null."""
    return _encode(value)
