"""Which node runs where: plain data, which a launcher reads.

A mapping is a recipe with one method, `place(nodes, machines_of_groups)`, that names a machine for every node. What
comes of it is written into the run's folder as `mapping.json`: machines, and the nodes on each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.types import NodeId, format_node_ids, parse_node_ids

Machine: TypeAlias = str
LOCALHOST: Machine = "localhost"

MAPPINGS: dict[str, str] = {
    "linear": "shoal.experiment.mapping:Linear",
    "by-group": "shoal.experiment.mapping:ByGroup",
    "explicit": "shoal.experiment.mapping:Explicit",
}


class NodeMapping(Protocol):
    """What a mapping is."""

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        """A machine for each of `nodes` nodes; `assigned` is what their groups say. Raises ValueError if none fits."""
        ...


@dataclass(frozen=True)
class Linear:
    """Nodes in order over the machines in order: blocks of consecutive nodes, equal to within one."""

    machines: tuple[Machine, ...] = (LOCALHOST,)

    def __post_init__(self) -> None:
        _require_different(self.machines)

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        return [self.machines[node * len(self.machines) // nodes] for node in range(nodes)]


@dataclass(frozen=True)
class ByGroup:
    """Every node on the machine that its group names (`[[group]] machine = …`), the others on `otherwise`."""

    otherwise: Machine = LOCALHOST

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        return [assigned.get(node, self.otherwise) for node in range(nodes)]


@dataclass(frozen=True)
class Explicit:
    """Every node where it is said to be: machines = { "a" = "0-3, 8", "b" = "4-7" }."""

    machines: Mapping[Machine, str]

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        where: dict[NodeId, Machine] = {}
        for machine, spelt in self.machines.items():
            for node in parse_node_ids(spelt, nodes):
                if node in where:
                    raise ValueError(f"node {node} is placed twice, on {where[node]!r} and on {machine!r}")
                where[node] = machine
        if lacking := [node for node in range(nodes) if node not in where]:
            raise ValueError(f"no machine for nodes {format_node_ids(lacking)}")
        return [where[node] for node in range(nodes)]


def by_machine(machines: Sequence[Machine]) -> dict[Machine, list[NodeId]]:
    """The nodes on each machine, given the machine of each node."""
    placed: dict[Machine, list[NodeId]] = {}
    for node, machine in enumerate(machines):
        placed.setdefault(machine, []).append(node)
    return placed


def _require_different(machines: Sequence[Machine]) -> None:
    if not machines or len(set(machines)) != len(machines) or not all(machines):
        raise ValueError(f"machines = {list(machines)}: expected the names of one or more machines, all different")
