"""The control messages between coordinator, agents and nodes: MessagePack, validated against these types, tagged with
their names."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from shoal.results.checkpoints import SavedNode
from shoal.results.progress import Score
from shoal.results.records import Event
from shoal.types import NodeId, Params

# Coordinator to agent.


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Build what all nodes share."""

    experiment: dict[str, Any]
    base: str
    """The folder that relative paths in the experiment refer to."""
    nodes: int
    """The number of nodes that run on this machine, including late nodes."""
    compares: bool = False
    """Whether to report a hash of the data and of the initial model, which must be equal on all machines."""
    cores: int | None = None
    """The cores that nodes may use, unless the experiment sets `training_slots`; None: all of the machine."""


class StartNodes(msgspec.Struct, frozen=True, tag=True):
    """Start the processes of these nodes."""

    nodes: list[NodeId]
    run: str
    folder: str = ""
    """The folder of the run on the agent's machine; the agent sets it."""
    control_endpoint: str = ""
    """Where the nodes connect to the agent; the agent sets it."""
    control_key: bytes | None = None
    """The public key of that endpoint, where links are sealed; the agent sets it."""
    clock_offset: float = 0.0
    """Seconds to add to the machine's monotonic clock to get the coordinator's; the agent sets it."""
    clock_error: float = 0.0
    """How many seconds the clocks of two machines may differ after that."""
    host: str | None = None
    """The address that nodes listen on; None: the one that the experiment sets."""
    announce: str | None = None
    """The address at which other nodes reach these nodes; None: the one that the experiment sets."""
    training_nodes: int = 0
    """Nodes with ids from this number on serve the others instead of training."""
    late_nodes: list[NodeId] = []
    """Nodes that are not started now and join later. The agent checks that they will fit on its machine."""
    restarted: bool = False
    """Whether these nodes start in a run in progress: they ran before and failed, or join late."""
    incarnations: dict[NodeId, int] = {}
    """How often nodes were restarted, if they were."""
    with_network: bool = False
    """Whether to start the network process too, before the nodes."""
    namespaces: list[str] = []
    """Item i is the path of the network namespace of node i; empty where all nodes share the machine's namespace."""
    key_folder: str | None = None
    """The folder with the nodes' key pairs; None: every node gets a new pair when it starts."""
    public_keys: list[bytes] = []
    """The public keys of all nodes, where a folder holds the key pairs. A node does not start with any other key,
    because its peers would reject it."""
    states: dict[NodeId, str] = {}
    """In a resumed run: the file with the state of each node that continues from a checkpoint."""
    resumed_tick: int = 0
    """In a resumed run: the last evaluation by the clock that all nodes have taken."""


class KillNodes(msgspec.Struct, frozen=True, tag=True):
    """Kill the processes of these nodes at once."""

    nodes: list[NodeId]


class EvaluateAverage(msgspec.Struct, frozen=True, tag=True):
    """Evaluate the average of all models, and append the record to the run's averages."""

    round: int
    time: float
    nodes: int
    consensus_distance: float
    params: bytes
    tick: int | None = None

    @property
    def array(self) -> Params:
        return np.frombuffer(self.params, np.float32)


class RecordEvents(msgspec.Struct, frozen=True, tag=True):
    """Append events to the records of nodes that cannot write them, because they crash or have crashed.

    One request has the events of all nodes of a fault. With one request per node, the agent and the coordinator could
    fill the pipe in both directions and wait for each other.
    """

    events: list[tuple[NodeId, Event]]


class ToNodes(msgspec.Struct, frozen=True, tag=True):
    """Pass a message on to these nodes, as far as they are connected."""

    nodes: list[NodeId]
    message: ToNode


class ToNetwork(msgspec.Struct, frozen=True, tag=True):
    """Pass a message on to the network process, if it is connected."""

    message: ToNode


# Agent to coordinator.


