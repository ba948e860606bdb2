"""Computing the work of many nodes together, with their parameters stacked in a matrix."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from shoal.training.module_draws import NotStackableError
from shoal.training.trainer import Train

STACK_SIZE = 256
"""How many nodes are stacked at once: enough to hide the overhead, few enough for the caches."""


def run_stacked(works: Sequence[Any]) -> tuple[list[Any], list[str | None]]:
    """Compute works (`shoal.runtime.Work`) with equal batch keys in one call, and the rest one after another.

    Returns the results and, for each work, whether it was computed together with others: "" if it was, the reason if
    that turned out to be impossible, None if no other work has its key.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, work in enumerate(works):
        groups.setdefault(work.batch_key, []).append(i)
    results: list[Any] = [None] * len(works)
    reasons: list[str | None] = [None] * len(works)
    for members in groups.values():
        if len(members) == 1:
            results[members[0]] = works[members[0]].run()
            continue
        for i, result, reason in zip(members, *_run_group([works[i] for i in members]), strict=True):
            results[i], reasons[i] = result, reason
    return results, reasons


def _run_group(group: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Compute works with one batch key together or, if that turns out to be impossible, one after another."""
    try:
        done = group[0].run_batch(group)
    except NotStackableError as error:
        return [work.run() for work in group], [str(error)] * len(group)
    return done, [trained.not_batched for trained in done] if isinstance(group[0], Train) else [""] * len(group)
