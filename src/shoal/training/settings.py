"""The `training` table of an experiment."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from shoal.types import Bounds, Nested

OPTIONAL_SETTINGS = ("schedule", "clip_norm", "clip_value", "label_smoothing", "precision")
"""Settings that a trainer follows only if its backend declares it (`Traits.training_options`)."""


@dataclass(frozen=True)
class Training:
    """The `training` table of an experiment."""

    optimizer: str = "sgd"
    """An optimizer of torch.optim, or a plug-in, "file.py:Class"."""
    lr: Annotated[float, Bounds(above=0)] = 0.1
    momentum: Annotated[float, Bounds(at_least=0, below=1)] = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, Bounds(at_least=0)] | None = None
    """None keeps the optimizer's default: 0.01 for AdamW, 0 for most."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, with torch's names."""
    keep_state: bool | None = None
    """Whether the optimizer's state (momentum, moments) is kept from round to round. None: it is kept, except by
    algorithms whose nodes are stateless by convention, such as the clients of FedAvg (`Traits.stateless_nodes`)."""
    loss: str = "auto"
    """A loss of torch.nn, "rmse", or a plug-in, "file.py:Class". "auto" is cross-entropy for classes and tokens, and
    MSE for numbers."""
    batch_size: Annotated[int, Bounds(at_least=1)] = 16
    local_steps: Annotated[int, Bounds(at_least=1)] = 1
    """Batches that a node trains on in a round."""
    local_epochs: Annotated[int, Bounds(at_least=1)] | None = None
    """Passes over the node's data in a round, in place of `local_steps`. Nodes with more data train longer."""
    proximal: Annotated[float, Bounds(at_least=0)] = 0.0
    """FedProx (Li et al. 2020): the factor μ of the term μ/2·‖x − x₀‖². x₀ are the parameters before training."""
    buffers: Literal["shared", "local"] = "shared"
    """Where the statistics live that a model updates in training (batch normalisation). "shared": nodes send and
    average them like parameters. "local": every node keeps its own. Integer counters are always local."""
    device: str = "cpu"
    schedule: Annotated[Any, Nested("schedule")] = None
    """How the learning rate changes (see `shoal.training.schedules`): a component of an experiment, or an instance.
    None keeps it constant."""
    clip_norm: Annotated[float, Bounds(above=0)] | None = None
    """The largest Euclidean norm of a gradient. A larger gradient is scaled to this norm before the optimizer step."""
    clip_value: Annotated[float, Bounds(above=0)] | None = None
    """The largest magnitude of each value of a gradient. Values are clipped before the norm."""
    label_smoothing: Annotated[float, Bounds(at_least=0, at_most=1)] | None = None
    """The share of the target that cross-entropy distributes over all classes. Evaluations do not use it."""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """The number format of training steps: torch's autocast, with loss scaling for float16. None is float32.
    Evaluations are always in float32."""

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov = true needs a momentum above 0")
        if self.local_epochs is not None and self.local_steps != 1:
            raise ValueError("local_steps and local_epochs exclude each other: give only one of them")

    @property
    def step_size(self) -> float:
        """The learning rate that the optimizer uses."""
        return float(self.options.get("lr", self.lr))

    def steps(self, samples: Sized) -> int:
        """Return the number of batches in a round of a node that holds `samples`."""
        if self.local_epochs is None:
            return self.local_steps
        return math.ceil(self.local_epochs * len(samples) / self.batch_size)
