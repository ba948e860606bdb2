"""Computing the work of many simulated nodes in this process.

Work that has begun when the first result is needed overlaps in virtual time, and is computed together: by stacking the
nodes' parameters, or one after another. `workers.py` computes in other processes, at the same time as this one.
Stacking gives the same results within float tolerance; everything else gives the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from shoal.engines.stacking import STACK_SIZE, run_stacked
from shoal.runtime import Work
from shoal.training.trainer import Train

_NOTHING: Any = object()


class WorkItem:
    """A unit of work and, once computed, its result."""

    __slots__ = ("result", "work")

    def __init__(self, work: Work[Any]) -> None:
        self.work = work
        self.result: Any = _NOTHING

    @property
    def done(self) -> bool:
        return self.result is not _NOTHING


class Executor(Protocol):
    """A way to compute units of work that overlap in virtual time."""

    external_cpu_seconds: float
    """Processor time of workers that are not children of this process."""

    @property
    def trained_together(self) -> bool:
        """Whether some nodes were trained together in a stack."""
        ...

    def submit(self, item: WorkItem) -> None:
        """Take an item, which is computed at some time between this call and the end of `finish`."""
        ...

    def discard(self, item: WorkItem) -> None:
        """Forget a submitted item, whose result is not needed."""
        ...

    def finish(self, item: WorkItem) -> None:
        """Compute until the submitted item has its result."""
        ...

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        """Compute work that was not submitted, and return the results."""
        ...

    def close(self) -> None: ...


class SequentialExecutor:
    """Computes one item after another, when its result is needed."""

    external_cpu_seconds = 0.0
    trained_together = False

    def submit(self, item: WorkItem) -> None:
        """Nothing: `finish` computes it."""

    def discard(self, item: WorkItem) -> None:
        """Nothing to forget."""

    def finish(self, item: WorkItem) -> None:
        item.result = item.work.run()

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        return [work.run() for work in works]

    def close(self) -> None:
        """Nothing to release."""


class StackedExecutor:
    """Computes items with equal batch keys in one call, and the rest one after another.

    When the result of an item is needed, the items that were submitted before and after it are computed with it. No
    event until the end of their work in virtual time can change their results.
    """

    external_cpu_seconds = 0.0

    def __init__(self) -> None:
        self._pending: dict[WorkItem, None] = {}
        self._notices = StackingNotices()

    @property
    def trained_together(self) -> bool:
        return self._notices.trained_together

    def submit(self, item: WorkItem) -> None:
        self._pending[item] = None

    def discard(self, item: WorkItem) -> None:
        self._pending.pop(item, None)

    def finish(self, item: WorkItem) -> None:
        if item.done:
            return
        del self._pending[item]
        chosen = [item, *islice(self._pending, STACK_SIZE - 1)]
        for other in chosen[1:]:
            del self._pending[other]
        for done, result in zip(chosen, self._run([one.work for one in chosen]), strict=True):
            done.result = result

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        return [result for i in range(0, len(works), STACK_SIZE) for result in self._run(works[i : i + STACK_SIZE])]

    def _run(self, works: Sequence[Work[Any]]) -> list[Any]:
        results, reasons = run_stacked(works)
        self._notices.note(works, reasons)
        return results

    def close(self) -> None:
        """Nothing to release."""


class StackingNotices:
    """Notes whether nodes were computed together, and warns of the first ones that were not."""

    def __init__(self) -> None:
        self.trained_together = False
        self._warned: set[str] = set()

    def note(self, works: Sequence[Work[Any]], reasons: Sequence[str | None]) -> None:
        """`reasons` are those of `run_stacked`."""
        for what, kind in (("trained", True), ("evaluated", False)):
            found = [reason for work, reason in zip(works, reasons, strict=True) if isinstance(work, Train) == kind]
            if kind and "" in found:
                self.trained_together = True
            failed = [reason for reason in found if reason]
            if failed and what not in self._warned:
                self._warned.add(what)
                warnings.warn(
                    f"simulation.batching = 'vmap': {len(failed)} nodes are {what} one by one from now on: {failed[0]}",
                    stacklevel=2,
                )
