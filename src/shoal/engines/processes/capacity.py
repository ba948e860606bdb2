"""How many nodes fit on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.engines.operating_system import MIB, available_memory, process_limit, raise_file_limit

NODE_MIB = 14.0
"""Private and kernel memory of a node beside its models (see benchmarks/processes.py)."""
MODELS_PER_NODE = 14
"""Vectors of the model's size that a node may hold at once: its own, a gradient, messages in and out."""
SHARED_MIB = 600.0
"""What the zygote and the supervisor take once."""
THREADS_PER_NODE = 4
"""The event loop, the training thread, and ZeroMQ's two."""
FILES_KEPT = 64
"""Files that the supervisor needs beside one connection per node."""


@dataclass(frozen=True)
class Capacity:
    """The limits of this machine, in nodes, and which of them binds."""

    by_memory: int
    by_files: int
    by_processes: int

    @property
    def nodes(self) -> int:
        return max(0, min(self.by_memory, self.by_files, self.by_processes))

    @property
    def reason(self) -> str:
        if self.nodes == max(0, self.by_memory):
            return "free memory"
        if self.nodes == max(0, self.by_files):
            return "the limit of open files (ulimit -n)"
        return "the limit of processes (ulimit -u)"


def capacity(parameters: int) -> Capacity:
    """For nodes whose model has this many parameters."""
    per_node = NODE_MIB + MODELS_PER_NODE * parameters * 4 / MIB
    return Capacity(
        by_memory=int((available_memory() / MIB - SHARED_MIB) / per_node),
        by_files=raise_file_limit() - FILES_KEPT,
        by_processes=process_limit() // THREADS_PER_NODE,
    )
