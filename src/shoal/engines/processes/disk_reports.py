"""What nodes and agents report about full disks, as notices: one for each machine, not one for each node."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shoal.engines.processes import control


class DiskReports:
    """Follows which processes of each machine have paused their records."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._paused: dict[str, set[Hashable]] = {}
        """By machine: the processes that have paused their records."""
        self._dropped: dict[str, int] = {}
        self._ending: set[str] = set()
        """Machines on which nodes end and wait for space."""

    @property
    def any_paused(self) -> bool:
        return any(self._paused.values())

    def handle(self, machine: str, report: control.DiskReport | control.AgentDiskReport) -> None:
        """Note a report. Shows the first of a pause, and the last of its end."""
        process = report.node if isinstance(report, control.DiskReport) else None
        if isinstance(report, control.DiskReport) and report.final:
            if machine not in self._ending:
                self._ending.add(machine)
                self._notice(f"{machine}: {report.text}")
            return
        paused = self._paused.setdefault(machine, set())
        if report.paused:
            if not paused:
                self._notice(f"{machine}: {report.text}")
            paused.add(process)
            return
        if isinstance(report, control.DiskReport):
            self._dropped[machine] = self._dropped.get(machine, 0) + report.dropped
        if process in paused:
            paused.discard(process)
            if not paused:
                self._show_end(machine, report.text)
        elif not paused and (dropped := self._dropped.pop(machine, 0)):  # the exit of the node has ended the pause
            self._notice(f"{machine}: {dropped} more records of rounds were dropped")

    def exited(self, machine: str, node: int, well: bool) -> None:
        """A node has exited. If it did `well`, it has written everything; its last report may not have arrived."""
        paused = self._paused.get(machine, set())
        if node not in paused:
            return
        paused.discard(node)
        if well and not paused:
            self._show_end(machine, "records are written again")

    def _show_end(self, machine: str, text: str) -> None:
        dropped = self._dropped.pop(machine, 0)
        self._ending.discard(machine)
        extra = f"; {dropped} records of rounds were dropped" if dropped else ""
        self._notice(f"{machine}: {text}{extra}")
