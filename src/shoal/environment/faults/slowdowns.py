"""Slow faults that overlap: the factors by which each node is slow."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

from shoal.types import NodeId

if TYPE_CHECKING:
    from shoal.environment.faults.events import FaultEvent

Target: TypeAlias = Literal["compute", "network"]


class Slowdowns:
    """The active slow faults of all nodes.

    The factor of a node is the product of the factors of its active faults. Of the faults without an end, only the
    latest counts. Computation and messages have separate factors.
    """

    def __init__(self) -> None:
        self._lasting: dict[tuple[NodeId, Target], float] = {}
        """The factors of the latest faults without an end."""
        self._ending: defaultdict[tuple[NodeId, Target], list[float]] = defaultdict(list)
        """The factors of active faults with an end."""

    def combined(self, event: FaultEvent) -> Iterator[FaultEvent]:
        """Apply the start or the end of a slow fault. Yields events with the factors that result, nodes with equal
        factors together."""
        targets: tuple[Target, ...] = ("compute", "network") if event.what == "both" else (event.what,)
        for node in event.nodes:
            for target in targets:
                self._change(event, (node, target))
        groups: dict[tuple[float, ...], list[NodeId]] = {}
        for node in event.nodes:
            groups.setdefault(tuple(self._factor((node, target)) for target in targets), []).append(node)
        for factors, nodes in groups.items():
            if len(set(factors)) == 1:
                yield dataclasses.replace(event, nodes=tuple(nodes), value=factors[0])
                continue
            for target, factor in zip(targets, factors, strict=True):
                yield dataclasses.replace(event, nodes=tuple(nodes), value=factor, what=target)

    def _change(self, event: FaultEvent, key: tuple[NodeId, Target]) -> None:
        if event.ended_value is not None:
            self._ending[key].remove(event.ended_value)
        elif event.has_end:
            self._ending[key].append(event.value)
        else:
            self._lasting[key] = event.value

    def _factor(self, key: tuple[NodeId, Target]) -> float:
        # Sorted: the last bit must not depend on the order in which faults started.
        return math.prod(sorted((self._lasting.get(key, 1.0), *self._ending[key])))
