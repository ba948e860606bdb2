"""Faults on schedule, one verb each; then, if not by round, when it strikes and for how long.

faults = Faults().crash(3, round=2).raises(4, round=1).hang(5, round=3)
faults = Faults().partition("0-3", "4-7").at(10.0).until(20.0).crash().every(60.0, count=5).lasting(10.0)
Experiment(nodes=8, fault=faults.schedule).run()
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

from shoal.environment.faults import Fault, What
from shoal.types import NodeId

Nodes: TypeAlias = NodeId | str
"""A node, or several as in "0-3, 8"."""


@dataclass(frozen=True)
class Faults:
    """What strikes whom, and when. Each verb gives a longer schedule, and keeps this one.

    `at`, `every`, `until` and `lasting` say more of the fault before them. Without nodes, a fault strikes any of them
    (`every`), or stands between all. What makes no sense is refused by the experiment, not here.
    """

    schedule: tuple[Fault, ...] = ()

    # Nodes

    def crash(self, nodes: Nodes | None = None, round: int | None = None) -> Faults:
        """They end at once, as by SIGKILL; at the start of `round`, of the first if nothing else is said."""
        return self._and(_named(Fault("crash", round=round), nodes))

    def raises(self, nodes: Nodes | None = None, round: int | None = None) -> Faults:
        """Their code fails."""
        return self._and(_named(Fault("raise", round=round), nodes))

    def hang(self, nodes: Nodes | None = None, round: int | None = None) -> Faults:
        """They stay alive and silent."""
        return self._and(_named(Fault("hang", round=round), nodes))

    def restart(self, nodes: Nodes | None = None) -> Faults:
        """They come back after a crash."""
        return self._and(_named(Fault("restart"), nodes))

    def slow(self, nodes: Nodes | None = None, *, factor: float, what: What | None = None) -> Faults:
        """They take `factor` times as long to compute, to send and receive, or for both."""
        return self._and(_named(Fault("slow", factor=factor, what=what), nodes))

    # What is between nodes

    def partition(self, nodes: Nodes | None = None, others: str | None = None, *, oneway: bool | None = None) -> Faults:
        """No message gets through between nodes and others."""
        return self._and(_named(Fault("partition", others=others, oneway=oneway), nodes))

    def repair(self, nodes: Nodes | None = None, others: str | None = None, *, oneway: bool | None = None) -> Faults:
        """Undoes partitions."""
        return self._and(_named(Fault("repair", others=others, oneway=oneway), nodes))

    def hold(self, nodes: Nodes | None = None, others: str | None = None, *, oneway: bool | None = None) -> Faults:
        """Messages between nodes and others are kept until a release."""
        return self._and(_named(Fault("hold", others=others, oneway=oneway), nodes))

    def release(self, nodes: Nodes | None = None, others: str | None = None, *, oneway: bool | None = None) -> Faults:
        """Undoes holds: what they kept arrives."""
        return self._and(_named(Fault("release", others=others, oneway=oneway), nodes))

    def drop(
        self,
        nodes: Nodes | None = None,
        others: str | None = None,
        *,
        probability: float,
        oneway: bool | None = None,
    ) -> Faults:
        """Each message between nodes and others is lost with this probability."""
        return self._and(_named(Fault("drop", others=others, oneway=oneway, probability=probability), nodes))

    # When, and for how long

    def at(self, time: float) -> Faults:
        """It strikes at a time, in seconds since the start of the run."""
        return self._but(dataclasses.replace(self._latest, round=None, time=time))

    def every(
        self, seconds: float, *, after: float | None = None, before: float | None = None, count: int | None = None
    ) -> Faults:
        """It strikes one of its nodes again and again, after so many seconds on average."""
        drawn = dataclasses.replace(self._latest, round=None, every=seconds)
        return self._but(dataclasses.replace(drawn, after=after, before=before, count=count))

    def until(self, time: float) -> Faults:
        """It ends at a time."""
        return self._but(dataclasses.replace(self._latest, until=time))

    def lasting(self, seconds: float) -> Faults:
        """It ends so many seconds after it struck; on average, if it strikes again and again."""
        return self._but(dataclasses.replace(self._latest, lasting=seconds))

    @property
    def _latest(self) -> Fault:
        if not self.schedule:
            raise ValueError("nothing strikes yet: begin with a verb, as in Faults().crash(3).at(30.0)")
        return self.schedule[-1]

    def _and(self, fault: Fault) -> Faults:
        return Faults((*self.schedule, fault))

    def _but(self, fault: Fault) -> Faults:
        """With this in place of the latest."""
        return Faults((*self.schedule[:-1], fault))


def _named(fault: Fault, nodes: Nodes | None) -> Fault:
    return dataclasses.replace(fault, **({"nodes": nodes} if isinstance(nodes, str) else {"node": nodes}))
