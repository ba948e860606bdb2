"""Shoal: decentralized learning. An algorithm is written once and runs in simulation and as real processes.

import shoal

run = shoal.Experiment(nodes=16, topology="ring").run(progress=True)
print(run.summary["accuracy"])
model = run.model("average")
"""

from __future__ import annotations

import importlib.metadata

from shoal.errors import ShoalError
from shoal.experiment import Experiment
from shoal.experiment.resuming import resume
from shoal.experiment.run_results import Run, open_run
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.results.monitor import EvaluationReport, RoundReport
from shoal.topologies.graph import Peers
from shoal.traits import Traits
from shoal.types import Bounds, NodeId, Params

__all__ = [
    "Bounds",
    "EvaluationReport",
    "Experiment",
    "Message",
    "Node",
    "NodeId",
    "Params",
    "Payload",
    "Peers",
    "RoundReport",
    "Run",
    "ShoalError",
    "Traits",
    "open_run",
    "resume",
]

__version__ = importlib.metadata.version("shoal")
