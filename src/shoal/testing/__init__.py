"""For tests of your own plug-ins: the conformance suites that ours pass, a fake runtime, faults on schedule, and
messages that make no sense."""

from __future__ import annotations

from shoal.testing.arenas import Arena, SimulatedArena, SocketArena
from shoal.testing.fake import FakeRuntime
from shoal.testing.faults import Faults
from shoal.testing.fuzz import Failure, Fuzzer, HangError, Mutator, Reader
from shoal.testing.partitions import check_partition
from shoal.testing.runtime import check_runtime
from shoal.testing.sharing import check_sharing
from shoal.testing.topologies import check_graph, check_mixing, check_topology

__all__ = [
    "Arena",
    "Failure",
    "FakeRuntime",
    "Faults",
    "Fuzzer",
    "HangError",
    "Mutator",
    "Reader",
    "SimulatedArena",
    "SocketArena",
    "check_graph",
    "check_mixing",
    "check_partition",
    "check_runtime",
    "check_sharing",
    "check_topology",
]
