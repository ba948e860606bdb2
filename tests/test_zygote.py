"""The zygote's process: it serves the agent whatever a single request leads to."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import psutil
import pytest

from conftest import is_zygote, until
from shoal.engines.operating_system import MIB
from shoal.engines.processes import capacity, control, zygote
from shoal.engines.processes.node_run import NodeLaunch
from shoal.engines.processes.zygote_process import ZygoteProcess
from shoal.experiment import Experiment
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


def test_nodes_that_run_are_not_started_again(tmp_path: Path, unused_port: int) -> None:
    """A coordinator that continues a run may not know that an earlier one has started them."""
    folder = RunFolder.create(tmp_path, "twice")
    experiment = Experiment(nodes=4, engine="processes", model={"name": "logistic"})
    zygote = ZygoteProcess(folder)
    try:
        zygote.send(control.Prepare(experiment.to_table(), str(tmp_path), 4))
        until(zygote.has_report)
        assert isinstance(zygote.receive(), control.Prepared)
        for nodes in ([0, 1], [0, 1, 2]):
            zygote.send(
                control.StartNodes(
                    nodes, "run", str(folder.path), f"tcp://127.0.0.1:{unused_port}", training_nodes=experiment.nodes
                )
            )
        zygote.send(control.RecordEvents([(3, Event("fault", 1.0, "node 3 joins"))]))
        until(folder.node(3).exists)  # it has handled the other requests before
        (process,) = [child for child in psutil.Process().children() if is_zygote(child)]
        assert len(process.children()) == 3
        assert not zygote.has_report(), "no node has ended"
        zygote.send(control.KillNodes([0, 3]))
        until(zygote.has_report)
        assert zygote.receive() == control.NodeExited(3, -signal.SIGKILL), "it was never started"
        until(zygote.has_report)
        assert zygote.receive() == control.NodeExited(0, -signal.SIGKILL)
    finally:
        zygote.close()


KEEPS, RETURNS = 7, 8
"""Exit codes of nodes that keep the memory of a training, and of nodes that return it to the system."""


def serve_on_a_small_machine(pipe: Connection, folder: RunFolder) -> None:
    """Run a zygote on a machine with 1 GiB of free memory. Its nodes only exit."""

    def exit_node(launch: NodeLaunch, pair: object) -> int:
        return KEEPS if launch.kept_memory.most else RETURNS

    capacity.available_memory = lambda: 1024 * MIB
    zygote.run_node = exit_node
    zygote.Zygote(pipe, folder).serve()


@pytest.mark.parametrize(("nodes", "code"), [(2, KEEPS), (100, RETURNS)])
def test_nodes_that_join_late_count_when_nodes_decide_to_keep_memory(tmp_path: Path, nodes: int, code: int) -> None:
    folder = RunFolder.create(tmp_path, "late")
    experiment = Experiment(nodes=nodes, engine="processes", model={"name": "logistic"})
    pipe, other = Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_on_a_small_machine, args=(other, folder))
    process.start()
    other.close()
    try:
        pipe.send_bytes(control.encode(control.Prepare(experiment.to_table(), str(tmp_path), nodes)))
        assert isinstance(control.decode_from_zygote(pipe.recv_bytes()), control.Prepared)
        for started in ([], [0], [1]):  # the agent has no node at first, then late ones
            pipe.send_bytes(control.encode(control.StartNodes(started, "run")))
        ended = [control.decode_from_zygote(pipe.recv_bytes()) for _ in range(2)]
    finally:
        pipe.close()
        process.join()
    assert [report.code for report in ended if isinstance(report, control.NodeExited)] == [code, code]
