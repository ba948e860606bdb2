"""Shoal: decentralized learning. An algorithm is written once and runs in simulation and as real processes.

import shoal

run = shoal.Experiment(nodes=16, topology={"name": "ring"}).run()
print(run.summary["accuracy"])
"""

from __future__ import annotations

from shoal.errors import ShoalError
from shoal.experiment import Experiment
from shoal.message import Message, Params, Payload
from shoal.node import Node
from shoal.schema import Bounds
from shoal.topologies.graph import NodeId, Peers

__all__ = ["Bounds", "Experiment", "Message", "Node", "NodeId", "Params", "Payload", "Peers", "ShoalError"]
