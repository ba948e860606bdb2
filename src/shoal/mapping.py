"""Which node runs where: plain data, which a launcher reads.

A mapping is a recipe with one method, `place(nodes, machines_of_groups)`, that names a machine for every node. What
comes of it is written into the run's folder as `mapping.json`: machines, and the nodes on each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.topologies.graph import NodeId

Machine: TypeAlias = str
HERE: Machine = "localhost"

MAPPINGS: dict[str, str] = {
    "linear": "shoal.mapping:Linear",
    "by-group": "shoal.mapping:ByGroup",
    "explicit": "shoal.mapping:Explicit",
}


class Placing(Protocol):
    """What a mapping is."""

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        """A machine for each of `nodes` nodes; `assigned` is what their groups say. Raises ValueError if none fits."""
        ...


@dataclass(frozen=True)
class Linear:
    """Nodes in order over the machines in order: blocks of consecutive nodes, equal to within one."""

    machines: tuple[Machine, ...] = (HERE,)

    def __post_init__(self) -> None:
        _require_different(self.machines)

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        return [self.machines[node * len(self.machines) // nodes] for node in range(nodes)]


@dataclass(frozen=True)
class ByGroup:
    """Every node on the machine that its group names (`[[group]] machine = …`), the others on `otherwise`."""

    otherwise: Machine = HERE

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        return [assigned.get(node, self.otherwise) for node in range(nodes)]


@dataclass(frozen=True)
class Explicit:
    """Every node where it is said to be: machines = { "a" = "0-3, 8", "b" = "4-7" }."""

    machines: Mapping[Machine, str]

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        where: dict[NodeId, Machine] = {}
        for machine, spelt in self.machines.items():
            for node in node_ids(spelt, nodes):
                if node in where:
                    raise ValueError(f"node {node} is placed twice, on {where[node]!r} and on {machine!r}")
                where[node] = machine
        if lacking := [node for node in range(nodes) if node not in where]:
            raise ValueError(f"no machine for nodes {spelt_ids(lacking)}")
        return [where[node] for node in range(nodes)]


def node_ids(spelt: str, nodes: int) -> list[NodeId]:
    """The nodes that a text such as "0-3, 8" names, of so many. Raises ValueError for anything else."""
    found: list[NodeId] = []
    for part in spelt.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match:
            raise ValueError(f"nodes = {spelt!r}: expected numbers and ranges such as '0-3, 8'")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"nodes = {spelt!r}: {part.strip()} counts down; did you mean {last}-{first}?")
        if last >= nodes:
            raise ValueError(f"nodes = {spelt!r}: there is no node {max(first, nodes)}; nodes = {nodes}")
        found.extend(range(first, last + 1))
    return found


def spelt_ids(ids: Iterable[NodeId], most: int | None = None) -> str:
    """What `node_ids` reads: "0-3, 8". With `most`, so many of its parts at most, and how many nodes follow."""
    runs: list[list[NodeId]] = []
    for node in sorted(ids):
        if runs and node == runs[-1][1] + 1:
            runs[-1][1] = node
        else:
            runs.append([node, node])
    shown = runs if most is None else runs[:most]
    spelt = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in shown)
    left = sum(last - first + 1 for first, last in runs[len(shown) :])
    return f"{spelt} and {left} more" if left else spelt


def by_machine(machines: Sequence[Machine]) -> dict[Machine, list[NodeId]]:
    """The nodes on each machine, given the machine of each node."""
    placed: dict[Machine, list[NodeId]] = {}
    for node, machine in enumerate(machines):
        placed.setdefault(machine, []).append(node)
    return placed


def _require_different(machines: Sequence[Machine]) -> None:
    if not machines or len(set(machines)) != len(machines) or not all(machines):
        raise ValueError(f"machines = {list(machines)}: expected the names of one or more machines, all different")
