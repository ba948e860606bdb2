"""The mapping of nodes to machines: plain data that a launcher reads.

A mapping has one method, `place(nodes, assigned)`, which names a machine for every node. The result is written to
`mapping.json` in the run's folder: the machines, and the nodes on each.
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
    """The interface of a mapping."""

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        """Return the machine of each node; `assigned` holds the machines that groups name.

        Raises ValueError if the mapping does not fit the nodes.
        """
        ...


@dataclass(frozen=True)
class Linear:
    """Consecutive blocks of nodes on the machines in order; the sizes of blocks differ by at most one."""

    machines: tuple[Machine, ...] = (LOCALHOST,)

    def __post_init__(self) -> None:
        _check_names(self.machines)

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        return [self.machines[node * len(self.machines) // nodes] for node in range(nodes)]


@dataclass(frozen=True)
class ByGroup:
    """Every node on the machine of its group (`[[group]] machine = …`), all other nodes on `otherwise`."""

    otherwise: Machine = LOCALHOST

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        return [assigned.get(node, self.otherwise) for node in range(nodes)]


@dataclass(frozen=True)
class Explicit:
    """Every node on the machine that lists it: machines = { "a" = "0-3, 8", "b" = "4-7" }."""

    machines: Mapping[Machine, str]

    def place(self, nodes: int, assigned: Mapping[NodeId, Machine]) -> list[Machine]:
        placed: dict[NodeId, Machine] = {}
        for machine, ids in self.machines.items():
            for node in parse_node_ids(ids, nodes):
                if node in placed:
                    raise ValueError(f"node {node} is placed twice, on {placed[node]!r} and on {machine!r}")
                placed[node] = machine
        if missing := [node for node in range(nodes) if node not in placed]:
            raise ValueError(f"no machine for nodes {format_node_ids(missing)}")
        return [placed[node] for node in range(nodes)]


def by_machine(machines: Sequence[Machine]) -> dict[Machine, list[NodeId]]:
    """Return the nodes on each machine, given the machine of each node."""
    placed: dict[Machine, list[NodeId]] = {}
    for node, machine in enumerate(machines):
        placed.setdefault(machine, []).append(node)
    return placed


def _check_names(machines: Sequence[Machine]) -> None:
    if not machines or len(set(machines)) != len(machines) or not all(machines):
        raise ValueError(f"machines = {list(machines)}: expected the names of one or more machines, all different")
