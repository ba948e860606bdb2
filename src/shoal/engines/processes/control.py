"""What the supervisor, the zygote and the nodes say to each other: MessagePack, checked against these types and
tagged with their names."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from shoal.results.progress import Score
from shoal.types import NodeId

# Supervisor to zygote.


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Build what all nodes share."""

    experiment: dict[str, Any]
    base: str


class StartNodes(msgspec.Struct, frozen=True, tag=True):
    """Start these nodes."""

    nodes: list[NodeId]
    coordinator: str
    """The supervisor's endpoint."""
    run: str
    folder: str
    restarted: bool = False
    """Whether they were alive before, and died."""
    with_network: bool = False
    """Whether the network's own process is started as well, before them."""
    namespaces: list[str] = []
    """Where node i finds the network namespace that it lives in; none where all live in the machine's own."""
    coordinator_key: bytes | None = None
    """The supervisor's public key, where links are sealed."""
    key_folder: str | None = None
    """The folder with the nodes' own keys; where there is none, each gets a new pair when it is started."""
    public_keys: list[bytes] = []
    """The public keys of all nodes, where they are in a folder: no node starts with another, which nobody lets in."""


class KillNodes(msgspec.Struct, frozen=True, tag=True):
    """End these nodes at once."""

    nodes: list[NodeId]


class EvaluateAverage(msgspec.Struct, frozen=True, tag=True):
    """Test the average of all models, and append the record to the run's averages."""

    round: int
    time: float
    nodes: int
    consensus_distance: float
    params: bytes
    folder: str
    tick: int | None = None


# Zygote to supervisor.


class Prepared(msgspec.Struct, frozen=True, tag=True):
    parameters: int
    warnings: list[str]


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The experiment cannot be prepared: an error of Shoal's, by the name of its class, or a traceback."""

    error: str
    text: str
    problems: list[str]


class KeyAnnounced(msgspec.Struct, frozen=True, tag=True):
    """The public key of a node that is about to be started, or of the network's process, which is no node."""

    node: NodeId | None
    key: bytes


class NodeExited(msgspec.Struct, frozen=True, tag=True):
    """A node's process has ended: with an exit code, or by a signal (then negative)."""

    node: NodeId
    code: int


class NetworkExited(msgspec.Struct, frozen=True, tag=True):
    """The network's process has ended."""

    code: int


class AverageEvaluated(msgspec.Struct, frozen=True, tag=True):
    round: int
    code: int


# Node to supervisor.

EXIT_UNUSABLE_KEYS = 3
"""The exit code of a node that has no keys to speak to the supervisor with."""


class NodeListening(msgspec.Struct, frozen=True, tag=True):
    node: NodeId
    run: str
    endpoint: str


class NetworkListening(msgspec.Struct, frozen=True, tag=True):
    """The network's process listens."""

    run: str
    endpoint: str


class UnauthenticatedConnections(msgspec.Struct, frozen=True, tag=True):
    """How many the network's process has turned away by now, and the last of them."""

    run: str
    count: int
    last: str
    final: bool = False
    """Whether this is the last word of it."""


class FirstRoundStarted(msgspec.Struct, frozen=True, tag=True):
    """The node starts its first round."""

    node: NodeId


class ProgressReport(msgspec.Struct, frozen=True, tag=True):
    """Where the node is."""

    node: NodeId
    rounds: int
    bytes_sent: int
    evaluated: int | None = None
    """The round of the latest evaluation, and what is shown of it."""
    score: Score | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Said every few seconds. Busy: the node computes, or waits for something that will end by itself."""

    node: NodeId
    busy: bool


class ModelSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The node's model after an evaluated round; the parameters are the next frame."""

    node: NodeId
    round: int
    time: float
    tick: int | None = None


class NodeDone(msgspec.Struct, frozen=True, tag=True):
    """The node's algorithm has ended."""

    node: NodeId


class NodeFailed(msgspec.Struct, frozen=True, tag=True):
    """The node cannot go on."""

    node: NodeId
    run: str
    text: str


# Supervisor to node.


class Start(msgspec.Struct, frozen=True, tag=True):
    """All nodes listen: begin."""

    endpoints: list[str]
    epoch: float = 0.0
    """When the run began, on the machine's monotonic clock."""
    network_endpoint: str | None = None
    """Where the network's process listens, if messages are shaped."""
    failed_nodes: list[NodeId] = []
    """The nodes that are dead."""
    offline: bool = False
    """Whether the node is offline at first."""
    public_keys: list[bytes] = []
    """The nodes' public keys, where links are sealed."""
    network_key: bytes | None = None
    """That of the network's process."""


class PeerFailed(msgspec.Struct, frozen=True, tag=True):
    """This node has died."""

    node: NodeId
    time: float
    """When that was known, on the machine's monotonic clock: before it could be started again."""


class PeerRestarted(msgspec.Struct, frozen=True, tag=True):
    """This node, which had died, was started again, and listens there."""

    node: NodeId
    endpoint: str
    key: bytes | None = None
    """Its public key, where links are sealed."""


class SetOnline(msgspec.Struct, frozen=True, tag=True):
    """To one node: go offline, or come online again."""

    online: bool


class InjectFault(msgspec.Struct, frozen=True, tag=True):
    """To one node: a fault on schedule that is not a crash."""

    kind: Literal["hang", "raise", "slow"]
    detail: str
    factor: float | None = None
    """How slow it is to compute; None: as before."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """All nodes are done, or the run is being stopped: write down the rest and leave."""

    stopped: bool = False
    tick: int | None = None
    """The number of the last moment at which all models are looked at, where that is done by the clock."""
    time: float = 0.0
    """When the run ended."""


ToZygote: TypeAlias = Prepare | StartNodes | KillNodes | EvaluateAverage
FromZygote: TypeAlias = Prepared | StartFailed | KeyAnnounced | NodeExited | NetworkExited | AverageEvaluated
FromOneNode: TypeAlias = FirstRoundStarted | ProgressReport | Heartbeat | ModelSnapshot | NodeDone | NodeFailed
FromNode: TypeAlias = NodeListening | NetworkListening | UnauthenticatedConnections | FromOneNode
ToNode: TypeAlias = Start | PeerFailed | PeerRestarted | SetOnline | InjectFault | Finish

encode = msgspec.msgpack.Encoder().encode
decode_to_zygote = msgspec.msgpack.Decoder(ToZygote).decode
decode_from_zygote = msgspec.msgpack.Decoder(FromZygote).decode
decode_from_node = msgspec.msgpack.Decoder(FromNode).decode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
DECODE_ERRORS = (ValueError, msgspec.DecodeError, RecursionError)
"""What these raise for anything else: text that is not UTF-8, other data, and data nested too deep to be looked at."""
