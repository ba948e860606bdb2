"""What links cost: how long a message takes from node to node in the simulation."""

from __future__ import annotations

from shoal.network.links import Delays, Network

NETWORKS: dict[str, str] = {
    "ideal": "shoal.network.links:Ideal",
    "uniform": "shoal.network.links:Uniform",
}

__all__ = ["NETWORKS", "Delays", "Network"]
