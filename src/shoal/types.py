"""Types that every package uses: node ids, parameter vectors, and limits of component parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

NodeId: TypeAlias = int
"""Nodes that train have the ids 0 to nodes − 1. Service nodes, such as a server, follow."""

Params: TypeAlias = NDArray[np.float32]
"""A model as one flat float32 vector."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a number, for use in `Annotated`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def allows(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = (
            ("at least", self.at_least),
            ("above", self.above),
            ("at most", self.at_most),
            ("below", self.below),
        )
        return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


@dataclass(frozen=True)
class Nested:
    """For use in `Annotated`: the parameter is a component of this kind, written as a table with a name."""

    kind: str


@dataclass(frozen=True)
class FormerOption:
    """For use in `Annotated`: an earlier name of the parameter. Experiments may still use it, and Shoal warns."""

    name: str
    values: tuple[tuple[str, str], ...] = ()
    """Earlier names of values with the current name of each. They are accepted together with the earlier `name`."""


@dataclass(frozen=True)
class NodeIdText:
    """For use in `Annotated`: the text names nodes, as `parse_node_ids` reads it."""


NodeIds: TypeAlias = Annotated[str, NodeIdText()]
"""Node ids and ranges of them in a text: "0-3, 8"."""


def parse_node_ids(text: str, nodes: int) -> list[NodeId]:
    """Return the node ids in a text such as "0-3, 8". Raises ValueError for other texts and ids of at least `nodes`."""
    found: list[NodeId] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match:
            raise ValueError(f"nodes = {text!r}: expected numbers and ranges such as '0-3, 8'")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"nodes = {text!r}: {part.strip()} counts down; did you mean {last}-{first}?")
        if last >= nodes:
            raise ValueError(f"nodes = {text!r}: there is no node {max(first, nodes)}; nodes = {nodes}")
        found.extend(range(first, last + 1))
    return found


def format_node_ids(ids: Iterable[NodeId], most: int | None = None) -> str:
    """Return a text that `parse_node_ids` reads: "0-3, 8". `most` limits its parts; the number of others follows."""
    runs: list[list[NodeId]] = []
    for node in sorted(ids):
        if runs and node == runs[-1][1] + 1:
            runs[-1][1] = node
        else:
            runs.append([node, node])
    shown = runs if most is None else runs[:most]
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in shown)
    left = sum(last - first + 1 for first, last in runs[len(shown) :])
    return f"{text} and {left} more" if left else text


def frozen(params: Params) -> Params:
    """Make `params` read-only and return it, so that messages can share it without a copy."""
    params.setflags(write=False)
    return params
