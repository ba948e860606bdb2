"""Complete runs with sealed links."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from conftest import until
from process_runs import NODES, ROUNDS, Started, listens_on, started
from sealed_peers import connected, small
from shoal.engines.processes import control
from shoal.engines.processes.keys import KeyPair, make_keys
from shoal.engines.processes.node_starter import NodeStarter
from shoal.errors import ExperimentError, LaunchError
from shoal.experiment import Experiment
from shoal.results.records import Event
from shoal.testing import Faults

pytestmark = pytest.mark.usefixtures("no_process_is_left")


# Whole runs


def by_simulation(run: Started, folder: Path) -> dict[str, Any]:
    freely = {"engine": "simulation", "algorithm.held": ROUNDS}
    return Experiment.from_file(run.folder.experiment, freely).run(folder).summary


def test_a_sealed_run_has_the_models_of_a_plain_run_and_counts_unauthenticated_connections(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", NODES)
    sealed = ("processes={sealed=true, keys='keys'}", "network={name='uniform', latency=0.001}")
    with started(tmp_path, *sealed, held=1) as going:
        going.wait_for_round(0)
        network, *nodes = sorted(going.zygote.children(), key=lambda p: p.create_time())
        descriptors = [listens_on(p) for p in (nodes[0], network, psutil.Process(going.process.pid))]
        with contextlib.ExitStack() as stack:
            for port in descriptors:
                stack.enter_context(connected(f"tcp://127.0.0.1:{port}"))
                stack.enter_context(connected(f"tcp://127.0.0.1:{port}", KeyPair.fresh(), KeyPair.fresh().public))
            until(lambda: going.folder.node(0).read_text().count("unauthenticated connection") >= 2)
            until(lambda: going.output.count("the coordinator rejected an unauthenticated connection") >= 2)
            until(
                lambda: "the network process rejected an unauthenticated connection" in going.output
            )  # once for several
        going.release()
        code, out = going.end()
    assert code == 0, out
    summary = going.summary
    assert summary["status"] == "completed"
    at_nodes = summary["events"]["unauthenticated connection"]
    assert at_nodes >= 2
    assert summary["unauthenticated_connections"] >= at_nodes + 2 + 1
    assert summary["messages_rejected"] == summary["messages_repeated"] == 0
    simulated = by_simulation(going, tmp_path / "simulated")
    for key in ("digest", "bytes_sent", "messages_sent"):
        assert summary[key] == simulated[key]


def restarting(**processes: Any) -> Experiment:
    """A sealed run in which node 2 crashes and restarts."""
    return Experiment(
        nodes=4,
        seed=1,
        engine="processes",
        algorithm={"name": "dpsgd", "rounds": 24},
        topology={"name": "full"},
        model={"name": "mlp", "hidden": (8,)},
        training={"batch_size": 8, "local_steps": 1},
        speed={"step_seconds": 0.3},
        evaluation={"every": 0, "average": False, "samples": 20},
        processes={"sealed": True, **processes},
        fault=Faults().crash(2).at(2.0).restart(2).at(2.5).schedule,
    )


def test_a_restarted_node_rejoins_a_sealed_run_with_a_new_key(tmp_path: Path) -> None:
    run = restarting().run(tmp_path)
    assert run.summary["status"] == "completed"
    events = [record.what for record in run.folder.read(2) if isinstance(record, Event)]
    assert "rejoined" in events
    assert run.summary["messages_rejected"] == 0
    # A node that crashes during a handshake counts as unauthenticated, at most once at each other node.
    assert run.summary["unauthenticated_connections"] <= 3


def test_invalid_keys_end_a_run_before_any_process_starts(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 3)
    (tmp_path / "keys" / "node-0.key_secret").chmod(0o640)
    with pytest.raises(LaunchError, match="links cannot be sealed") as error:
        small(keys=tmp_path / "keys").run(tmp_path)
    assert "other users may read this secret key" in str(error.value)
    assert "node-3.key' is missing" in str(error.value)
    assert not list(tmp_path.rglob("nodes.log"))


def test_keys_that_change_during_the_start_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_all = NodeStarter.start_all

    def late(starter: NodeStarter, request: control.StartNodes) -> None:
        make_keys(tmp_path / "keys", 4, force=True)
        start_all(starter, request)

    make_keys(tmp_path / "keys", 4)
    monkeypatch.setattr(NodeStarter, "start_all", late)
    with pytest.raises(LaunchError, match=r"node \d could not start: .*changed since the run began") as error:
        small(keys=tmp_path / "keys").run(tmp_path)
    assert "shoal keys check" in str(error.value)


def test_a_restarted_node_whose_keys_have_changed_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restart = NodeStarter.restart

    def late(starter: NodeStarter, nodes: Collection[int]) -> None:
        make_keys(tmp_path / "keys", 4, force=True)
        restart(starter, nodes)

    make_keys(tmp_path / "keys", 4)
    monkeypatch.setattr(NodeStarter, "restart", late)
    summary = restarting(keys=tmp_path / "keys").run(tmp_path).summary
    assert summary["status"] == "incomplete"
    assert summary["lost"].keys() == {"2"}
    assert "changed since the run began" in summary["lost"]["2"]


def test_without_curve_nothing_is_sent_unencrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(LaunchError, match="built without CURVE"):
        small().run(tmp_path)
    assert not list(tmp_path.rglob("nodes.log"))


def test_keys_without_sealed_links_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"the keys have no effect without processes\.sealed = true"):
        small(sealed=False, keys=tmp_path)
