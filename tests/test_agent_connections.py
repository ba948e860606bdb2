"""The coordinator's connections to agents before a run begins, and the folders of agents."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import until
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.agent_folder import agent_folder
from shoal.engines.processes.remote.agent_server import AgentServer
from shoal.engines.processes.remote.agents_plan import AgentsPlan, ListedAgent
from shoal.engines.processes.remote.channel import Address, Channel, Trust
from shoal.engines.processes.remote.connections import AgentConnections
from shoal.engines.processes.remote.handshakes import MAX_SHOWN, PERIOD_SECONDS, RejectionNotices
from shoal.engines.processes.remote.hosted_run import AgentOptions
from shoal.engines.processes.remote.link import Beat
from shoal.errors import LaunchError
from shoal.experiment import Experiment
from shoal.results.records import RunFolder


class StandIn:
    """An agent without nodes: it opens a session, and answers heartbeats if it `answers`."""

    def __init__(self, name: str, answers: bool = True) -> None:
        self.channel = Channel(Trust(), lambda reason: None)
        self.info = protocol.AgentInfo(name, protocol.versions(), 1, 2**30, "127.0.0.1", "127.0.0.1")
        self.answers = answers
        self.session: str | None = None
        self.join_at = 0.0

    def listen(self, port: int = 0) -> int:
        return self.channel.listen(Address("127.0.0.1", port))

    def join(self, port: int, route: bytes | None = None) -> None:
        self.channel.dial(Address("127.0.0.1", port), None, route or self.info.name.encode())

    def serve(self) -> None:
        """Handle what has arrived, as an agent does."""
        if self.session is None and time.monotonic() > self.join_at:
            self.join_at = time.monotonic() + 0.1
            self.channel.send(b"", protocol.Join(self.info), [])
        for received in self.channel.receive():
            header = received.header
            if isinstance(header, protocol.Open):
                self.session = header.session
                self.channel.send(received.route, protocol.Opened(header.session, self.info), [])
            elif isinstance(header, protocol.Close):
                self.session = None
            elif isinstance(header, Beat) and header.session != self.session:
                self.channel.send(received.route, protocol.NoSession(header.session), [])
            elif isinstance(header, Beat) and self.answers:
                answer = Beat(header.session, 0, 0, time.monotonic(), header.time)
                self.channel.send(received.route, answer, [])


def serve(agents: Iterable[StandIn]) -> bool:
    for agent in agents:
        agent.serve()
    return True


class Coordinator:
    """A coordinator that connects to its agents in a thread."""

    def __init__(self, plan: AgentsPlan) -> None:
        self.notices: list[str] = []
        self.connections = AgentConnections(plan, self.notices.append)
        self._threads = ThreadPoolExecutor(1)
        self._ended = False
        self.connected = self._threads.submit(self.connections.connect, lambda: self._ended)

    def wait_for(self, notice: str, *agents: StandIn) -> None:
        """Let `agents` answer until the coordinator has shown a text."""
        until(lambda: serve(agents) and any(notice in shown for shown in self.notices))

    def connect(self, *agents: StandIn) -> list[str]:
        """Let `agents` answer until all sessions are open. Returns the names of the agents of the run."""
        until(lambda: serve(agents) and self.connected.done())
        self.connected.result()
        return [agent.name for agent in self.connections.agents]

    def close(self) -> None:
        self._ended = True
        self._threads.shutdown()
        self.connections.close()


@pytest.fixture
def opened() -> Iterator[list[Coordinator | StandIn]]:
    """What a test has opened, to be closed."""
    found: list[Coordinator | StandIn] = []
    yield found
    for one in found:
        (one if isinstance(one, Coordinator) else one.channel).close()


def stand_in(opened: list[Coordinator | StandIn], name: str, answers: bool = True) -> StandIn:
    opened.append(agent := StandIn(name, answers))
    return agent


def coordinator(opened: list[Coordinator | StandIn], plan: AgentsPlan) -> Coordinator:
    opened.insert(0, made := Coordinator(plan))
    return made


def listed(port: int) -> tuple[ListedAgent, ...]:
    return (ListedAgent(Address("127.0.0.1", port)),)


def joining_port(made: Coordinator) -> int:
    made.wait_for("to join at")
    return int(made.notices[0].rpartition(":")[2])


def test_an_agent_that_answers_no_heartbeat_is_an_error(opened: list[Coordinator | StandIn]) -> None:
    agent = stand_in(opened, "a", answers=False)
    made = coordinator(opened, AgentsPlan(listed(agent.listen()), answer_timeout=0.5))
    with pytest.raises(
        LaunchError, match=r"agent 'a' has answered no heartbeat in 0\.5 s, so the difference of the cl"
    ):
        made.connect(agent)


def test_an_agent_that_ends_after_it_has_joined_is_replaced(opened: list[Coordinator | StandIn]) -> None:
    made = coordinator(opened, AgentsPlan(listen=Address("127.0.0.1", 0), expect=2, answer_timeout=1.0))
    port = joining_port(made)
    first, other, later = (stand_in(opened, name) for name in ("first", "other", "later"))
    first.join(port)
    made.wait_for("agent 'first' is connected", first)
    other.join(port)
    later.join(port)
    assert made.connect(other, later) == ["later", "other"], "the first has ended"


def test_agents_with_one_name_are_numbered_in_all_messages(opened: list[Coordinator | StandIn]) -> None:
    made = coordinator(opened, AgentsPlan(listen=Address("127.0.0.1", 0), expect=3))
    agents = [stand_in(opened, "a") for _ in range(3)]
    for number, agent in enumerate(agents):
        agent.join(joining_port(made), f"route {number}".encode())
    assert made.connect(*agents) == ["a", "a-2", "a-3"]
    connected = [notice for notice in made.notices if "is connected" in notice]
    assert [notice.partition(" is connected")[0] for notice in connected] == [
        "agent 'a'",
        "agent 'a-2' (another agent has the name 'a'; --name sets the name)",
        "agent 'a-3' (another agent has the name 'a'; --name sets the name)",
    ]


def test_an_agent_that_is_restarted_while_others_join_keeps_its_name(opened: list[Coordinator | StandIn]) -> None:
    made = coordinator(opened, AgentsPlan(listen=Address("127.0.0.1", 0), expect=2, answer_timeout=1.0))
    port = joining_port(made)
    killed, restarted, other = StandIn("gpu"), stand_in(opened, "gpu"), stand_in(opened, "cpu")
    killed.join(port, b"route 1")
    made.wait_for("agent 'gpu' is connected", killed)
    killed.channel.close()
    restarted.join(port, b"route 2")
    made.wait_for("agent 'gpu-2' (another agent has the name 'gpu'; --name sets the name) is connected", restarted)
    other.join(port)
    assert made.connect(restarted, other) == ["cpu", "gpu"]
    assert made.notices[-1] == "agent 'gpu-2' gets the name 'gpu': the agent that had it has ended"


def test_a_restarted_agent_is_used_and_the_run_begins(opened: list[Coordinator | StandIn]) -> None:
    killed = StandIn("a")
    port = killed.listen()
    plan = AgentsPlan(listed(port), listen=Address("127.0.0.1", 0), expect=1)
    made = coordinator(opened, plan)
    made.wait_for("agent 'a' is connected", killed)
    killed.channel.close()
    restarted, joined = stand_in(opened, "a"), stand_in(opened, "b")
    restarted.listen(port)
    made.wait_for("agent 'a' was restarted", restarted)
    joined.join(joining_port(made))
    assert made.connect(restarted, joined) == ["a", "b"]
    restarted.session = None  # it is restarted again, after the run has begun
    agent = made.connections.agents[0]

    def loses_the_agent() -> bool:
        made.connections.pump()
        restarted.serve()
        return agent.is_lost

    until(loses_the_agent)
    assert agent.lost == "it was restarted, or has another run"


# Folders


def test_folders_of_dead_agents_are_removed_and_no_others(tmp_path: Path) -> None:
    with agent_folder(tmp_path) as one:
        (one / "file").touch()
        (tmp_path / "shoal-agent-killed" / "run").mkdir(parents=True)
        (tmp_path / "other").mkdir()
        with agent_folder(tmp_path) as two:
            assert sorted(tmp_path.iterdir()) == sorted([one, two, tmp_path / "other"])
            assert (one / "file").exists()
        assert not two.exists()
        assert one.exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "other"]


# Handshakes that fail


def shown_by_joining_agent(trust: Trust, port: int, folder: Path) -> list[str]:
    """What an agent shows that joins at a port where it gets no connection."""
    shown: list[str] = []
    channel = Channel(trust, shown.append)
    key = next(iter(trust.trusted.values()), None)
    channel.dial(Address("127.0.0.1", port), key, secrets.token_bytes(8), watched=True)
    agent = AgentServer(AgentOptions("a", "127.0.0.1", "127.0.0.1", folder), channel, joins=True, notify=shown.append)
    try:
        began = time.monotonic()
        until(lambda: agent.turn() or shown, 20)
        while time.monotonic() - began < 3.5:  # one more check of the agent
            agent.turn()
    finally:
        agent.close()
    return shown


@pytest.mark.parametrize(
    ("key", "trust", "advice"),
    [
        ("other", "coordinator", "the coordinator does not accept the key of this agent"),
        ("agent", "other", "its key is not the one of this agent's --trust"),
        (None, None, "one of the two has no keys"),
    ],
)
def test_an_agent_shows_that_keys_do_not_match_and_the_coordinator_shows_it_once(
    opened: list[Coordinator | StandIn], key: str | None, trust: str | None, advice: str, tmp_path: Path
) -> None:
    pairs = {name: KeyPair.fresh() for name in ("coordinator", "agent", "other")}
    trusting = Trust(pairs["coordinator"], {"agent": pairs["agent"].public})
    made = coordinator(opened, AgentsPlan(trust=trusting, listen=Address("127.0.0.1", 0), expect=1))
    own = Trust() if key is None or trust is None else Trust(pairs[key], {"coordinator": pairs[trust].public})
    (text,) = shown_by_joining_agent(own, joining_port(made), tmp_path)
    assert advice in text
    first = [notice for notice in made.notices if "rejected an unauthenticated connection" in notice]
    assert len(first) == 1
    opened.remove(made)
    made.close()
    counts = [notice for notice in made.notices if re.search(r"rejected \d+ unauthenticated connections", notice)]
    assert len(counts) == 1


def test_an_agent_names_a_forwarded_port_without_a_coordinator_first(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as forwarder, ThreadPoolExecutor(1) as threads:

        def close_connections() -> None:
            with contextlib.suppress(OSError):
                while True:
                    forwarder.accept()[0].close()

        threads.submit(close_connections)
        (text,) = shown_by_joining_agent(Trust(), forwarder.getsockname()[1], tmp_path)
        forwarder.shutdown(socket.SHUT_RDWR)
    causes = text.partition("before the keys are exchanged: ")[2]
    assert causes.startswith("no coordinator listens yet behind a forwarded port")


def test_the_number_of_notices_of_rejected_connections_is_limited_in_each_period() -> None:
    shown: list[str] = []
    now = 0.0
    rejected = RejectionNotices(shown.append, lambda: now)
    for key in range(2 * MAX_SHOWN):
        rejected(f"key {key}")
    assert len(shown) == MAX_SHOWN + 1
    assert "other addresses or keys" in shown[-1]
    shown.clear()
    now = PERIOD_SECONDS
    rejected("another key")
    assert shown == [
        f"rejected {MAX_SHOWN} unauthenticated connections: other addresses or keys",
        "rejected an unauthenticated connection: another key (further ones are only counted)",
    ]


def test_an_agent_shows_the_number_of_rejected_connections_at_the_end_of_a_run(
    opened: list[Coordinator | StandIn], tmp_path: Path
) -> None:
    pairs = {name: KeyPair.fresh() for name in ("coordinator", "agent", "other")}
    shown: list[str] = []
    channel = Channel(Trust(pairs["agent"], {"coordinator": pairs["coordinator"].public}), shown.append)
    address = Address("127.0.0.1", channel.listen(Address("127.0.0.1", 0)))
    options = AgentOptions("a", "127.0.0.1", "127.0.0.1", tmp_path / "agent")
    agent = AgentServer(options, channel, joins=False, notify=shown.append)
    unknown = Channel(Trust(pairs["other"], {"agent": pairs["agent"].public}), lambda reason: None)
    trust = Trust(pairs["coordinator"], {"agent": pairs["agent"].public})
    made = coordinator(opened, AgentsPlan((ListedAgent(address, key=pairs["agent"].public),), trust=trust))
    try:
        until(lambda: agent.turn() or made.connected.done())
        table = Experiment(nodes=1, engine="processes").to_table()
        begin = protocol.BeginRun("r", "secret", 1, 1, False, False, table, [], 0.0)
        made.connections.agents[0].begin(begin, RunFolder.create(tmp_path, "home"))
        until(lambda: agent.turn() or made.connections.pump() or any(options.folder.glob("r/*")))
        unknown.dial(address, pairs["agent"].public, b"other", watched=True)
        for _ in range(3):
            until(lambda: agent.turn() or unknown.handshake_problem() is not None)
        opened.remove(made)
        made.close()
        until(lambda: agent.turn() or any("has ended" in text for text in shown))
        assert re.search(r"rejected \d unauthenticated connections: .*: not on the list of keys", shown[-1])
    finally:
        unknown.close()
        agent.close()
