"""What the supervisor, the zygote and the nodes say to each other: MessagePack, checked against these types."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from shoal.topologies.graph import NodeId


class _Said(msgspec.Struct, frozen=True, tag=True):
    """Tagged with its class name."""


# Supervisor to zygote.


class Prepare(_Said):
    """Build what all nodes share."""

    experiment: dict[str, Any]
    base: str


class Fork(_Said):
    """Start these nodes."""

    nodes: list[NodeId]
    control: str
    """The supervisor's endpoint."""
    run: str
    folder: str


class Kill(_Said):
    """End these nodes at once."""

    nodes: list[NodeId]


class EvaluateAverage(_Said):
    """Test the average of all models, and append the record to the run's averages."""

    round: int
    time: float
    nodes: int
    consensus_distance: float
    params: bytes
    folder: str


# Zygote to supervisor.


class Ready(_Said):
    parameters: int


class Refused(_Said):
    """The experiment cannot be prepared: an error of Shoal's, by the name of its class, or a traceback."""

    error: str
    text: str
    problems: list[str]


class Exited(_Said):
    """A node's process has ended: with an exit code, or by a signal (then negative)."""

    node: NodeId
    code: int


class AverageDone(_Said):
    round: int
    code: int


# Node to supervisor.


class Hello(_Said):
    node: NodeId
    run: str
    endpoint: str


class Began(_Said):
    """The node starts its first round."""

    node: NodeId


class Report(_Said):
    """Where the node is."""

    node: NodeId
    rounds: int
    bytes_sent: int
    evaluated: int | None = None
    """The round of the latest evaluation, and its accuracy."""
    accuracy: float | None = None


class Model(_Said):
    """The node's model after an evaluated round; the parameters are the next frame."""

    node: NodeId
    round: int
    time: float


class Done(_Said):
    """The node's algorithm has ended."""

    node: NodeId


class Failed(_Said):
    """The node cannot go on."""

    node: NodeId
    text: str


# Supervisor to node.


class Go(_Said):
    """All nodes listen: begin."""

    endpoints: list[str]


class Gone(_Said):
    """This node has died."""

    node: NodeId


class Finish(_Said):
    """All nodes are done, or the run is being stopped: write down the rest and leave."""

    stopped: bool = False


ToZygote: TypeAlias = Prepare | Fork | Kill | EvaluateAverage
FromZygote: TypeAlias = Ready | Refused | Exited | AverageDone
FromNode: TypeAlias = Hello | Began | Report | Model | Done | Failed
ToNode: TypeAlias = Go | Gone | Finish

encode = msgspec.msgpack.Encoder().encode
decode_to_zygote = msgspec.msgpack.Decoder(ToZygote).decode
decode_from_zygote = msgspec.msgpack.Decoder(FromZygote).decode
decode_from_node = msgspec.msgpack.Decoder(FromNode).decode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
