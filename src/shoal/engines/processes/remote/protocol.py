"""The messages between the coordinator and agents on other machines: MessagePack, validated against these types."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from typing import Any, TypeAlias

import msgspec

from shoal.engines.processes import control
from shoal.engines.processes.remote.link import Beat, Data, Missing
from shoal.message import WIRE_VERSION
from shoal.results.checkpoints import SavedNode
from shoal.types import NodeId

PROTOCOL_VERSION = 3
COMPARED = ("shoal", "torch", "numpy", "pyzmq")
"""Packages that must have the same version on all machines: others may give other models, or other messages."""


def versions() -> dict[str, str]:
    """The versions of what must be equal on all machines of a run."""
    own = {name: importlib.metadata.version(name) for name in COMPARED}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"agent protocol": str(PROTOCOL_VERSION), "wire format": str(WIRE_VERSION), "Python": python, **own}


class AgentInfo(msgspec.Struct, frozen=True):
    """What an agent reports about its machine."""

    name: str
    versions: dict[str, str]
    cores: int
    memory: int
    """Bytes that are available."""
    host: str
    """The address that nodes of this agent listen on."""
    announce: str
    """The address at which other machines reach them."""
    allows_code: bool = False
    """Whether the agent accepts source files of plug-ins."""
    relayed: bool = False
    """Whether other machines reach its nodes only through the coordinator's relay."""
    run: str | None = None
    """The name of the run that the agent has, if it has one."""


# Before and after a session, in place of the header of a link.


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Agent to coordinator, where the agent has dialled out: open a session. Sent again until an answer arrives."""

    info: AgentInfo


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Coordinator to agent: open a session. Sent again until an answer arrives."""

    session: str
    versions: dict[str, str]
    takes_over: list[str] = []
    """Hashes of the sessions that a coordinator that has ended had with the agents of its run: continue the run of one
    of them. An agent that has none of them opens no session."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Agent to coordinator: the session is open."""

    session: str
    info: AgentInfo
    continues: str = ""
    """The earlier session whose run continues in this one; empty if there is none. Only its agent knows it."""


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request to join or to open a session is rejected."""

    reason: str


class Busy(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Agent to coordinator: the agent has another run. The coordinator may ask again."""

    reason: str


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Coordinator to agent: the session has ended. The agent ends its nodes and removes the files of the run."""

    session: str


class NoSession(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Agent to coordinator: the agent does not have this session. It was restarted, or has ended the session."""

    session: str


Header: TypeAlias = Join | Open | Opened | Rejected | Busy | Close | NoSession | Data | Beat | Missing

# In a session, coordinator to agent, beside the requests of `control`.


class SourceFile(msgspec.Struct, frozen=True):
    """A file that the experiment names."""

    name: str
    """Its path below the folder of files."""
    digest: str
    """SHA-256, hexadecimal."""
    content: bytes


class BeginRun(msgspec.Struct, frozen=True, tag=True):
    """Start a zygote for a run."""

    name: str
    run: str
    """The run's secret identifier."""
    nodes: int
    """The number of nodes of the run, on all machines."""
    own_nodes: int
    """The number of nodes that run on the agent's machine, including late nodes."""
    sealed: bool
    with_network: bool
    experiment: dict[str, Any]
    """The resolved experiment; paths of `files` in it are relative."""
    files: list[SourceFile]
    clock_offset: float
    """Seconds to add to the agent's monotonic clock to get the coordinator's."""


class NodeState(msgspec.Struct, frozen=True, tag=True):
    """The state with which a node of a resumed run starts; the content of its file is the next frame."""

    node: NodeId


class OpenTunnel(msgspec.Struct, frozen=True, tag=True):
    """A peer wants to connect to a node that is relayed: connect to the relay, and join both connections."""

    token: str
    node: NodeId
    port: int
    """Of the relay, at the coordinator's address."""


class Follow(msgspec.Struct, frozen=True, tag=True):
    """This coordinator follows the run of an earlier one from now on."""


class Collect(msgspec.Struct, frozen=True, tag=True):
    """All nodes have exited: send what is left of the files of the run."""


Request: TypeAlias = (
    control.StartNodes
    | control.KillNodes
    | control.EvaluateAverage
    | control.RecordEvents
    | control.ToNodes
    | control.ToNetwork
)
"""The requests of `control` that a coordinator may send. The agent itself sends `Prepare`, after its checks."""
ToRemote: TypeAlias = Request | BeginRun | NodeState | OpenTunnel | Follow | Collect

# In a session, agent to coordinator, beside the reports of `control`.


class FromNode(msgspec.Struct, frozen=True, tag=True):
    """A message of a node. The parameters of a model, if there are any, are the next frame."""

    message: control.FromNode


class FileData(msgspec.Struct, frozen=True, tag=True):
    """A chunk of a file of the run; the content is the next frame.

    Files of records and logs grow: their chunks are appended. Other files are replaced when their last chunk arrives.
    """

    path: str
    offset: int
    grows: bool
    last: bool = False


class RejectedConnections(msgspec.Struct, frozen=True, tag=True):
    """How many unauthenticated connections the agent has counted so far."""

    count: int


class AgentFailed(msgspec.Struct, frozen=True, tag=True):
    """The agent cannot run nodes any longer."""

    reason: str


class NodeReport(msgspec.Struct):
    """What the earlier coordinator knew of one node."""

    node: NodeId
    key: bytes | None = None
    endpoint: str = ""
    """Where it listens; empty if it has not reported it."""
    runs: bool = False
    """Whether it has received its `Start`."""
    starts: int = 0
    """How many times it has reported that it listens: more than once if a fault has restarted it."""
    rounds: int = 0
    bytes_sent: int = 0
    done: bool = False
    """Whether its algorithm has ended."""
    failure: str | None = None
    exit_code: int | None = None
    """None while its process exists."""
    saved: list[SavedNode] = []
    """Its latest saved states."""
    has_state: bool = True
    """Whether it takes part in checkpoints."""


class RunReport(msgspec.Struct, frozen=True, tag=True):
    """The first message to a coordinator that continues a run: the state of this agent's share of it."""

    run: str
    """The run's secret identifier."""
    parameters: int
    """Of the model."""
    nodes: list[NodeReport]
    network_endpoint: str | None
    network_key: bytes | None
    last_average: int
    """The latest evaluation for which the earlier coordinator has received models; -1 if there is none."""
    away: float
    """Seconds since the last message of the earlier coordinator."""
    clock_offset: float
    """Seconds to add to the agent's monotonic clock to get the clock of the first coordinator of the run."""


class Collected(msgspec.Struct, frozen=True, tag=True):
    """All files of the run have been sent."""


FromRemote: TypeAlias = (
    control.FromAgent | FromNode | FileData | RejectedConnections | AgentFailed | RunReport | Collected
)

encode = msgspec.msgpack.Encoder().encode
decode_header = msgspec.msgpack.Decoder(Header).decode
decode_to_remote = msgspec.msgpack.Decoder(ToRemote).decode
decode_from_remote = msgspec.msgpack.Decoder(FromRemote).decode


def session_hash(session: str) -> str:
    """What shows an agent that the coordinator means its session, but does not reveal it to other agents."""
    return hashlib.sha256(session.encode()).hexdigest()


def version_differences(own: dict[str, str], other: dict[str, str]) -> list[str]:
    """Describe the versions that differ."""
    return [
        f"{name} {other.get(name, 'missing')} (here {own.get(name, 'missing')})"
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]
