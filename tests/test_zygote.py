"""The zygote's process: it serves the agent whatever a single request leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import until
from shoal.engines.processes import control
from shoal.engines.processes.zygote_process import ZygoteProcess
from shoal.results.records import Event, RunFolder

pytestmark = pytest.mark.usefixtures("no_process_is_left")


def test_a_record_that_cannot_be_written_is_reported_in_the_log(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "full")
    folder.node(1).mkdir()  # nothing can be appended to it
    events = [(node, Event("fault", 1.0, f"node {node} crashes")) for node in range(3)]
    zygote = ZygoteProcess(folder)
    try:
        zygote.send(control.RecordEvents(events))
        until(folder.node(2).exists)
        zygote.send(control.RecordEvents(events[:1]))
        until(lambda: list(folder.read(0)) == [events[0][1]] * 2)
    finally:
        zygote.close()
    assert list(folder.read(2)) == [events[2][1]]
    log = folder.log.read_text()
    assert "the event 'node 1 crashes' of node 1" in log
    assert "cannot be written: Is a directory" in log


def test_a_request_that_exceeds_the_pipe_is_kept_until_the_zygote_reads_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "long")
    event = Event("fault", 1.0, "x" * 10_000_000)
    zygote = ZygoteProcess(folder)

    def is_sent() -> bool:
        zygote.flush()
        return not zygote.has_unsent

    try:
        zygote.send(control.RecordEvents([(0, event)]))
        assert zygote.has_unsent, "the zygote has not started to read, and the pipe holds less"
        until(is_sent)
        until(lambda: folder.node(0).exists() and list(folder.read(0)) == [event])
    finally:
        zygote.close()
