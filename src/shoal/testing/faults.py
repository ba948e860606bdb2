"""Fault schedules for tests: one method for each kind of fault, then its time and duration.

faults = Faults().crash(3, round=2).raises(4, round=1).hang(5, round=3)
faults = Faults().partition("0-3", "4-7").at(10.0).until(20.0).crash().every(60.0, count=5).lasting(10.0)
Experiment(nodes=8, fault=faults.schedule).run()
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

from shoal.environment.faults import Fault, SlowTarget
from shoal.types import NodeId

Nodes: TypeAlias = NodeId | str
"""A node id, or several as in "0-3, 8"."""


@dataclass(frozen=True)
class Faults:
    """A schedule of faults. Each method returns a longer schedule and leaves this one unchanged.

    `at`, `every`, `until` and `lasting` refine the fault before them. Without nodes, a fault with `every` affects
    random nodes, and a fault between nodes affects all. The experiment validates the schedule, not this class.
    """

    schedule: tuple[Fault, ...] = ()

    # Nodes

    def crash(self, nodes: Nodes | None = None, round: int | None = None) -> Faults:
        """End the nodes at once, as with SIGKILL; at the start of `round`, by default the first."""
        return self._append(_with_nodes(Fault("crash", round=round), nodes))

    def raises(self, nodes: Nodes | None = None, round: int | None = None) -> Faults:
        """Raise an exception in the nodes."""
        return self._append(_with_nodes(Fault("raise", round=round), nodes))

    def hang(self, nodes: Nodes | None = None, round: int | None = None) -> Faults:
        """Let the nodes hang: their processes stay alive and send nothing."""
        return self._append(_with_nodes(Fault("hang", round=round), nodes))

    def restart(self, nodes: Nodes | None = None) -> Faults:
        """Start crashed nodes again."""
        return self._append(_with_nodes(Fault("restart"), nodes))

    def join(self, nodes: Nodes | None = None, round: int | None = None) -> Faults:
        """Start the nodes late: they are not there before; when the others start `round`, or at a time."""
        return self._append(_with_nodes(Fault("join", round=round), nodes))

    def slow(self, nodes: Nodes | None = None, *, factor: float, what: SlowTarget | None = None) -> Faults:
        """Multiply the time that the nodes need to compute, to send and receive, or both, by `factor`."""
        return self._append(_with_nodes(Fault("slow", factor=factor, what=what), nodes))

    # Links between nodes

    def partition(self, nodes: Nodes | None = None, others: str | None = None, *, oneway: bool | None = None) -> Faults:
        """Drop every message between `nodes` and `others`."""
        return self._append(_with_nodes(Fault("partition", others=others, oneway=oneway), nodes))

    def repair(self, nodes: Nodes | None = None, others: str | None = None, *, oneway: bool | None = None) -> Faults:
        """End partitions."""
        return self._append(_with_nodes(Fault("repair", others=others, oneway=oneway), nodes))

    def hold(self, nodes: Nodes | None = None, others: str | None = None, *, oneway: bool | None = None) -> Faults:
        """Hold messages between `nodes` and `others` until a release."""
        return self._append(_with_nodes(Fault("hold", others=others, oneway=oneway), nodes))

    def release(self, nodes: Nodes | None = None, others: str | None = None, *, oneway: bool | None = None) -> Faults:
        """End holds: the held messages are delivered."""
        return self._append(_with_nodes(Fault("release", others=others, oneway=oneway), nodes))

    def drop(
        self,
        nodes: Nodes | None = None,
        others: str | None = None,
        *,
        probability: float,
        oneway: bool | None = None,
    ) -> Faults:
        """Drop each message between `nodes` and `others` with this probability."""
        return self._append(_with_nodes(Fault("drop", others=others, oneway=oneway, probability=probability), nodes))

    # Time and duration

    def at(self, time: float) -> Faults:
        """Set the time, in seconds since the start of the run."""
        return self._replace_last(dataclasses.replace(self._last, round=None, time=time))

    def every(
        self, seconds: float, *, after: float | None = None, before: float | None = None, count: int | None = None
    ) -> Faults:
        """Repeat the fault at random nodes of `nodes`, every so many seconds on average."""
        drawn = dataclasses.replace(self._last, round=None, every=seconds)
        return self._replace_last(dataclasses.replace(drawn, after=after, before=before, count=count))

    def until(self, time: float) -> Faults:
        """Set the time when the fault ends."""
        return self._replace_last(dataclasses.replace(self._last, until=time))

    def lasting(self, seconds: float) -> Faults:
        """Set how many seconds the fault lasts; the mean, if it is repeated."""
        return self._replace_last(dataclasses.replace(self._last, lasting=seconds))

    @property
    def _last(self) -> Fault:
        if not self.schedule:
            raise ValueError("the schedule is empty: begin with a fault, as in Faults().crash(3).at(30.0)")
        return self.schedule[-1]

    def _append(self, fault: Fault) -> Faults:
        return Faults((*self.schedule, fault))

    def _replace_last(self, fault: Fault) -> Faults:
        return Faults((*self.schedule[:-1], fault))


def _with_nodes(fault: Fault, nodes: Nodes | None) -> Fault:
    return dataclasses.replace(fault, **({"nodes": nodes} if isinstance(nodes, str) else {"node": nodes}))
