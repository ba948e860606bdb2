"""How many nodes fit on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.engines.operating_system import MIB, available_memory, process_limit, raise_file_limit
from shoal.errors import LaunchError

NODE_MIB = 14.0
"""Private and kernel memory of a node without its models (see benchmarks/processes.py)."""
MODELS_PER_NODE = 14
"""Vectors of the model's size that a node may hold at once: its model, a gradient, messages in and out."""
OWN_MODELS = 4
"""Of these, the vectors of the node itself. The others are models of its neighbours."""
SHARED_MIB = 600.0
"""Memory of the zygote and the coordinator."""
THREADS_PER_NODE = 4
"""The event loop, the training thread, and ZeroMQ's two."""
KEPT_SHARE = 0.5
"""The share of free memory that nodes use at most if they keep the memory of their trainings."""
FREE_SHARE = 0.25
"""Nodes stop keeping it when less than this share of the memory that was free at their start is left."""
RESERVED_FILES = 64
"""Open files that the coordinator needs in addition to one connection per node."""


@dataclass(frozen=True)
class Capacity:
    """The limits of this machine, in nodes."""

    by_memory: int
    by_files: int
    by_processes: int

    @property
    def nodes(self) -> int:
        return max(0, min(self.by_memory, self.by_files, self.by_processes))

    @property
    def reason(self) -> str:
        """The limit that is reached first."""
        if self.nodes == max(0, self.by_memory):
            return "free memory"
        if self.nodes == max(0, self.by_files):
            return "the limit of open files (ulimit -n)"
        return "the limit of processes (ulimit -u)"


def capacity(parameters: int) -> Capacity:
    """The limits for nodes whose model has this many parameters."""
    return Capacity(
        by_memory=int((available_memory() / MIB - SHARED_MIB) / _node_mib(parameters)),
        by_files=raise_file_limit() - RESERVED_FILES,
        by_processes=process_limit() // THREADS_PER_NODE,
    )


def _node_mib(parameters: int) -> float:
    return NODE_MIB + MODELS_PER_NODE * parameters * 4 / MIB


@dataclass(frozen=True)
class KeptMemory:
    """How much freed memory a node keeps for its next training, instead of returning it to the system."""

    most: int = 0
    """Bytes; with more, the node returns everything, for example after it has dropped many messages."""
    min_free: float = math.inf
    """Bytes of the machine that must be free; with less, the node keeps nothing."""


def kept_memory(nodes: int, parameters: int, training_bytes: int) -> KeptMemory:
    """What each of so many nodes may keep, if a training needs `training_bytes`."""
    free = available_memory()
    needed = nodes * (_node_mib(parameters) * MIB + training_bytes)
    if needed > KEPT_SHARE * free:
        return KeptMemory()
    return KeptMemory(2 * training_bytes + MODELS_PER_NODE * parameters * 4, FREE_SHARE * free)


def memory_warning(nodes: int, parameters: int, neighbours: float) -> str | None:
    """Return a warning if nodes with so many neighbours on average may need more memory than is free.

    It is no error: not every algorithm receives from all neighbours of a graph, or keeps all models of a round.
    """
    free = available_memory() / MIB
    needed = SHARED_MIB + nodes * (NODE_MIB + (OWN_MODELS + neighbours) * parameters * 4 / MIB)
    if needed <= free:
        return None
    return (
        f"a node has {neighbours:.3g} neighbours on average, and may receive as many models of {parameters:,} "
        f"parameters in a round: {nodes} nodes may need {needed / 1024:.1f} GiB, and {free / 1024:.1f} GiB are free. "
        "If memory runs out, the system kills nodes; use fewer nodes, or a topology with fewer neighbours"
    )


def check_capacity(nodes: int, services: int, parameters: int) -> None:
    """Raise `LaunchError` if this machine cannot run so many training nodes and service nodes."""
    limits = capacity(parameters)
    if nodes + services > limits.nodes:
        with_services = f" and {services} service node{'s' if services > 1 else ''}" if services else ""
        raise LaunchError(
            f"nodes = {nodes}{with_services}: about {limits.nodes} nodes with a model of {parameters:,} parameters fit "
            f"on this machine, limited by {limits.reason}; use fewer nodes, or engine = 'simulation'"
        )
