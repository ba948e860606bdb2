"""Notices about full disks: one per machine, whichever of a node's report and its exit arrives first."""

from shoal.engines.processes import control
from shoal.engines.processes.disk_reports import DiskReports

PAUSED = "records are paused"
AGAIN = "records are written again in runs"


def paused(node: int) -> control.DiskReport:
    return control.DiskReport(node, paused=True, text=PAUSED)


def written(node: int, dropped: int = 0) -> control.DiskReport:
    return control.DiskReport(node, paused=False, text=AGAIN, dropped=dropped)


def test_one_notice_for_all_nodes_of_a_machine() -> None:
    notices: list[str] = []
    reports = DiskReports(notices.append)
    for report in (paused(0), paused(1), written(0, dropped=2), written(1, dropped=3)):
        reports.handle("a", report)
    assert notices == [f"a: {PAUSED}", f"a: {AGAIN}; 5 records of rounds were dropped"]
    assert not reports.any_paused


def test_a_node_that_exits_before_its_last_report_arrives_has_written_its_records() -> None:
    notices: list[str] = []
    reports = DiskReports(notices.append)
    reports.handle("a", paused(0))
    reports.handle("a", paused(1))
    reports.handle("a", written(1))
    reports.exited("a", 0, well=True)
    reports.handle("a", written(0))  # late
    assert notices == [f"a: {PAUSED}", "a: records are written again"]


def test_a_report_that_arrives_after_the_exit_of_its_node_shows_how_many_records_were_dropped() -> None:
    notices: list[str] = []
    reports = DiskReports(notices.append)
    for node in (0, 1, 2):
        reports.handle("a", paused(node))
    reports.exited("a", 0, well=True)
    reports.handle("a", written(0, dropped=2))  # late, while other nodes wait
    reports.exited("a", 1, well=True)
    reports.exited("a", 2, well=True)
    reports.handle("a", written(1, dropped=3))
    reports.handle("a", written(2))
    assert notices == [
        f"a: {PAUSED}",
        "a: records are written again; 2 records of rounds were dropped",
        "a: 3 more records of rounds were dropped",
    ]


def test_a_node_that_fails_has_not_written_its_records() -> None:
    notices: list[str] = []
    reports = DiskReports(notices.append)
    reports.handle("a", paused(0))
    reports.exited("a", 0, well=False)
    assert notices == [f"a: {PAUSED}"]
    assert not reports.any_paused
