"""Routes of a network, for tests."""

from __future__ import annotations

from shoal.environment.network import NetworkState, Route
from shoal.environment.network.network import MEGABIT


def route(network: NetworkState, sender: int, receiver: int) -> Route:
    found = network.route(sender, receiver)
    assert found is not None
    return found


def bandwidth(network: NetworkState, sender: int, receiver: int) -> float:
    """The bandwidth in Mbit/s of a flow that shares no link."""
    return float(min(network.capacities[list(route(network, sender, receiver).links)])) / MEGABIT
