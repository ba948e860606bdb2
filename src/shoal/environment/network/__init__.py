"""The network model: how long messages take, which messages are lost, and how flows share links.

The package holds the networks that experiments name, and the model that computes deliveries. It may import the
foundations and `environment.faults`.
"""

from __future__ import annotations

from shoal.environment.network.network import AvailabilityChange, Network, NetworkState, NetworkTimeline, Route

NETWORKS: dict[str, str] = {
    "ideal": "shoal.environment.network.links:Ideal",
    "uniform": "shoal.environment.network.links:Uniform",
    "matrix": "shoal.environment.network.matrix:LatencyMatrix",
    "kollaps": "shoal.environment.network.kollaps:Kollaps",
    "divshare-stragglers": "shoal.environment.network.published:DivShareStragglers",
    "ten-regions": "shoal.environment.network.published:TenRegions",
}

__all__ = ["NETWORKS", "AvailabilityChange", "Network", "NetworkState", "NetworkTimeline", "Route"]
