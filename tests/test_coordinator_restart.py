"""A coordinator that is killed while nodes run on agents: another one continues the run where it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import SMALL
from machines import end
from shoal import resume
from shoal.engines.processes.remote.agents_plan import AgentsPlan, ListedAgent
from shoal.engines.processes.remote.channel import Address
from shoal.engines.processes.remote.files import FileReceiver
from shoal.engines.processes.remote.link import Data, Frames, Header, Link
from shoal.engines.processes.remote.protocol import FileData
from shoal.errors import LaunchError
from shoal.experiment.running import Machines
from shoal.results.records import JOINED, Average, Event, Round, RunFolder

pytestmark = pytest.mark.slow

ROUNDS = 250
LONG = ["--engine", "processes", "--set", f"algorithm.rounds={ROUNDS}", "--set", "evaluation.every=50"]


class Place:
    """A folder with agents and runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "small.toml").write_text(SMALL)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "shoal", *arguments]
            self.started[name] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        return self.started[name]

    def output(self, name: str) -> str:
        return " ".join((self.folder / f"{name}.log").read_text().split())

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    def listening(self, name: str) -> str:
        """The address of an agent that listens at any free port."""
        self.wait_until(lambda: "listens at" in self.output(name), self.output(name))
        return self.output(name).split("listens at ")[1].split()[0]

    def run(self, out: str) -> RunFolder:
        return RunFolder(next((self.folder / out).glob("*/*")))

    def kill_coordinator(self) -> None:
        """Kill the coordinator when its nodes have finished some rounds."""
        records = self.folder / "runs"
        self.wait_until(lambda: any(len(f.read_bytes()) > 1500 for f in records.glob("*/*/nodes/0.jsonl")), "no rounds")
        self.started["run"].send_signal(signal.SIGKILL)
        self.started["run"].wait()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    end(*made.started.values())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run without agents, undisturbed."""
    place = Place(tmp_path_factory.mktemp("alone"))
    assert place.start("run", "run", "small.toml", *LONG).wait(200) == 0, place.output("run")
    return place.run("runs")


@pytest.mark.parametrize("way", ["agents listen", "agents join"])
def test_another_coordinator_continues_the_run(way: str, place: Place, expected: RunFolder, unused_port: int) -> None:
    if way == "agents listen":
        for name in ("a", "b"):
            place.start(name, "agent", "--name", name, "--listen", "127.0.0.1:0")
        where = ["--agents", ",".join(place.listening(name) for name in ("a", "b"))]
    else:
        where = ["--listen", f"127.0.0.1:{unused_port}", "--expect", "2"]
        for name in ("a", "b"):
            place.start(name, "agent", "--name", name, "--join", f"127.0.0.1:{unused_port}", "--once")
    place.start("run", "run", "small.toml", *LONG, *where)
    place.kill_coordinator()
    folder = place.run("runs")
    assert (folder.path / "coordinator.json").stat().st_mode & 0o077 == 0, "readable by its owner only"
    assert place.start("resume", "resume", *where).wait(200) == 0, place.output("resume")
    assert "which had no coordinator for" in place.output("resume")
    ours, theirs = folder.read_summary(), expected.read_summary()
    for key in ("digest", "bytes_sent", "messages_sent", "accuracy", "rounds", "status"):
        assert ours[key] == theirs[key], key
    for node in range(6):
        assert [r.round for r in folder.read(node) if isinstance(r, Round)] == list(range(ROUNDS))
        assert folder.model(node).read_bytes() == expected.model(node).read_bytes()
    averages = [record.round for record in folder.read_averages() if isinstance(record, Average)]
    assert averages == sorted(set(averages)), "none twice"
    assert averages[-1] == ROUNDS - 1
    assert not (folder.path / "coordinator.json").exists()
    if way == "agents join":
        assert [place.started[name].wait(30) for name in ("a", "b")] == [0, 0]


def test_nodes_of_an_agent_that_ended_meanwhile_have_failed_and_the_results_of_the_others_are_collected(
    place: Place,
) -> None:
    for name in ("a", "b"):
        place.start(name, "agent", "--name", name, "--listen", "127.0.0.1:0", "--folder", str(place.folder / name))
    addresses = [place.listening(name) for name in ("a", "b")]
    timeout = ["--set", "processes.receive_timeout=2"]
    place.start("run", "run", "small.toml", *LONG, *timeout, "--agents", ",".join(addresses))
    place.kill_coordinator()
    end(place.started["b"])

    def done() -> bool:
        """Whether the models of nodes 0 to 2 are on the machine of their agent: they are done."""
        return len(list((place.folder / "a").glob("*/*/*/checkpoints/*.npy"))) == 3

    place.wait_until(done, "the nodes do not end without a coordinator")
    assert place.start("resume", "resume", "--agents", addresses[0]).wait(200) == 3, place.output("resume")
    folder = place.run("runs")
    summary = folder.read_summary()
    assert summary["status"] == "incomplete"
    assert sorted(summary["lost"]) == ["3", "4", "5"]
    for node in range(3):
        assert [r.round for r in folder.read(node) if isinstance(r, Round)] == list(range(ROUNDS))


def test_a_run_that_ended_with_its_coordinator_and_has_no_checkpoint_cannot_be_continued(place: Place) -> None:
    place.start("a", "agent", "--name", "a", "--listen", "127.0.0.1:0")
    place.start("run", "run", "small.toml", *LONG, "--agents", place.listening("a"))
    place.kill_coordinator()
    end(place.started["a"])
    place.start("c", "agent", "--name", "c", "--listen", "127.0.0.1:0")
    assert place.start("resume", "resume", "--agents", place.listening("c")).wait(60) == 2
    assert "has no valid checkpoint" in place.output("resume")


LATE = """
name       = "late"
engine     = "processes"
nodes      = 6
seed       = 1
algorithm  = { name = "dpsgd", rounds = 40 }
topology   = { name = "regular", degree = 3 }
model      = { name = "logistic" }
training   = { batch_size = 8, local_steps = 1 }
speed      = { step_seconds = 0.1 }
evaluation = { every = 0, samples = 20 }
processes  = { receive_timeout = 120 }

