"""The `[[fault]]` table of an experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from shoal.types import Bounds, NodeId, NodeIds, parse_node_ids

Kind: TypeAlias = Literal[
    "crash", "raise", "hang", "restart", "join", "partition", "repair", "hold", "release", "slow", "drop"
]  # fmt: skip
SlowTarget: TypeAlias = Literal["compute", "network", "both"]

COMMON_KEYS = frozenset({"kind", "node", "nodes", "time", "every", "after", "before", "count"})
PAIR_KEYS = frozenset({"others", "oneway"})
END_KEYS = frozenset({"until", "lasting"})
KEYS: dict[Kind, frozenset[str]] = {
    "crash": END_KEYS | {"round"},
    "raise": frozenset({"round"}),
    "hang": frozenset({"round"}),
    "restart": frozenset(),
    "join": frozenset({"round"}),
    "partition": PAIR_KEYS | END_KEYS,
    "repair": PAIR_KEYS,
    "hold": PAIR_KEYS | END_KEYS,
    "release": PAIR_KEYS,
    "slow": END_KEYS | {"factor", "what"},
    "drop": PAIR_KEYS | END_KEYS | {"probability"},
}
"""The keys of each kind, in addition to the common ones."""
OPPOSITES: dict[Kind, tuple[Kind, float]] = {
    "crash": ("restart", 0.0),
    "partition": ("repair", 0.0),
    "hold": ("release", 0.0),
    "slow": ("slow", 1.0),
    "drop": ("drop", 0.0),
}
"""The event that ends a fault of each kind that can end: its kind and its value."""
UNDONE: dict[Kind, Kind] = {"restart": "crash", "repair": "partition", "release": "hold"}
"""The kind of fault that each of these kinds ends."""


@dataclass(frozen=True)
class Fault:
    """A `fault` table. Times are seconds since the start of the run. A key that is not given is None.

    A fault happens once, at the start of a `round` or at a `time`, or repeatedly at random times; `every` is the mean
    interval in seconds. A crash, an error or a hang without any of these keys happens at round 0.
    """

    kind: Kind
    """What happens:

    - "crash" ends nodes at once, as SIGKILL does; "restart" starts them again.
    - "join" starts nodes that are not there before.
    - "raise" makes their code fail.
    - "hang" stops them without an error: the process stays, but sends and computes nothing.
    - "partition" cuts nodes off from others; "repair" ends this.
    - "hold" delays the messages between nodes; "release" delivers them.
    - "slow" makes nodes take longer.
    - "drop" loses messages.
    """
    node: Annotated[int, Bounds(at_least=0)] | None = None
    round: Annotated[int, Bounds(at_least=0)] | None = None
    """Happens when a node starts this round or, if it does not take part in it, its next round. A join happens when the
    first node that is there starts this round."""
    nodes: NodeIds | None = None
    """Several nodes, as in "0-3, 8". Without nodes, a random fault picks any training node, and a fault between nodes
    applies to all nodes."""
    others: NodeIds | None = None
    """The nodes on the other side of a fault between nodes. Default: all other nodes, including servers."""
    oneway: bool | None = None
    """Whether the fault affects only messages from `nodes` to `others`. Default: both directions."""
    time: Annotated[float, Bounds(at_least=0)] | None = None
    every: Annotated[float, Bounds(above=0)] | None = None
    """The mean seconds between random faults. The times are exponential. Each fault picks one node, uniformly."""
    after: Annotated[float, Bounds(at_least=0)] | None = None
    """Random faults start after this time. Default: 0."""
    before: Annotated[float, Bounds(above=0)] | None = None
    """Random faults stop before this time."""
    count: Annotated[int, Bounds(at_least=1)] | None = None
    """The maximum number of random faults."""
    until: Annotated[float, Bounds(above=0)] | None = None
    """The time at which the fault ends. It never ends if neither this nor `lasting` is given."""
    lasting: Annotated[float, Bounds(above=0)] | None = None
    """The duration of the fault in seconds; for random faults, the mean of an exponential distribution."""
    factor: Annotated[float, Bounds(above=0)] | None = None
    """How many times as long a slow node takes. The factors of faults that overlap multiply; of faults without an end,
    only the latest counts."""
    what: SlowTarget | None = None
    """What is slow: computation, messages, or both (the default)."""
    probability: Annotated[float, Bounds(above=0, at_most=1)] | None = None
    """The probability that a message is dropped. Faults that overlap drop messages independently of each other; of
    faults without an end, only the latest counts."""

    def __post_init__(self) -> None:
        defaults = self.kind != "join" and "round" in KEYS.get(self.kind, ())
        if defaults and self.round is self.time is self.every is None:
            object.__setattr__(self, "round", 0)

    def ids(self, size: int) -> tuple[NodeId, ...]:
        """The ids in `node` or `nodes`, of `size` nodes, in ascending order. Raises ValueError."""
        if self.node is not None:
            return (self.node,)
        return () if self.nodes is None else sorted_ids(self.nodes, size)

    @property
    def ends(self) -> bool:
        """Whether the fault ends without another fault."""
        return self.until is not None or self.lasting is not None

    @property
    def restarts_nodes(self) -> bool:
        """Whether nodes start during the run because of it."""
        return self.kind in ("restart", "join") or (self.kind == "crash" and self.ends)

    def happens_at(self, round: int) -> bool:
        """Whether it happens to a node that starts `round`, if it has not happened yet."""
        return self.round is not None and self.round <= round

    def to_table(self) -> dict[str, Any]:
        """The keys that are given."""
        return {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}


def candidates(fault: Fault, nodes: int, size: int) -> tuple[NodeId, ...]:
    """The nodes that a random fault may pick; none for a random repair or release without nodes: it ends all faults."""
    if named := fault.ids(size):
        return named
    if fault.kind in ("repair", "release"):
        return ()
    excluded = frozenset(() if fault.others is None else sorted_ids(fault.others, size))
    return tuple(node for node in range(nodes) if node not in excluded)


def affects_pairs(fault: Fault) -> bool:
    """Whether the fault is between nodes."""
    return KEYS[fault.kind] >= PAIR_KEYS


def other_side(fault: Fault, nodes: Collection[NodeId], size: int) -> tuple[NodeId, ...]:
    """The nodes on the other side of a fault between nodes; all nodes if `nodes` is empty."""
    if fault.others is not None:
        return sorted_ids(fault.others, size)
    excluded = frozenset(nodes)
    return tuple(node for node in range(size) if node not in excluded)


def sorted_ids(text: str, size: int) -> tuple[NodeId, ...]:
    return tuple(sorted(set(parse_node_ids(text, size))))
