"""The typed experiment: its tables, their validation, the component registry, and everything built from it.

The package may import every package that has components, and `results`. Only `running.py` imports engines.
"""

from __future__ import annotations

from shoal.experiment.experiment import (
    Batching,
    CheckpointPlan,
    EvaluationPlan,
    Experiment,
    Fault,
    Group,
    NodeSettings,
    ProcessesPlan,
    SimulationPlan,
    parse_override,
    parse_overrides,
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
