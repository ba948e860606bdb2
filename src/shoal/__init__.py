"""Shoal: decentralized learning. An algorithm is written once and runs in simulation and as real processes.

import shoal

run = shoal.Experiment(nodes=16, topology="ring").run(progress=True)
print(run.summary["accuracy"])
model = run.model("average")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.errors import ShoalError
    from shoal.experiment import Experiment
    from shoal.experiment.resuming import resume
    from shoal.experiment.run_results import Run, open_run, plot
    from shoal.message import Message, Payload
    from shoal.node import Node
    from shoal.results.monitor import EvaluationReport, RoundReport
    from shoal.topologies.graph import Peers
    from shoal.traits import Traits
    from shoal.types import Bounds, NodeId, Params

    __version__: str

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
    "plot",
    "resume",
]

_MODULES = {
    "Bounds": "shoal.types",
    "EvaluationReport": "shoal.results.monitor",
    "Experiment": "shoal.experiment",
    "Message": "shoal.message",
    "Node": "shoal.node",
    "NodeId": "shoal.types",
    "Params": "shoal.types",
    "Payload": "shoal.message",
    "Peers": "shoal.topologies.graph",
    "RoundReport": "shoal.results.monitor",
    "Run": "shoal.experiment.run_results",
    "ShoalError": "shoal.errors",
    "Traits": "shoal.traits",
    "open_run": "shoal.experiment.run_results",
    "plot": "shoal.experiment.run_results",
    "resume": "shoal.experiment.resuming",
}
"""Where the public names are defined. They are imported when they are used, so that `shoal --help` is fast."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("shoal")
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        try:
            value = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
