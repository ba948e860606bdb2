"""Faults on schedule, one verb each.

faults = Faults().crash(3, round=2).raises(4, round=1).hang(5, round=3)
Experiment(nodes=8, fault=faults.schedule).run()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.experiment import Fault
from shoal.topologies.graph import NodeId


@dataclass(frozen=True)
class Faults:
    """What strikes whom, and when: at the start of a round. Each verb gives a longer schedule, and keeps this one."""

    schedule: tuple[Fault, ...] = ()

    def crash(self, node: NodeId, round: int = 0) -> Faults:
        """`node` ends at once, as by SIGKILL."""
        return self._and("crash", node, round)

    def raises(self, node: NodeId, round: int = 0) -> Faults:
        """The code of `node` fails."""
        return self._and("raise", node, round)

    def hang(self, node: NodeId, round: int = 0) -> Faults:
        """`node` stays alive and silent."""
        return self._and("hang", node, round)

    def _and(self, kind: Literal["crash", "raise", "hang"], node: NodeId, round: int) -> Faults:
        return Faults((*self.schedule, Fault(kind, node, round)))
