"""Kernel shaping: the queues of the kernel, the delay at the receiver, and rejected networks."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import leaping
from local_transports import new_message
from shoal.engines.processes.delay import Delay
from shoal.engines.processes.namespaces import Namespaces, address, enter
from shoal.engines.rejoining import REJOIN_REQUEST
from shoal.environment.network.access import AccessLink, access_links
from shoal.environment.network.links import Uniform, star
from shoal.environment.network.model import AccessLimit
from shoal.environment.network.network import MEGABIT, NetworkTimeline
from shoal.errors import ExperimentError, LaunchError
from shoal.experiment import Experiment
from shoal.experiment.environment_builder import build_environment, device_speeds
from shoal.message import Message
from shoal.results.records import Event

ROOT = Path(__file__).parent.parent


def can_shape() -> bool:
    try:
        Namespaces([AccessLink()]).close()
    except LaunchError:
        return False
    return True


root = pytest.mark.skipif(not can_shape(), reason="network namespaces need root, iproute2 and a kernel with veth")


# What the kernel is asked for


BANDWIDTHS = st.floats(0.1, 1000.0)


@given(st.lists(st.tuples(BANDWIDTHS, BANDWIDTHS, BANDWIDTHS | st.just(math.inf), st.floats(1.0, 10.0)), min_size=2))
def test_the_access_link_of_a_node_is_the_slower_of_network_and_device(
    nodes: list[tuple[float, float, float, float]],
) -> None:
    network_state = star([Uniform(upload=up, download=down) for up, down, _, _ in nodes])
    links = access_links(
        NetworkTimeline([(0.0, network_state)]),
        len(nodes),
        [AccessLimit(device, slowdown) for _, _, device, slowdown in nodes],
    )
    for link, (up, down, device, slowdown) in zip(links, nodes, strict=True):
        assert link.upload == pytest.approx(min(up, device) * MEGABIT / slowdown)
        assert link.download == pytest.approx(min(down, device) * MEGABIT / slowdown)


def described(**changed: Any) -> Experiment:
    given = {"nodes": 4, "engine": "processes", "processes": {"shaping": "kernel"}}
    return Experiment(**{**given, **changed})


def links_of(experiment: Experiment) -> tuple[AccessLink, ...] | None:
    return build_environment(experiment, device_speeds(experiment)).access_links


def test_networks_of_access_links_only_are_shaped_by_the_kernel_and_not_by_the_model() -> None:
    assert links_of(described()) == (AccessLink(),) * 4
    stragglers = links_of(described(network={"name": "divshare-stragglers"}))
    assert stragglers == (AccessLink(12 * MEGABIT, 12 * MEGABIT), *(AccessLink(60 * MEGABIT, 60 * MEGABIT),) * 3)
    far = described(
        network={"name": "uniform", "upload": 8, "links": [{"from": "0", "to": "1", "latency": 0.1, "loss": 0.1}]}
    )
    assert links_of(far) == (AccessLink(upload=MEGABIT * 8),) * 4
    assert not build_environment(far, device_speeds(far)).needs_network_model
    assert build_environment(far, device_speeds(far)).timing_matters


def test_the_model_shapes_messages_unless_the_kernel_is_asked_to() -> None:
    modelled = described(processes={}, network={"name": "uniform"})
    assert build_environment(modelled, device_speeds(modelled)).needs_network_model
    assert links_of(modelled) is None
    assert links_of(described(engine="simulation", network={"name": "ten-regions"})) is None


@pytest.mark.parametrize(
    "network",
    [
        {"name": "ten-regions"},
        {"name": "uniform", "links": [{"from": "0", "to": "1", "bandwidth": 5}]},
        {"name": "kollaps", "path": str(ROOT / "examples/networks/two-sites.xml")},
    ],
    ids=lambda network: network["name"],
)
def test_the_kernel_rejects_networks_with_other_links_or_changes(network: dict[str, Any]) -> None:
    experiment = described(network=network)
    with pytest.raises(ExperimentError, match=r"use processes\.shaping = 'model'") as rejected:
        links_of(experiment)
    assert f"network = {network['name']!r}" in str(rejected.value)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"fault": [{"kind": "partition", "nodes": "0", "time": 1.0}]},
            "the kernel cannot cause a 'partition'",
        ),
        ({"fault": [{"kind": "hold", "time": 1.0}]}, "the kernel cannot cause a 'hold'"),
        (
            {"fault": [{"kind": "drop", "time": 1.0, "probability": 0.1}]},
            "the kernel cannot cause a 'drop'",
        ),
        ({"fault": [{"kind": "slow", "node": 0, "time": 1.0, "factor": 2.0}]}, r"fault\[0\]: 'slow' delays messages"),
        ({"availability": {"name": "day-night"}}, "availability = 'day-night': the kernel cannot hold back"),
        ({"processes": {"shaping": "kernel", "host": "0.0.0.0", "announce": "me"}}, r"processes\.announce = 'me'"),
        ({"processes": {"shaping": "tc"}}, r"processes\.shaping = 'tc'"),
    ],
)
def test_features_of_the_model_are_rejected_with_kernel_shaping(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        described(**changed)


def test_faults_of_nodes_work_with_kernel_shaping() -> None:
    described(
        fault=[
            {"kind": "crash", "node": 0, "time": 1.0, "lasting": 1.0},
            {"kind": "hang", "node": 1, "round": 1},
            {"kind": "slow", "node": 2, "time": 1.0, "factor": 2.0, "what": "compute"},
        ]
    )


def test_without_permission_for_namespaces_the_error_names_the_alternatives() -> None:
    """In a process of its own, which gives up being root."""
    program = """
        import os
        from shoal.errors import LaunchError
        from shoal.environment.network.access import AccessLink
        from shoal.engines.processes.namespaces import Namespaces
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            Namespaces([AccessLink()])
        except LaunchError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert "run as root" in done.stdout or "install iproute2" in done.stdout
    assert "processes.shaping = 'model'" in done.stdout


