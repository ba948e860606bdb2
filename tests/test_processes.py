"""The engine with real processes: it equals the simulation, and survives every failure of its processes."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from conftest import until
from process_runs import HELD, NODES, ROUNDS, Started, ends, listens_on, run, started
from shoal.engines.processes import control
from shoal.experiment import Experiment
from shoal.message import Message, Payload, address
from shoal.results.records import Evaluation

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_process_is_left")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Started:
    code, out, done = run(tmp_path_factory.mktemp("undisturbed"))
    assert code == 0, out
    return done


# The same numbers


def assert_same(summary: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("digest", "accuracy", "loss", "bytes_sent", "messages_sent"):
        assert summary[key] == expected[key]
    # The coordinator adds models in the order of their arrival, which changes the last digits.
    assert summary["consensus_distance"] == pytest.approx(expected["consensus_distance"], rel=1e-6)
    assert summary["averaged_model"] == pytest.approx(expected["averaged_model"], rel=1e-5)


def test_a_run_writes_all_files_and_all_keys_of_its_summary(undisturbed: Started) -> None:
    folder = undisturbed.folder.path
    written = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert written == {
        "experiment.toml", "mapping.json", "data.json", "summary.json", "metrics.parquet", "averages.jsonl",
        "nodes.log",
        *(f"nodes/{n}.jsonl" for n in range(NODES)), *(f"checkpoints/{n}.npy" for n in range(NODES)),
    }  # fmt: skip
    summary = undisturbed.summary
    assert (summary["status"], summary["engine"], summary["rounds"]) == ("completed", "processes", ROUNDS)
    for place, keys in (("time", ("wall_s", "startup_s", "train_cpu_s", "total_cpu_s")),
                        ("memory", ("uss_mean_mib", "pss_mean_mib", "pss_total_mib"))):  # fmt: skip
        assert all(summary[place][key] > 0 for key in keys)
    assert summary["lost"] == {}


def test_the_experiment_of_a_run_runs_again_and_gives_the_same_models(undisturbed: Started, tmp_path: Path) -> None:
    again = Experiment.from_file(undisturbed.folder.experiment).run(tmp_path)
    assert_same(again.summary, undisturbed.summary)


def test_the_simulation_gives_the_same_models_to_the_bit(undisturbed: Started, tmp_path: Path) -> None:
    simulated = Experiment.from_file(undisturbed.folder.experiment, {"engine": "simulation"}).run(tmp_path)
    assert simulated.summary["engine"] == "simulation"
    assert_same(simulated.summary, undisturbed.summary)


def test_the_batched_simulation_gives_the_same_models_within_tolerance(undisturbed: Started, tmp_path: Path) -> None:
    overrides = {"engine": "simulation", "simulation.batching": "vmap"}
    simulated = Experiment.from_file(undisturbed.folder.experiment, overrides).run(tmp_path)
    assert simulated.summary["batching"] == "vmap"
    for node in range(NODES):
        expected = np.load(undisturbed.folder.model(node))
        np.testing.assert_allclose(np.load(simulated.folder.model(node)), expected, atol=1e-3)
    assert simulated.summary["bytes_sent"] == undisturbed.summary["bytes_sent"]


# Nodes that fail


def test_the_other_nodes_continue_when_a_node_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, held=1) as going:
        going.wait_for_round(0)
        going.nodes[2].kill()
        going.release()
        code, out = going.end()
    assert code == 3, out
    assert "node 2 was lost; its neighbours continue without it. killed by SIGKILL" in out
    summary = going.summary
    assert (summary["status"], summary["rounds"]) == ("incomplete", ROUNDS)
    assert summary["lost"] == {"2": "killed by SIGKILL"}
    assert ends(going.folder) == {0, 1, 3, 4, 5}
    assert summary["accuracy"] is not None
    assert going.folder.metrics.exists()
    assert {int(f.stem) for f in going.folder.path.glob("checkpoints/*.npy")} == {0, 1, 3, 4, 5}


def test_a_node_whose_code_raises_is_lost_with_its_traceback_shown(tmp_path: Path) -> None:
    with started(tmp_path, "fault=[{kind='raise', node=1, round=2}]") as going:
        code, out = going.end()
    assert code == 3, out
    assert "Traceback (most recent call last)" in out
    assert "fault on schedule: node 1 raises at round 2" in out
    assert list(going.summary["lost"]) == ["1"]
    assert ends(going.folder) == {0, 2, 3, 4, 5}


def test_the_end_of_a_very_long_error_is_shown_and_the_whole_error_is_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "verbose.py").write_text(
        textwrap.dedent(
            """
            from shoal.algorithms.dpsgd import DPSGD


            class Verbose(DPSGD):
                async def run(self, node):
                    if node.id == 1:
                        raise ValueError("begin" + 3 * 2**20 * "x" + "end")
                    await super().run(node)
            """
        )
    )
    code, out, done = run(tmp_path, "algorithm={name='verbose.py:Verbose', rounds=2}", "processes.max_message_mib=1")
    assert code == 3, out[-1000:]
    assert done.summary["lost"]["1"].endswith("xend")
    assert len(done.summary["lost"]["1"]) < 2**14
    log = done.folder.log.read_text()
    assert "begin" + 3 * 2**20 * "x" + "end" in log


def test_a_run_that_loses_every_node_has_failed(tmp_path: Path) -> None:
    faults = ", ".join(f"{{kind='crash', node={n}, round=1}}" for n in range(NODES))
    code, out, done = run(tmp_path, f"fault=[{faults}]")
    assert code == 1, out
    assert done.summary["status"] == "failed"
    assert len(done.summary["lost"]) == NODES
    assert done.summary["rounds"] == 1, "the records so far are kept"


def test_a_node_that_hangs_is_stopped(tmp_path: Path) -> None:
    settings = ("fault=[{kind='hang', node=1, round=3}]", "processes.receive_timeout=1")
    code, out, done = run(tmp_path, *settings)
    assert code == 3, out
    assert list(done.summary["lost"]) == ["1"]
    assert "hung" in done.summary["lost"]["1"]
    assert done.folder.model(1).is_file(), "its model so far is kept"
    assert done.summary["events"]["timed out"] >= 1
    assert ends(done.folder) == {0, 2, 3, 4, 5}


def test_a_run_whose_nodes_all_hang_ends(tmp_path: Path) -> None:
    faults = ", ".join(f"{{kind='hang', node={n}, round=1}}" for n in range(NODES))
    with started(tmp_path, f"fault=[{faults}]", "processes.receive_timeout=1") as going:
        going.wait_for_round(0)
        code, out = going.end()
    assert code == 1, out
    assert going.summary["status"] == "failed"
    assert all("hung" in why for why in going.summary["lost"].values())


def test_a_suspended_sampler_does_not_prevent_the_end_of_the_run(tmp_path: Path) -> None:
    sampler = "topology={name='peer-sampler', graph={name='regular', degree=2, dynamic=true}}"
    with started(tmp_path, sampler, "processes.receive_timeout=1", held=1) as going:
        going.wait_for_round(0)
        last = max(going.zygote.children(), key=lambda process: (process.create_time(), process.pid))
        last.suspend()
        going.release()
        code, out = going.end()
    assert code == 3, out
    assert list(going.summary["lost"]) == [str(NODES)]
    reason = going.summary["lost"][str(NODES)]
    assert "it was asked to finish and did not in 6 s" in reason or "sent no heartbeat for 6 s" in reason
    assert going.summary["rounds"] == ROUNDS
    assert ends(going.folder) == set(range(NODES))


# Interrupted runs


def test_ctrl_c_at_the_start_ends_the_run(tmp_path: Path) -> None:
    with started(tmp_path, held=0) as going:
        assert going.zygote.is_running()
        going.process.send_signal(signal.SIGINT)
        code, out = going.end()
    assert code == 130, out
    assert going.summary["status"] == "interrupted"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_records_and_models(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with started(tmp_path, held=2) as going:
        going.wait_for_round(1, Evaluation)
        going.process.send_signal(number)
        ended, out = going.end()
    assert ended == code, out
    summary = going.summary
    assert (summary["status"], summary["signal"]) == ("interrupted", number)
    assert summary["rounds"] >= 2
    assert summary["accuracy"] is not None
    assert len(list(going.folder.path.glob("checkpoints/*.npy"))) == NODES, "the models so far"


def test_garbage_on_a_nodes_port_is_dropped_and_counted(undisturbed: Started, tmp_path: Path) -> None:
    model = Payload({"params": np.zeros(4810, np.float32)})
    foreign = [
        [b"garbage"],
        [b""],
        [b"\xff" * 100_000, b"x"],
        [json.dumps({"kind": "model"}).encode()],
        [pickle.dumps({"kind": "model"})],
        Message(1, "model", 1, model).frames(),  # without an address
        [address(0), *Message(1, "model", 1, model, "another run 1234").frames()],
        [address(0), *Message(1, "model", 1, model).frames(), b"one frame more"],
    ]
    with started(tmp_path, held=1) as going:
        port = listens_on(going.nodes[0])
        going.wait_for_round(0)
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(
                b"GET / HTTP/1.1\r\nHost: shoal\r\n\r\n"
            )  # ZeroMQ may mistake it for a peer with an old version
        with socket.create_connection(("127.0.0.1", port)) as half_open:
            half_open.sendall(b"\xff\0\0\0")
        context = zmq.Context()
        with context.socket(zmq.PUSH) as client:
            client.setsockopt(zmq.LINGER, 2000)
            client.connect(f"tcp://127.0.0.1:{port}")
            for frames in foreign:
                client.send_multipart(frames)
            until(lambda: going.folder.node(0).read_text().count("message rejected") >= len(foreign))
            disconnected = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            client.send(bytes(2**20 + 1))  # more than any message of so small a model
            assert disconnected.poll(60_000), "the node disconnects before it has received everything"
            client.disable_monitor()
        context.destroy(linger=0)
        going.release()
        code, out = going.end()
    assert code == 0, out
    summary = going.summary
    assert summary["status"] == "completed"
    assert summary["messages_rejected"] >= len(foreign)
    assert summary["events"]["message rejected"] == summary["messages_rejected"]
    assert summary["digest"] == undisturbed.summary["digest"]


def test_messages_of_unknown_processes_to_the_coordinator_are_ignored(undisturbed: Started, tmp_path: Path) -> None:
    with started(tmp_path, held=1) as going:
        port = listens_on(psutil.Process(going.process.pid))
        going.wait_for_round(0)
        context = zmq.Context()
        with context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 2000)
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"garbage")
            client.send_multipart([b"", b"", b""])
            for forged in (
                control.NodeDone(0),
                control.FirstRoundStarted(0),
                control.NodeFailed(0, "another run", "forged"),
                control.NodeFailed(10**6, "another run", "unknown node"),
            ):
                client.send(control.encode(forged))
            time.sleep(0.3)
        context.destroy(linger=0)
        going.release()
        code, out = going.end()
    assert code == 0, out
    assert going.summary["digest"] == undisturbed.summary["digest"]


def test_the_coordinator_and_the_network_process_disconnect_senders_of_too_large_messages(tmp_path: Path) -> None:
    shaped = ("network={name='uniform', latency=0.001}", "processes.max_message_mib=2")
    with started(tmp_path, *shaped, held=1) as going:
        going.wait_for_round(0)
        network = min(going.zygote.children(), key=lambda p: p.create_time())
        servers = [(psutil.Process(going.process.pid), 2 * 2**20 + 1), (network, 2**16 + 1)]
        context = zmq.Context()
        for process, size in servers:
            with context.socket(zmq.DEALER) as client:
                disconnected = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                client.connect(f"tcp://127.0.0.1:{listens_on(process)}")
                client.send(bytes(size))
                assert disconnected.poll(120_000), "the server disconnects before it has received everything"
                client.disable_monitor()
        context.destroy(linger=0)
        going.release()
        code, out = going.end()
    assert code == 0, out


# Nodes that start and do not report that they listen

SLOW_START = textwrap.dedent(
    '''
    """D-PSGD in which node 2 does not report that it listens, once the file "began" exists. The start timeout is
    long, unless the coordinator waits for node 2 alone."""

    from pathlib import Path

    from shoal.algorithms.dpsgd import DPSGD
    from shoal.engines.processes import control
    from shoal.engines.processes.coordinator_link import CoordinatorLink
    from shoal.engines.processes.liveness import LivenessMonitor
    from shoal.engines.processes.node_registry import NodeState

    send = CoordinatorLink.send


    def send_without_node_2(self, message, params=None):
        if isinstance(message, control.NodeListening) and message.node == 2:
            if Path("began").exists():
                return
            Path("began").touch()
        send(self, message, params)


    CoordinatorLink.send = send_without_node_2
    from_the_start = Path("began").exists()


    def start_timeout(self):
        restarted = len(self._registry.in_state(NodeState.RUNNING)) > 0
        only_node_2 = self._start_monitor.nodes == {2} and (from_the_start or restarted)
        return 0.5 if only_node_2 else 600.0


    LivenessMonitor.start_timeout = property(start_timeout)


    class SlowStart(DPSGD):
        pass
    '''
)


def test_a_node_that_never_reports_that_it_listens_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "slow_start.py").write_text(SLOW_START)
    (tmp_path / "began").touch()
    code, out, _ = run(tmp_path, "algorithm={name='slow_start.py:SlowStart', rounds=2}")
    assert code == 2, out
    assert "node 2 could not start: did not report within 0.5 s that it listens" in out


def test_a_restarted_node_that_never_reports_that_it_listens_is_lost(tmp_path: Path) -> None:
    (tmp_path / "slow_start.py").write_text(SLOW_START)
    crash = "fault=[{kind='crash', node=2, time=1.0}, {kind='restart', node=2, time=1.5}]"
    code, out, done = run(
        tmp_path, "algorithm={name='slow_start.py:SlowStart', rounds=20}", "speed={step_seconds=0.1}", crash
    )
    assert code == 3, out
    assert "did not report within 0.5 s that it listens" in out
    assert ends(done.folder) == {0, 1, 3, 4, 5}
    assert done.summary["status"] == "incomplete"


# Warnings and errors


def test_a_disconnected_graph_warns(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "topology={name='edges', edges=[[0, 1], [2, 3], [4, 5]]}")
    assert code == 0
    assert "the graph of 6 nodes is disconnected" in out


def test_a_model_larger_than_the_largest_message_is_an_error(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "processes.max_message_mib=0.001", "processes.receive_timeout=0.5")
    assert code == 2
    assert "max_message_mib" in out


def test_a_node_that_is_killed_while_it_finishes_is_lost(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(
        HELD + textwrap.dedent(
            """
            class Killed(DPSGD):
                async def run(self, node):
                    await super().run(node)
                    if node.id == 1:
                        import os, shoal.engines.processes.node_run as node_run
                        node_run.process_memory = lambda: os.kill(os.getpid(), 9)
            """
        )
    )  # fmt: skip
    code, out, done = run(tmp_path, "algorithm={name='killed.py:Killed', rounds=2}")
    assert ends(done.folder) == {0, 2, 3, 4, 5}
    assert code == 3, out
    assert json.loads(done.folder.summary.read_text())["status"] == "incomplete"


def test_few_connections_serve_many_peers(tmp_path: Path) -> None:
    wide, narrow = "topology={name='full'}", "processes.connections=1"
    _, _, many = run(tmp_path / "many", wide)
    code, out, few = run(tmp_path / "few", wide, narrow)
    assert code == 0, out
    assert few.summary["digest"] == many.summary["digest"]
    assert few.summary["messages_sent"] == many.summary["messages_sent"]
