"""The mapping of nodes to machines: plain data that a launcher reads.

A mapping has one method, `place(nodes, assigned, machines)`, which names a machine for every node. The result is
written to `mapping.json` in the run's folder: the machines, and the nodes on each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.types import NodeId, NodeIds, format_node_ids, parse_node_ids

Machine: TypeAlias = str
LOCALHOST: Machine = "localhost"


@dataclass(frozen=True)
class MachineInfo:
    """A machine that can run nodes."""

    name: Machine = LOCALHOST
    cores: int = 1
    memory: int = 1
    """Bytes that are available."""


THIS_MACHINE = (MachineInfo(),)

MAPPINGS: dict[str, str] = {
    "cores": "shoal.experiment.mapping:ByCores",
    "memory": "shoal.experiment.mapping:ByMemory",
    "linear": "shoal.experiment.mapping:Linear",
    "by-group": "shoal.experiment.mapping:ByGroup",
    "explicit": "shoal.experiment.mapping:Explicit",
}


class NodeMapping(Protocol):
    """The interface of a mapping."""

    def place(
        self, nodes: int, assigned: Mapping[NodeId, Machine], machines: Sequence[MachineInfo] = THIS_MACHINE
    ) -> list[Machine]:
        """Return the machine of each node; `assigned` holds the machines that groups name, `machines` all machines.

        Raises ValueError if the mapping does not fit the nodes.
        """
        ...


@dataclass(frozen=True)
class ByCores:
    """Consecutive blocks of nodes on all machines, in proportion to their cores."""

    def place(
        self, nodes: int, assigned: Mapping[NodeId, Machine], machines: Sequence[MachineInfo] = THIS_MACHINE
    ) -> list[Machine]:
        return _in_proportion(nodes, [(machine.name, machine.cores) for machine in machines])


@dataclass(frozen=True)
class ByMemory:
    """Consecutive blocks of nodes on all machines, in proportion to their available memory."""

    def place(
        self, nodes: int, assigned: Mapping[NodeId, Machine], machines: Sequence[MachineInfo] = THIS_MACHINE
    ) -> list[Machine]:
        return _in_proportion(nodes, [(machine.name, machine.memory) for machine in machines])


@dataclass(frozen=True)
class Linear:
    """Consecutive blocks of nodes on the machines in order; the sizes of blocks differ by at most one."""

    machines: tuple[Machine, ...] | None = None
    """Default: all machines."""

    def __post_init__(self) -> None:
        if self.machines is not None:
            _check_names(self.machines)

    def place(
        self, nodes: int, assigned: Mapping[NodeId, Machine], machines: Sequence[MachineInfo] = THIS_MACHINE
    ) -> list[Machine]:
        names = self.machines or tuple(machine.name for machine in machines)
        return _in_proportion(nodes, [(name, 1) for name in names])


@dataclass(frozen=True)
class ByGroup:
    """Every node on the machine of its group (`[[group]] machine = …`), all other nodes on `otherwise`."""

    otherwise: Machine | None = None
    """Default: the first machine."""

    def place(
        self, nodes: int, assigned: Mapping[NodeId, Machine], machines: Sequence[MachineInfo] = THIS_MACHINE
    ) -> list[Machine]:
        return [assigned.get(node, self.otherwise or machines[0].name) for node in range(nodes)]


@dataclass(frozen=True)
class Explicit:
    """Every node on the machine that lists it: machines = { "a" = "0-3, 8", "b" = "4-7" }."""

    machines: Mapping[Machine, NodeIds]

    def place(
        self, nodes: int, assigned: Mapping[NodeId, Machine], machines: Sequence[MachineInfo] = THIS_MACHINE
    ) -> list[Machine]:
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


def _in_proportion(nodes: int, weights: Sequence[tuple[Machine, int]]) -> list[Machine]:
    """Consecutive blocks of nodes, whose sizes are proportional to the weights up to rounding."""
    total = sum(weight for _, weight in weights)
    placed: list[Machine] = []
    up_to = 0
    for name, weight in weights:
        up_to += weight
        placed += [name] * (-(-up_to * nodes // total) - len(placed))
    return placed


def _check_names(machines: Sequence[Machine]) -> None:
    if not machines or len(set(machines)) != len(machines) or not all(machines):
        raise ValueError(f"machines = {list(machines)}: expected the names of one or more machines, all different")
