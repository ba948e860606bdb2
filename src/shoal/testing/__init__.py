"""Tools for tests of plug-ins: the conformance suites that our components pass, a fake runtime, fault schedules, and
a fuzzer of messages.

The package is public and may import every other package except `cli`. Importing it does not import torch.
"""

from __future__ import annotations

from shoal.testing.fake import FakeRuntime
from shoal.testing.faults import Faults
from shoal.testing.fuzz import Failure, Fuzzer, HangError, Mutator, Reader
from shoal.testing.harness import RuntimeHarness, SimulationHarness, SocketHarness
from shoal.testing.partitions import check_partition
from shoal.testing.runtime import check_runtime
from shoal.testing.sharing import check_sharing
from shoal.testing.topologies import check_graph, check_mixing, check_topology

__all__ = [
    "Failure",
    "FakeRuntime",
    "Faults",
    "Fuzzer",
    "HangError",
    "Mutator",
    "Reader",
    "RuntimeHarness",
    "SimulationHarness",
    "SocketHarness",
    "check_graph",
    "check_mixing",
    "check_partition",
    "check_runtime",
    "check_sharing",
    "check_topology",
]
