"""The coordinator's knowledge of every node: its lifecycle state, why it fails, and its progress."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.engines.processes import control
from shoal.errors import RunError
from shoal.types import NodeId, format_node_ids


class NodeState(enum.Enum):
    """The lifecycle of a node. A restart takes an exited node back to `STARTING`."""

    NOT_STARTED = enum.auto()
    STARTING = enum.auto()
    """Its process was requested from the agent."""
    LISTENING = enum.auto()
    """It accepts connections, and waits for the message to start."""
    RUNNING = enum.auto()
    DONE = enum.auto()
    """Its algorithm ended; its process still evaluates and records."""
    EXITED = enum.auto()


@dataclass
class NodeEntry:
    """One node."""

    id: NodeId
    state: NodeState = NodeState.NOT_STARTED
    endpoint: str = ""
    """Where other nodes connect to it."""
    public_key: bytes | None = None
    """None where links are not sealed, and until it is known."""
    failure: str | None = None
    """Why the node failed, if that is known before its process exits."""
    rounds: int = 0
    bytes_sent: int = 0
    last_busy: float = math.inf
    """When the node was last known to compute or to wait for something that ends by itself; on the `WatchClock`."""
    last_message: float = math.inf
    """When the coordinator last read a message of the running node; on the coordinator's `WatchClock`."""
    offline_reasons: int = 0
    """The node is offline while this is above 0."""
    slowdown: control.InjectFault | None = None
    """The fault that slows the node down; a restarted node gets it again."""
    restart_on_exit: bool = False
    """Start the node again as soon as its process, which was killed, has exited."""

    @property
    def present(self) -> bool:
        """Whether the node has a process, or will get one."""
        return self.state is not NodeState.EXITED

    @property
    def working(self) -> bool:
        """Whether the node's algorithm may still run."""
        return self.state not in (NodeState.DONE, NodeState.EXITED)

    @property
    def offline(self) -> bool:
        return self.offline_reasons > 0

    def fail(self, reason: str) -> None:
        """Note why the node fails, unless a reason is known."""
        if self.failure is None:
            self.failure = reason

    def run(self, now: float) -> None:
        """The node has been sent its `Start`. `now` is on the coordinator's `WatchClock`."""
        self.state = NodeState.RUNNING
        self.last_message = self.last_busy = now

    def note_message(self, now: float, busy: bool = True) -> None:
        """A message of the node has arrived: it runs, and it is `busy` or waits for other nodes."""
        self.last_message = now
        if busy:
            self.last_busy = now

    def start_again(self, now: float) -> None:
        self.state = NodeState.STARTING
        self.failure = None
        self.restart_on_exit = False
        self.last_busy = now


class NodeRegistry:
    """All nodes of a run, by id."""

    def __init__(self, size: int) -> None:
        self._entries = [NodeEntry(node) for node in range(size)]

    def __getitem__(self, node: NodeId) -> NodeEntry:
        return self._entries[node]

    def __iter__(self) -> Iterator[NodeEntry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: NodeId) -> bool:
        return 0 <= node < len(self._entries)

    def public_keys(self) -> list[bytes]:
        """The public keys of all nodes, by id. Raises `RunError` if the key of a node is not known."""
        if missing := [entry.id for entry in self._entries if not entry.public_key]:
            raise RunError(f"the public keys of nodes {format_node_ids(missing)} are not known: start the run again")
        return [entry.public_key for entry in self._entries if entry.public_key]

    def select(self, condition: Callable[[NodeEntry], bool]) -> set[NodeId]:
        return {entry.id for entry in self._entries if condition(entry)}

    def in_state(self, state: NodeState) -> set[NodeId]:
        return self.select(lambda entry: entry.state is state)

    @property
    def present(self) -> set[NodeId]:
        return self.select(lambda entry: entry.present)

    @property
    def working(self) -> set[NodeId]:
        return self.select(lambda entry: entry.working)

    @property
    def done(self) -> set[NodeId]:
        return self.in_state(NodeState.DONE)
