"""Scheduled faults: the `[[fault]]` tables, the timed events that follow from them, and their effect on pairs of nodes.

The package may import the foundations only. A fault with a `round` applies to a node when the node starts that round;
the engines check for it. All other faults depend on time: `fault_events` expands them to `FaultEvent`s in order of
time, and every process that uses the same seed gets the same events. `PairFaults` keeps the faults between nodes.
"""

from __future__ import annotations

from shoal.environment.faults.events import FaultEvent, fault_events
from shoal.environment.faults.pairs import PairFaults
from shoal.environment.faults.table import Fault, Kind, SlowTarget
from shoal.environment.faults.validation import incompatibilities

__all__ = ["Fault", "FaultEvent", "Kind", "PairFaults", "SlowTarget", "fault_events", "incompatibilities"]