class Notice(msgspec.Struct, frozen=True, tag=True):
    """Show this text to the user."""

    text: str


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """What all nodes share is built."""

    parameters: int
    """Of the model."""
    warnings: list[str]
    data_digest: str = ""
    """A hash of the data set, where machines are compared."""
    model_digest: str = ""
    """A hash of the initial model, where machines are compared."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The experiment cannot be prepared, or nodes cannot be forked."""

    error: str
    """The name of a class in `shoal.errors`."""
    text: str
    """The error's message, or a traceback."""
    problems: list[str]


class KeyAnnounced(msgspec.Struct, frozen=True, tag=True):
    """The public key of a node that is about to start; `node` is None for the network process."""

    node: NodeId | None
    key: bytes


class NodeExited(msgspec.Struct, frozen=True, tag=True):
    """A node's process exited. The code is the exit code, or the negative number of a signal."""

    node: NodeId
    code: int


class NetworkExited(msgspec.Struct, frozen=True, tag=True):
    """The network process exited."""

    code: int


class AgentDiskReport(msgspec.Struct, frozen=True, tag=True):
    """The disk is full, or has space again: the agent pauses the records that it writes, or goes on to write them."""

    paused: bool
    text: str


class AverageEvaluated(msgspec.Struct, frozen=True, tag=True):
    """The process that evaluates an average exited."""

    round: int
    code: int


# Node to coordinator.

EXIT_ERROR = 1
"""The exit code of a node that failed. It has sent the reason to the coordinator if it could."""
EXIT_NO_FREE_PORT = 4
"""The exit code of a node that found no free port, and so cannot report to the coordinator."""
EXIT_UNUSABLE_KEYS = 3
"""The exit code of a node that has no usable key pair, and so cannot report to the coordinator."""


class NodeListening(msgspec.Struct, frozen=True, tag=True):
    """The node accepts connections at `endpoint`."""

    node: NodeId
    run: str
    endpoint: str


class NetworkListening(msgspec.Struct, frozen=True, tag=True):
    """The network process accepts connections at `endpoint`."""

    run: str
    endpoint: str


class NetworkHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent by the network process every few seconds."""


class UnauthenticatedConnections(msgspec.Struct, frozen=True, tag=True):
    """How many unauthenticated connections the network process rejected so far, and details of the last one."""

    run: str
    count: int
    last: str
    final: bool = False
    """Whether this is the last report."""


class FirstRoundStarted(msgspec.Struct, frozen=True, tag=True):
    """The node starts its first round."""

    node: NodeId


class ProgressReport(msgspec.Struct, frozen=True, tag=True):
    """The node's progress."""

    node: NodeId
    rounds: int
    bytes_sent: int
    evaluated: int | None = None
    """The round of the latest evaluation."""
    score: Score | None = None
    """The main score of that evaluation."""
    diverged: str | None = None
    """When the node's training diverged, and its loss; None if it did not."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every few seconds. Busy: the node computes, or waits for something that ends by itself."""

    node: NodeId
    busy: bool


class ModelSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The node's model after an evaluated round; the parameters are the next frame."""

    node: NodeId
    round: int
    time: float
    tick: int | None = None


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """The node has saved its state for a checkpoint; None: it has no state, and takes no part in checkpoints."""

    node: NodeId
    saved: SavedNode | None


class CheckpointFailed(msgspec.Struct, frozen=True, tag=True):
    """The node could not save its state, and goes on."""

    node: NodeId
    round: int
    text: str


class DiskReport(msgspec.Struct, frozen=True, tag=True):
    """The disk is full, or has space again: the node pauses its records, or goes on to write them."""

    node: NodeId
    paused: bool
    text: str
    dropped: int = 0
    """Records of rounds that were dropped."""
    final: bool = False
    """Whether the node ends, and waits for space."""


class NodeDone(msgspec.Struct, frozen=True, tag=True):
    """The node's algorithm has ended."""

    node: NodeId


class NodeFailed(msgspec.Struct, frozen=True, tag=True):
    """The node cannot continue. It is the node's last message."""

    node: NodeId
    run: str
    text: str


