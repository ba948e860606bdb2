"""The typed experiment: its tables, their validation, the component registry, `Setup` and `run`.

The package may import every package with components, `runtime`, `node`, `environment` and `results`. Only
`running.py` imports engines.
"""

from __future__ import annotations

from shoal.environment.faults import Fault
from shoal.experiment.experiment import Experiment
from shoal.experiment.overrides import parse_override, parse_overrides
from shoal.experiment.tables import (
    Batching,
    CheckpointPlan,
    EvaluationPlan,
    Group,
    NodeSettings,
    ProcessesPlan,
    SimulationPlan,
)

__all__ = [
    "Batching",
    "CheckpointPlan",
    "EvaluationPlan",
    "Experiment",
    "Fault",
    "Group",
    "NodeSettings",
    "ProcessesPlan",
    "SimulationPlan",
    "parse_override",
    "parse_overrides",
]
