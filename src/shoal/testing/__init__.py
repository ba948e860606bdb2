"""For tests of your own plug-ins: the conformance suites that ours pass."""

from __future__ import annotations

from shoal.testing.partitions import check_partition
from shoal.testing.topologies import check_graph, check_mixing, check_topology

__all__ = ["check_graph", "check_mixing", "check_partition", "check_topology"]
