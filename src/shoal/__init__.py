"""Shoal: decentralized learning. An algorithm is written once and runs in simulation and as real processes.

import shoal

run = shoal.Experiment(nodes=16, topology={"name": "ring"}).run()
print(run.summary["accuracy"])
"""

from __future__ import annotations

from shoal.errors import ShoalError
from shoal.experiment import Experiment
from shoal.experiment.resuming import resume
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.topologies.graph import Peers
from shoal.traits import Traits
from shoal.types import Bounds, NodeId, Params

__all__ = [
    "Bounds",
    "Experiment",
    "Message",
    "Node",
    "NodeId",
    "Params",
    "Payload",
    "Peers",
    "ShoalError",
    "Traits",
    "resume",
]
