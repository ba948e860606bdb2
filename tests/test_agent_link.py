"""The link between coordinator and agents: messages in order, none lost or repeated; files; clocks."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disks import fill, small_disk
from shoal.engines.processes import control
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.channel import Address, Trust
from shoal.engines.processes.remote.files import CHUNK_BYTES, FileReceiver, FileSender
from shoal.engines.processes.remote.hosted_run import AgentOptions, HostedRun, names_of_code
from shoal.engines.processes.remote.link import (
    BEATS_BEFORE_REPEAT,
    MAX_REPORT_BYTES,
    WINDOW_BYTES,
    Beat,
    ClockEstimate,
    Data,
    Header,
    Link,
    Missing,
)
from shoal.engines.processes.remote.outbox import IN_FRAME, MAX_MESSAGE_BYTES, PART_BYTES, Frames
from shoal.engines.processes.remote.protocol import FileData, version_differences
from shoal.errors import DiskFullError, LaunchError, MessageError
from shoal.experiment import Experiment
from shoal.results.records import RunFolder


class Connection:
    """Two ends of a link. Messages stay in order while the connection lasts; a break loses those on their way."""

    def __init__(self) -> None:
        self.on_the_way: tuple[deque[tuple[Header, Frames]], ...] = (deque(), deque())
        self.ends = [Link("s", lambda h, f: self.on_the_way[0].append((h, f)))]
        self.ends.append(Link("s", lambda h, f: self.on_the_way[1].append((h, f))))
        self.sent: tuple[list[Frames], ...] = ([], [])
        self.received: tuple[list[Frames], ...] = ([], [])

    def send(self, end: int, stream: str = "", large: bool = False) -> None:
        """Send a message, whose first frame is its stream and its position. A large one fills half of the window."""
        message = [f"{stream}{len(self.sent[end])}".encode(), b"", *([bytes(WINDOW_BYTES // 2)] if large else [])]
        self.sent[end].append(message)
        self.ends[end].send(*message, stream=stream)

    def deliver(self, end: int, count: int) -> None:
        """Deliver messages that `end` has sent."""
        for _ in range(min(count, len(self.on_the_way[end]))):
            link = self.ends[1 - end]
            frames = link.receive(*self.on_the_way[end].popleft())
            link.handled()
            if frames is not None:
                self.received[end].append(frames)

    def lose(self, end: int, count: int) -> None:
        """The connection breaks: the first messages on their way are lost."""
        for _ in range(min(count, len(self.on_the_way[end]))):
            self.on_the_way[end].popleft()

    def bytes_on_the_way(self, end: int) -> int:
        return sum(len(frame) for _, frames in self.on_the_way[end] for frame in frames)

    def settle(self) -> None:
        """The connection is stable from now on, and heartbeats go on."""
        for _ in range(3 * BEATS_BEFORE_REPEAT):
            for end in (0, 1):
                self.ends[end].beat(0.0)
            while any(self.on_the_way):
                for end in (0, 1):
                    self.deliver(end, 1000)
                    self.ends[end].pump()


def of_stream(stream: str, messages: list[Frames]) -> list[Frames]:
    return [message for message in messages if message[0].decode().rstrip("0123456789") == stream]


STREAMS = ("a", "b", "c")
operations = st.lists(
    st.tuples(
        st.sampled_from(["send", "large", "pump", "deliver", "lose", "beat"]),
        st.integers(0, 1),
        st.integers(1, 5),
        st.sampled_from(STREAMS),
    ),
    max_size=60,
)


@settings(max_examples=50)
@given(operations)
def test_messages_of_a_stream_arrive_in_order_once_however_often_connections_break(
    steps: list[tuple[str, int, int, str]],
) -> None:
    connection = Connection()
    for operation, end, count, stream in steps:
        if operation in ("send", "large"):
            connection.send(end, stream, large=operation == "large")
        elif operation == "pump":
            connection.ends[end].pump()
        elif operation == "beat":
            connection.ends[end].beat(0.0)
        elif operation == "deliver":
            connection.deliver(end, count)
        else:
            connection.lose(end, count)
        assert all(link.unacknowledged_bytes <= WINDOW_BYTES + 60 * 10 for link in connection.ends)
    connection.settle()
    for stream in STREAMS:
        for sent, received in zip(connection.sent, connection.received, strict=True):
            assert of_stream(stream, received) == of_stream(stream, sent)
    for end in connection.ends:
        assert end.all_acknowledged
        assert (end.unacknowledged_bytes, end.waiting_bytes) == (0, 0)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["pump", "deliver", "lose", "beat"]), st.integers(1, 5)), max_size=60))
def test_what_is_sent_again_after_a_loss_is_bounded(steps: list[tuple[str, int]]) -> None:
    connection = Connection()
    for _ in range(6):
        connection.send(0, "a", large=True)
    for operation, count in steps:
        if operation == "pump":
            connection.ends[0].pump()
        elif operation == "beat":
            connection.ends[0].beat(0.0)
        elif operation == "deliver":
            before = connection.bytes_on_the_way(0)
            connection.deliver(0, count)
            requests = sum(isinstance(header, Missing) for header, _ in connection.on_the_way[1])
            connection.deliver(1, 1000)
            assert connection.bytes_on_the_way(0) <= before + requests * WINDOW_BYTES
            assert requests <= 1, "one request for all lost messages"
        else:
            connection.lose(0, count)
    connection.settle()
    assert connection.received[0] == connection.sent[0]


def test_small_messages_and_reports_do_not_wait_for_large_messages() -> None:
    connection = Connection()
    link = connection.ends[0]
    for _ in range(10):
        connection.send(0, "models", large=True)
    link.pump()
    link.send_report("heartbeat", b"heartbeat")
    connection.send(0, "other")
    assert connection.bytes_on_the_way(0) <= WINDOW_BYTES + 100, "the rest waits behind the small messages"
    connection.deliver(0, 1000)
    assert [message[0] for message in connection.received[0]][-2:] == [b"heartbeat", b"other10"]
    assert len(connection.received[0]) < 10


def test_reports_replace_each_other_while_the_peer_is_away() -> None:
    connection = Connection()
    link = connection.ends[0]
    reports = 20_000
    for number in range(reports):
        for node in range(2):
            link.send_report(node, b"%d report of node %d" % (number, node))
    link.send(b"done")
    assert link.unacknowledged_bytes < MAX_REPORT_BYTES + 100
    connection.lose(0, 10**6)
    connection.settle()
    received = [message[0] for message in connection.received[0]]
    assert len(received) < reports
    assert received[-3] == b"done"
    assert sorted(received[-2:]) == [b"%d report of node %d" % (reports - 1, node) for node in range(2)]
    assert link.all_acknowledged


def test_a_source_is_read_only_while_the_window_is_not_full() -> None:
    connection = Connection()
    read = []

    def chunks() -> Iterator[Frames]:
        for number in range(50):
            read.append(number)
            yield [bytes(PART_BYTES)]

    link = connection.ends[0]
    link.send_later(chunks(), "files")
    for _ in range(5):
        link.pump()
        link.beat(0.0)
    assert len(read) * PART_BYTES <= WINDOW_BYTES
    connection.settle()
    assert len(connection.received[0]) == len(read) == 50
    assert not link.waits("files")


def test_a_message_that_never_ends_is_rejected() -> None:
    link = Link("s", lambda header, frames: None)
    part = bytes(MAX_MESSAGE_BYTES // 4)
    for number in range(1, 5):
        assert link.receive(Data("s", number, 0, IN_FRAME), [part]) is None
    with pytest.raises(MessageError, match="more than 1024 MiB"):
        link.receive(Data("s", 5, 0, IN_FRAME), [part])


def test_messages_of_another_session_are_ignored() -> None:
    link = Link("a", lambda header, frames: None)
    assert link.receive(Beat("b", 5, 0, 0.0), []) is None
    other: list[tuple[Header, Frames]] = []
    Link("b", lambda header, frames: other.append((header, frames))).send(b"x")
    assert link.receive(*other[0]) is None


@given(st.floats(-1e6, 1e6), st.floats(0, 5), st.floats(0, 5))
def test_the_difference_of_clocks_is_known_up_to_half_of_a_round_trip(offset: float, there: float, back: float) -> None:
    estimate = ClockEstimate()
    assert estimate.error is None
    for slower in (3.0, 1.0, 2.0):
        sent = 100.0
        estimate.add(sent, sent + slower * there - offset, sent + slower * (there + back))
    assert estimate.error == pytest.approx((there + back) / 2)
    assert abs(estimate.offset - offset) <= (there + back) / 2 + 1e-6


# Files


@pytest.fixture
def folders(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    return RunFolder.create(tmp_path, "agent"), RunFolder.create(tmp_path, "home")


def test_growing_and_replaced_files_arrive_as_they_are(folders: tuple[RunFolder, RunFolder]) -> None:
    there, home = folders
    sender, receiver = FileSender(there), FileReceiver(home)

    def transfer() -> None:
        for data, content in sender.chunks():
            receiver.write(data, content)

    large = bytes(range(256)) * (CHUNK_BYTES // 256) * 2 + b"end"
    for step in (b"one\n", b"two\n" * 3):
        with there.node(3).open("ab") as records, there.log.open("ab") as log:
            records.write(step)
            log.write(large)
        there.model(3).write_bytes(large + step)
        transfer()
        assert home.node(3).read_bytes() == there.node(3).read_bytes()
        assert home.log.read_bytes() == there.log.read_bytes()
        assert home.model(3).read_bytes() == large + step
    assert not list(sender.chunks()), "nothing is sent twice"
    assert not list(home.path.rglob("*.part"))


def test_several_agents_append_to_one_log(folders: tuple[RunFolder, RunFolder]) -> None:
    _, home = folders
    one, other = FileReceiver(home), FileReceiver(home)
    one.write(FileData("nodes.log", 0, grows=True), b"one\n")
    other.write(FileData("nodes.log", 0, grows=True), b"other\n")
    one.write(FileData("nodes.log", 4, grows=True), b"one again\n")
    assert home.log.read_bytes() == b"one\nother\none again\n"


@pytest.mark.parametrize(
    ("path", "grows"),
    [
        ("../x.jsonl", True), ("/etc/x.jsonl", True), ("nodes/../../x.jsonl", True), ("nodes/a/b.jsonl", True),
        ("experiment.toml", True), ("other/x.jsonl", True), ("", True), ("nodes.log", False), ("x.npy", False),
        ("checkpoints/../x.npy", False), ("checkpoints/a/b/c.npy", False), ("checkpoints/x.py", False),
        ("/checkpoints/x.npy", False), ("", False), ("checkpoints/x\0.npy", False),
    ],
)  # fmt: skip
def test_an_agent_cannot_write_other_files(folders: tuple[RunFolder, RunFolder], path: str, grows: bool) -> None:
    _, home = folders
    with pytest.raises(MessageError, match="no file of a run"):
        FileReceiver(home).write(FileData(path, 0, grows, last=True), b"x")


def test_a_chunk_that_does_not_follow_is_rejected(folders: tuple[RunFolder, RunFolder]) -> None:
    receiver = FileReceiver(folders[1])
    receiver.write(FileData("nodes/0.jsonl", 0, grows=True), b"abc")
    for offset in (0, 2, 4):
        with pytest.raises(MessageError, match="does not follow"):
            receiver.write(FileData("nodes/0.jsonl", offset, grows=True), b"x")


def test_files_wait_in_memory_while_the_disk_is_full(folders: tuple[RunFolder, RunFolder], tmp_path: Path) -> None:
    there, _ = folders
    with small_disk(tmp_path / "disk", kib=1024) as disk:
        home = RunFolder.create(disk, "home")
        sender, receiver = FileSender(there), FileReceiver(home)
        filler = fill(disk)
        for step in range(3):
            with there.node(0).open("ab") as records:
                records.write(b"%d\n" % step * 5000)
            there.model(0).write_bytes(bytes([step]) * 100_000)
            for data, content in sender.chunks():
                receiver.write(data, content)
        assert receiver.waits
        with pytest.raises(DiskFullError):
            receiver.write_waiting()
        filler.unlink()
        receiver.write_waiting()
        assert not receiver.waits
        assert home.node(0).read_bytes() == there.node(0).read_bytes()
        assert home.model(0).read_bytes() == there.model(0).read_bytes()


def test_the_coordinator_keeps_a_bounded_part_of_the_files(
    folders: tuple[RunFolder, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engines.processes.remote.files.MAX_WAITING_BYTES", 20_000)
    with small_disk(tmp_path / "disk", kib=64) as disk:
        receiver = FileReceiver(RunFolder.create(disk, "home"))
        fill(disk)
        for offset in (0, 10_000):
            receiver.write(FileData("nodes/0.jsonl", offset, grows=True), bytes(10_000))
        with pytest.raises(DiskFullError):
            receiver.write(FileData("nodes/0.jsonl", 20_000, grows=True), bytes(10_000))


# Addresses, keys and versions


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:7700", "127.0.0.1", 7700, True), ("localhost:1", "localhost", 1, True),
        ("[::1]:65535", "[::1]", 65535, True), ("10.0.0.2:7700", "10.0.0.2", 7700, False),
        ("0.0.0.0:0", "0.0.0.0", 0, False), ("host.example:80", "host.example", 80, False),
    ],
)  # fmt: skip
def test_addresses(text: str, host: str, port: int, loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback, str(address)) == (host, port, loopback, text)


@pytest.mark.parametrize("text", ["", "7700", "host", "host:", ":1", "host:70000", "a b:1", "host:1:2", "host:-1"])
def test_wrong_addresses_are_rejected(text: str) -> None:
    with pytest.raises(LaunchError, match="expected an address HOST:PORT"):
        Address.parse(text)


def test_keys_are_optional_only_on_loopback_addresses() -> None:
    Trust().require(Address("127.0.0.1", 1), "agent", "coordinator")
    with pytest.raises(LaunchError, match=r"keys/agent\.key_secret --trust keys/coordinator\.key"):
        Trust().require(Address("10.0.0.1", 1), "agent", "coordinator")
    with pytest.raises(LaunchError, match="keys"):
        Trust(trusted={"coordinator": b"x"}).require(Address("127.0.0.1", 1), "agent", "coordinator")


def test_versions_that_differ_are_named() -> None:
    assert version_differences({"torch": "1", "shoal": "2"}, {"torch": "1", "shoal": "2"}) == []
    assert version_differences({"torch": "1"}, {"torch": "2", "new": "3"}) == [
        "new 3 (here missing)",
        "torch 2 (here 1)",
    ]


# What an agent accepts


@pytest.mark.parametrize(
    "table",
    [
        {"sharing": {"name": "subprocess:Popen"}}, {"sharing": {"name": "0/.py:1"}}, {"sharing": {"name": "x.py:Ä"}},
        {"sharing": {"name": "secure", "inner": "os:system"}}, {"group": [{"sharing": {"name": "os.path:C"}}]},
        {"sharing": {"name": "__main__:X"}}, {"sharing": {"name": "no_such_module:X"}},
        {"trainer": {"name": "flower", "client": "x/os:system"}},
        {"trainer": {"name": "flower", "initial": "http://os:getcwd"}},
        {"trainer": {"name": "flower", "client": "0/client.py"}}, {"trainer": {"name": "flower", "client": "x.py\n"}},
    ],
    ids=str,
)  # fmt: skip
def test_all_names_of_code_are_found(table: dict[str, object]) -> None:
    assert list(names_of_code(table))


def test_an_experiment_of_built_in_components_names_no_code() -> None:
    table = {key: value for key, value in Experiment(nodes=4).to_table().items() if key != "processes"}
    assert not list(names_of_code(table))


def test_a_coordinator_cannot_send_an_experiment_past_the_checks() -> None:
    request = control.Prepare({"sharing": {"name": "subprocess:Popen"}}, "/", 4)
    with pytest.raises(msgspec.ValidationError):
        protocol.decode_to_remote(protocol.encode(request))


@pytest.mark.parametrize("name", ["../../outside", "/x", "", "a/b", ".hidden"])
def test_a_run_cannot_be_named_after_another_folder(tmp_path: Path, name: str) -> None:
    begin = protocol.BeginRun(name, "run", 4, 4, False, False, {}, [], 0.0)
    options = AgentOptions("a", "127.0.0.1", "127.0.0.1", tmp_path / "root")
    with pytest.raises(LaunchError, match="of the run is invalid"):
        HostedRun(begin, options, Link("s", lambda header, frames: None))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x.csv", "/x.csv", "x.csv", "0/../../x.csv", "0/x\0.csv", "0\0/x.csv"])
def test_a_file_cannot_be_written_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    file = protocol.SourceFile(name, hashlib.sha256(b"x").hexdigest(), b"x")
    begin = protocol.BeginRun("run", "run", 4, 4, False, False, {}, [file], 0.0)
    options = AgentOptions("a", "127.0.0.1", "127.0.0.1", tmp_path / "root")
    with pytest.raises(LaunchError, match="of a file is invalid"):
        HostedRun(begin, options, Link("s", lambda header, frames: None))
    assert not [path for path in tmp_path.rglob("*") if "x" in path.name]
