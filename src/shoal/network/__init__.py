"""What links cost: how long messages take from node to node, which get lost, and when nodes come and go."""

from __future__ import annotations

from shoal.network.wiring import Network, Presence, Route, Wired, Wiring

NETWORKS: dict[str, str] = {
    "ideal": "shoal.network.links:Ideal",
    "uniform": "shoal.network.links:Uniform",
    "matrix": "shoal.network.matrix:Matrix",
    "kollaps": "shoal.network.kollaps:Kollaps",
    "divshare-stragglers": "shoal.network.setups:DivShareStragglers",
    "ten-regions": "shoal.network.setups:TenRegions",
}

__all__ = ["NETWORKS", "Network", "Presence", "Route", "Wired", "Wiring"]