def test_more_nodes_than_ports_of_a_bridge_are_rejected() -> None:
    with pytest.raises(LaunchError, match="1024"):
        Namespaces([AccessLink()] * 1024)


@root
def test_nodes_of_different_namespaces_reach_only_each_other() -> None:
    home = os.stat("/proc/thread-self/ns/net").st_ino
    spaces = Namespaces([AccessLink(upload=MEGABIT), AccessLink()])
    assert os.stat("/proc/thread-self/ns/net").st_ino == home
    places = [spaces.place(node) for node in (0, 1)]
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            enter(places[1])
            os.write(write_end, subprocess.run(["ip", "-brief", "address"], capture_output=True, check=True).stdout)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    devices = os.read(read_end, 4096).decode()
    assert f"{address(1)}/8" in devices
    assert {line.split("@")[0].split()[0] for line in devices.splitlines()} == {"lo", "eth0"}
    spaces.close()
    assert not namespaces_held(os.getpid()) - {home}


# What is left to the receiver


def on_a_delay(network: Uniform, body: Callable[[Delay], Coroutine[Any, Any, None]]) -> list[tuple[float, Message]]:
    """What is delivered, and when."""
    came: list[tuple[float, Message]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        network_state = network.build(3, 0).initial_state
        await body(Delay(network_state, 2, seed=1, deliver=lambda message: came.append((loop.time(), message))))

    leaping.run(run())
    return came


def test_a_message_arrives_after_the_latency_of_its_route_and_in_order() -> None:
    taken: dict[tuple[int, int], float] = {}

    async def body(delay: Delay) -> None:
        for round in range(40):
            for sender in (0, 1):
                taken[sender, round] = asyncio.get_running_loop().time()
                delay.receive(new_message(sender, round))
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.3)

    came = on_a_delay(Uniform(latency=0.03, jitter=0.02), body)
    for sender in (0, 1):
        assert [m.round for _, m in came if m.sender == sender] == list(range(40))
    kept = [time - taken[message.sender, message.round] for time, message in came]
    assert statistics.mean(kept) > 0.03
    assert max(kept) < 0.2
    assert max(kept) - min(kept) > 0.01


@pytest.mark.parametrize("loss", [0.0, 0.1, 0.5, 1.0])
def test_messages_are_lost_with_the_probability_of_their_route(loss: float) -> None:
    async def body(delay: Delay) -> None:
        for round in range(2000):
            delay.receive(new_message(0, round))

    lost = 1 - len(on_a_delay(Uniform(latency=0.0, loss=loss), body)) / 2000
    assert lost == pytest.approx(loss, abs=4 * math.sqrt(loss * (1 - loss) / 2000))


def test_rejoin_requests_of_a_failed_node_are_dropped() -> None:
    async def body(delay: Delay) -> None:
        for sender in (0, 1):
            delay.receive(new_message(sender, kind=REJOIN_REQUEST))
            delay.receive(new_message(sender))
        delay.mark_failed(0)
        await asyncio.sleep(0.05)

    came = on_a_delay(Uniform(latency=0.01), body)
    assert [(m.sender, m.kind) for _, m in came] == [(0, "model"), (1, REJOIN_REQUEST), (1, "model")]


# Whole runs