[[fault]]
kind = "join"
node = 4
time = 2.5

[[fault]]
kind  = "join"
node  = 5
round = 25
"""


def agents_at(*addresses: str) -> Machines:
    return Machines(AgentsPlan(tuple(ListedAgent(Address.parse(address)) for address in addresses)))


def test_after_a_wrong_address_a_run_with_late_nodes_is_continued(
    place: Place, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.folder / "late.toml").write_text(LATE)
    for name in ("a", "b"):
        place.start(name, "agent", "--name", name, "--listen", "127.0.0.1:0")
    addresses = [place.listening(name) for name in ("a", "b")]
    place.start("run", "run", "late.toml", "--agents", ",".join(addresses))
    place.wait_until(lambda: list(place.folder.glob("runs/*/*/coordinator.json")), place.output("run"))
    folder = place.run("runs")
    place.wait_until(lambda: folder.node(0).exists() and list(folder.read(0)), "no rounds")
    place.started["run"].kill()
    place.started["run"].wait()
    (zygote,) = psutil.Process(place.started["b"].pid).children()
    zygote.children()[0].kill()  # node 3: without a coordinator, its peers do not learn that it has failed, and wait
    left = (folder.path / "coordinator.json").read_bytes()
    with monkeypatch.context() as impatient:
        impatient.setattr("shoal.engines.processes.remote.connections.REACH_SECONDS", 1.0)
        with pytest.raises(LaunchError, match="cannot be reached"):
            resume(folder.path, machines=agents_at(addresses[0], f"127.0.0.1:{unused_port}"))
    assert (folder.path / "coordinator.json").read_bytes() == left, "nothing has changed"
    run = resume(folder.path, machines=agents_at(*addresses))
    assert (run.status, run.summary["lost"]) == ("incomplete", {"3": "killed by SIGKILL"})
    records = {node: list(folder.read(node)) for node in range(6)}
    rounds = {node: [r.round for r in records[node] if isinstance(r, Round)] for node in records}
    assert all(rounds[node] == list(range(40)) for node in range(3))
    for node in (4, 5):
        events = [record.what for record in records[node] if isinstance(record, Event)]
        assert [what for what in events if what in ("fault", JOINED)] == ["fault", JOINED], "it was started once"
        assert rounds[node] == list(range(rounds[node][0], 40))
    assert rounds[5][0] >= 25
    assert not (folder.path / "coordinator.json").exists()


# The link and the files


@given(st.lists(st.sampled_from(["send", "deliver", "acknowledge"]), max_size=40))
def test_a_new_peer_receives_what_the_earlier_one_has_not_acknowledged(steps: list[str]) -> None:
    on_the_way: list[tuple[Header, Frames]] = []
    acknowledged: list[bytes] = []
    agent = Link("1", lambda h, f: on_the_way.append((h, f)), lambda frames: acknowledged.extend(frames))
    earlier = Link("1", lambda h, f: agent.receive(h, f) and None)
    sent = 0
    for step in steps:
        if step == "send":
            agent.send(b"%d" % sent)
            sent += 1
        elif step == "deliver" and on_the_way:
            earlier.receive(*on_the_way.pop(0))
            earlier.handled()
        else:
            earlier.beat(0.0)
    for session, state in (("2", b"state"), ("3", b"later state")):  # the second peer acknowledges nothing
        on_the_way.clear()
        agent.restart(session, state)
        received = [frames[0] for header, frames in on_the_way if isinstance(header, Data)]
        assert received[0] == state
        assert acknowledged + received[1:] == [b"%d" % n for n in range(sent)]


PATHS = ("nodes/0.jsonl", "averages.jsonl", "checkpoints/0.npy")


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 8), st.sampled_from(PATHS)
)
def test_chunks_that_an_earlier_coordinator_has_written_are_not_written_twice(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], written: int, acknowledged: int, name: str
) -> None:
    folder = RunFolder.create(tmp_path_factory.mktemp("run"), "x")
    grows = name.endswith("jsonl")
    before = b"earlier\n" if name == "nodes/0.jsonl" else b""
    chunks, offset = [], 0
    for number, size in enumerate(sizes):
        content = b"%d" % number * size + b"\n"
        chunks.append((FileData(name, offset, grows, last=not grows and number == len(sizes) - 1), content))
        offset += len(content)
    if before:
        (folder.path / name).write_bytes(before)
    earlier = FileReceiver(folder)
    for data, content in chunks[:written]:
        earlier.write(data, content)
    later = FileReceiver(folder, {0: len(before)})
    for data, content in chunks[min(written, acknowledged) :]:
        later.write(data, content)
    assert (folder.path / name).read_bytes() == before + b"".join(content for _, content in chunks)
    assert os.listdir(folder.path / "checkpoints") == ([] if grows else ["0.npy"])
