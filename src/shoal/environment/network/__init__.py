"""Networks: how long messages take, which messages are lost, and how messages share links.

Two groups of modules:

- The networks that experiments name (`network = { name = … }`): `links`, `matrix`, `kollaps` with its reader
  `kollaps_file`, and `published`. `NETWORKS` lists them.
- The code that all these networks use: `network` (the description of links and routes), `model` (computes when messages
  are sent, delivered or lost), `flows` and `max_min` (share bandwidth between messages), and `access` (finds the upload
  and download links of nodes, which kernel shaping needs).

The package may import the foundations and `environment.faults`.
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