PROBE = """
    from dataclasses import dataclass

    import numpy as np

    from shoal.message import Payload


    @dataclass(frozen=True)
    class Probe:
        rounds: int = 1
        count: int = 10
        kilobytes: float = 100.0
        pause: float = 0.0

        async def run(self, node):
            peer = node.id ^ 1
            async for _ in node.rounds(self.rounds):
                await node.sleep(0.5)
                if node.id % 2 == 0:
                    content = {"content": np.zeros(int(1000 * self.kilobytes), np.uint8)}
                    for i in range(self.count):
                        payload = Payload(content, {"sent": node.now()})
                        if self.pause or i == self.count - 1:
                            await node.send_and_wait(peer, payload, round=i, kind="probe")
                            await node.sleep(self.pause)
                        else:
                            await node.send([peer], payload, round=i, kind="probe")
                    node.record_event("left", str(node.now()))
                else:
                    while (message := await node.receive(kind="probe", timeout=10.0)) is not None:
                        node.record_event("took", f"{message.payload.fields['sent']} {node.now()} {message.wire_size}")
                        if message.round == self.count - 1:
                            break
"""
QUICK = {
    "model": {"name": "logistic"},
    "evaluation": {"every": 0, "nodes": 0, "average": False},
    "checkpoint": {"final": False},
}
GOODPUT = 1448 / 1514
"""Of each packet on an Ethernet, what is not a header."""


def namespaces_held(process: int) -> set[int]:
    """The network namespaces that a process is in or holds open."""
    held = {os.stat(f"/proc/{process}/ns/net").st_ino}
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("net:["):
            held.add(int(target[5:-1]))
    return held


def namespaces_in_use() -> set[int]:
    found: set[int] = set()
    for process in psutil.pids():
        try:
            found |= namespaces_held(process)
        except OSError:
            continue
    return found


@root
def test_rates_are_those_of_the_links_and_latency_and_loss_those_of_the_routes(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(textwrap.dedent(PROBE))
    rates = {0: 8, 1: 40}
    bulk = [
        {"nodes": "0-1", "algorithm": {"count": 20}, "network": {"upload": rates[0]}},
        {"nodes": "2-3", "algorithm": {"count": 30, "kilobytes": 300.0}, "network": {"download": rates[1]}},
    ]
    small = {"nodes": "4-5", "algorithm": {"count": 200, "kilobytes": 1.0, "pause": 0.005}}
    run = described(
        **{**QUICK, "nodes": 6, "group": [*bulk, small], "base": tmp_path},
        algorithm={"name": "probe.py:Probe"},
        network={"name": "uniform", "links": [{"from": "4", "to": "5", "latency": 0.05, "loss": 0.3}]},
    ).run(tmp_path)
    assert run.status == "completed"
    took = [
        [tuple(map(float, r.detail.split())) for r in run.folder.read(2 * pair + 1) if isinstance(r, Event)]
        for pair in range(3)
    ]
    left = [next(float(r.detail) for r in run.folder.read(2 * pair) if isinstance(r, Event)) for pair in range(3)]
    for pair, megabits in rates.items():
        messages = took[pair]
        seconds = sum(size for _, _, size in messages) * 8e-6 / (megabits * GOODPUT)
        for ended in (messages[-1][1], left[pair]):  # a loaded machine is late to see it; benchmarks look closer
            assert 0.95 * seconds < ended - messages[0][0] < 10 * seconds
    assert 0.049 < min(there - sent for sent, there, _ in took[2]) < 0.15
    assert len(took[2]) == pytest.approx(140, abs=4 * math.sqrt(200 * 0.3 * 0.7))
    assert namespaces_held(os.getpid()) == {os.stat("/proc/self/ns/net").st_ino}


@root
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_run_leaves_no_namespace_behind(tmp_path: Path, end: signal.Signals) -> None:
    file = tmp_path / "long.toml"
    file.write_text(
        described(**QUICK, algorithm={"name": "dpsgd", "rounds": 10**6}, network={"name": "divshare-stragglers"}).toml()
    )
    folders = set(Path("/tmp").glob("shoal-*"))
    home = os.stat("/proc/self/ns/net").st_ino
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "run", str(file), "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        nodes = until(lambda: own_namespaces(process.pid, home))
        assert len(nodes) == 4
        assert set(nodes) < namespaces_held(process.pid)
        process.send_signal(end)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL), out
    until(lambda: not namespaces_in_use() & set(nodes))
    assert not set(Path("/tmp").glob("shoal-*")) - folders


def own_namespaces(coordinator: int, home: int) -> list[int]:
    """Those of the nodes, once all four have entered theirs."""
    below = [p.pid for p in psutil.Process(coordinator).children(recursive=True) if p.is_running()]
    found = [inode for pid in below for inode in namespaces_held(pid) if inode != home]
    return found if len(found) == 4 else []


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except (OSError, psutil.NoSuchProcess):
            pass  # a process has ended while it was looked at
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")