class NodeExiting(msgspec.Struct, frozen=True, tag=True):
    """The node has ended well. It is the node's last message."""

    node: NodeId


# Agent to node.


class LastMessageRead(msgspec.Struct, frozen=True, tag=True):
    """The agent has read the node's last message, and so all messages before it: the node may exit."""


# Coordinator to node.


class Start(msgspec.Struct, frozen=True, tag=True):
    """All nodes listen: start the algorithm."""

    endpoints: list[str]
    epoch: float = 0.0
    """When the run began, on the coordinator's monotonic clock."""
    network_endpoint: str | None = None
    """Where the network process listens, if messages are shaped."""
    failed_nodes: list[NodeId] = []
    offline: bool = False
    """Whether the node is offline at first."""
    public_keys: list[bytes] = []
    """The nodes' public keys, where links are sealed."""
    network_key: bytes | None = None
    """The public key of the network process."""
    incarnations: dict[NodeId, int] = {}
    """How often nodes have been restarted, if they have."""


class PeerFailed(msgspec.Struct, frozen=True, tag=True):
    """This node failed."""

    node: NodeId
    time: float
    """When the coordinator learned of it, on its monotonic clock: before the node could restart."""


class PeerRestarted(msgspec.Struct, frozen=True, tag=True):
    """This node, which had failed, was started again and listens at `endpoint`."""

    node: NodeId
    endpoint: str
    key: bytes | None = None
    """Its public key, where links are sealed."""
    incarnation: int = 0
    """How often it has been restarted. A new coordinator may send the message again."""


class SetOnline(msgspec.Struct, frozen=True, tag=True):
    """To one node: go online, or offline."""

    online: bool


class InjectFault(msgspec.Struct, frozen=True, tag=True):
    """To one node: a scheduled fault other than a crash."""

    kind: Literal["hang", "raise", "slow"]
    detail: str
    factor: float | None = None
    """How many times longer the node computes; None: no change."""
    recorded: bool = False
    """Whether the node's records have the fault already."""


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """To the clients of a server that has finished `round`: save your state, if you have not done so."""

    round: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """All nodes are done, or the run is being stopped: write the remaining records and exit."""

    stopped: bool = False
    tick: int | None = None
    """The number of the last evaluation tick, where models are evaluated by the clock."""
    time: float = 0.0
    """When the run ended."""


ToZygote: TypeAlias = Prepare | StartNodes | KillNodes | EvaluateAverage | RecordEvents
FromZygote: TypeAlias = (
    Prepared | StartFailed | KeyAnnounced | NodeExited | NetworkExited | AgentDiskReport | AverageEvaluated
)
ToAgent: TypeAlias = ToZygote | ToNodes | ToNetwork
FromAgent: TypeAlias = FromZygote | Notice
FromOneNode: TypeAlias = (
    FirstRoundStarted
    | ProgressReport
    | Heartbeat
    | ModelSnapshot
    | CheckpointSaved
    | CheckpointFailed
    | DiskReport
    | NodeDone
    | NodeFailed
    | NodeExiting
)
FromNetwork: TypeAlias = NetworkListening | NetworkHeartbeat | UnauthenticatedConnections
FromNode: TypeAlias = NodeListening | FromNetwork | FromOneNode
ToNode: TypeAlias = (
    Start | PeerFailed | PeerRestarted | SetOnline | InjectFault | SaveCheckpoint | Finish | LastMessageRead
)

encode = msgspec.msgpack.Encoder().encode
decode_to_zygote = msgspec.msgpack.Decoder(ToZygote).decode
decode_from_zygote = msgspec.msgpack.Decoder(FromZygote).decode
decode_from_node = msgspec.msgpack.Decoder(FromNode).decode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
DECODE_ERRORS = (ValueError, msgspec.DecodeError, RecursionError)
"""What the decoders raise: text that is not UTF-8, data of other types, and data that is nested too deeply."""
