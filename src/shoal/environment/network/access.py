"""Networks whose only limits are the nodes' own links, up and down: all that a kernel's queues can shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.environment.network.model import AccessLimit, capacities
from shoal.environment.network.network import NetworkTimeline
from shoal.types import NodeId


@dataclass(frozen=True)
class AccessLink:
    """A node's link to the network, in bytes per second each way; infinite where nothing limits it."""

    upload: float = math.inf
    download: float = math.inf


def access_links(timeline: NetworkTimeline, size: int, access_limits: Sequence[AccessLimit]) -> tuple[AccessLink, ...]:
    """The link of each node, what its device makes of it taken into account.

    Raises ValueError where a message crosses any other link that limits it, or where something changes with time.
    """
    if len(timeline.states) > 1 or timeline.availability_changes:
        raise ValueError("it changes with time, and the kernel's queues stay as they are")
    network_state = timeline.initial_state
    carry = capacities(network_state, access_limits).tolist()
    own = [frozenset(network_state.access(node)) for node in range(size)]
    ups: dict[NodeId, frozenset[int]] = {}
    downs: dict[NodeId, frozenset[int]] = {}
    for sender in range(size):
        for receiver in range(size):
            route = network_state.route(sender, receiver)
            if sender == receiver or route is None:
                continue
            limits = frozenset(link for link in route.links if carry[link] < math.inf)
            up, down = limits & own[sender], limits & own[receiver]
            if ups.setdefault(sender, up) != up or downs.setdefault(receiver, down) != down or limits - up - down:
                raise ValueError(
                    f"what node {sender} sends to node {receiver} crosses a limit that is neither of all that the one "
                    "sends nor of all that the other receives, and the kernel's queues have no other"
                )
    for node in range(size):
        if ups.get(node, frozenset()) & downs.get(node, frozenset()):
            raise ValueError(
                f"what node {node} sends and what it receives share a link, and the kernel's queues do not"
            )
    return tuple(
        AccessLink(
            upload=min((carry[link] for link in ups.get(node, ())), default=math.inf),
            download=min((carry[link] for link in downs.get(node, ())), default=math.inf),
        )
        for node in range(size)
    )
