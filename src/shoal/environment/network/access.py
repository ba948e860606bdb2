"""Networks whose only limits are the upload and download links of nodes: the kernel's queues can shape only these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.environment.network.model import AccessLimit, link_capacities
from shoal.environment.network.network import NetworkTimeline
from shoal.types import NodeId


@dataclass(frozen=True)
class AccessLink:
    """A node's links to the network, in bytes per second; infinite if unlimited."""

    upload: float = math.inf
    download: float = math.inf


def access_links(timeline: NetworkTimeline, size: int, access_limits: Sequence[AccessLimit]) -> tuple[AccessLink, ...]:
    """The access links of each node, within the limits of its device.

    Raises ValueError if any other link limits a message, or if the network changes with time.
    """
    if len(timeline.states) > 1 or timeline.availability_changes:
        raise ValueError("it changes with time, but the kernel's queues are fixed")
    network_state = timeline.initial_state
    limits = link_capacities(network_state, access_limits).tolist()
    own = [frozenset(network_state.access(node)) for node in range(size)]
    ups: dict[NodeId, frozenset[int]] = {}
    downs: dict[NodeId, frozenset[int]] = {}
    for sender in range(size):
        for receiver in range(size):
            route = network_state.route(sender, receiver)
            if sender == receiver or route is None:
                continue
            limiting = frozenset(link for link in route.links if limits[link] < math.inf)
            up, down = limiting & own[sender], limiting & own[receiver]
            if ups.setdefault(sender, up) != up or downs.setdefault(receiver, down) != down or limiting - up - down:
                raise ValueError(
                    f"a link limits messages from node {sender} to node {receiver}, but not all messages that node "
                    f"{sender} sends or node {receiver} receives; the kernel's queues have no such limit"
                )
    for node in range(size):
        if ups.get(node, frozenset()) & downs.get(node, frozenset()):
            raise ValueError(f"messages from and to node {node} share a link; the kernel's queues cannot share one")
    return tuple(
        AccessLink(
            upload=min((limits[link] for link in ups.get(node, ())), default=math.inf),
            download=min((limits[link] for link in downs.get(node, ())), default=math.inf),
        )
        for node in range(size)
    )
