"""Between the backward pass and the optimizer: number formats, loss scaling and clipping."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from shoal.errors import ExperimentError
from shoal.training.optimizers import OptimizerState
from shoal.training.settings import Training

if TYPE_CHECKING:
    import torch

LOSS_SCALE = "loss_scale"
"""The entry of an optimizer's state with the scale of the loss, and the number of steps since it last changed."""
INITIAL_SCALE = 2.0**16
STEPS_BEFORE_GROWTH = 2000
"""Steps without an overflow before the scale is doubled. An overflow halves it. These are the values of torch."""


class Precision:
    """The number format in which a module is computed in training. Parameters and gradients stay float32."""

    def __init__(self, training: Training, device: torch.device) -> None:
        self._name = training.precision or "float32"
        self._device = device

    @property
    def reduced(self) -> bool:
        return self._name != "float32"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Compute the forward pass inside this context."""
        import torch

        if not self.reduced:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, getattr(torch, self._name))

    def scaling(self, state: OptimizerState) -> LossScaling:
        """Return the loss scaling of a node whose optimizer has this state."""
        return LossScaling(self._name == "float16", state)

    def check(self, loss: Any) -> None:
        """Raise ExperimentError unless the device computes `loss` and its gradient in this format."""
        import torch

        try:
            with self.autocast():
                supported = torch.is_autocast_enabled(self._device.type)
                if supported:
                    loss().backward()
        except Exception as error:  # a user's module may raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
        else:
            if supported:
                return
            reason = "torch has no such format there"
        raise ExperimentError(
            [
                f"training.precision = {self._name!r}: the model cannot be trained in it on device "
                f"{str(self._device)!r} ({reason}); use 'float32', or another device"
            ]
        )


class LossScaling:
    """Scales the loss of one node, so that small gradients do not become 0 in float16; without `enabled` it does not.

    A step whose gradient overflows is left out, and the scale is halved.
    """

    def __init__(self, enabled: bool, state: OptimizerState) -> None:
        self._enabled = enabled
        self.left_out = 0
        """Steps whose gradients overflowed."""
        kept = state.get(LOSS_SCALE) if enabled else None
        self._scale: float = INITIAL_SCALE if kept is None else float(kept[0])
        self._steps: float = 0.0 if kept is None else float(kept[1])

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Compute the gradient of `loss` into `gradient`. Returns False if it overflowed."""
        if not self._enabled:
            loss.backward()  # type: ignore[no-untyped-call]
            return True
        (loss * self._scale).backward()  # type: ignore[no-untyped-call]
        gradient.div_(self._scale)
        if not gradient.isfinite().all():
            self._scale, self._steps = self._scale / 2, 0.0
            self.left_out += 1
            return False
        self._steps += 1
        if self._steps == STEPS_BEFORE_GROWTH:
            self._scale, self._steps = self._scale * 2, 0.0
        return True

    def add_to(self, state: OptimizerState) -> OptimizerState:
        """Return the state of the optimizer with that of the scaling."""
        import torch

        if not self._enabled:
            return state
        return {**state, LOSS_SCALE: torch.tensor([self._scale, self._steps], dtype=torch.float64)}

    def remove_from(self, state: OptimizerState) -> OptimizerState:
        """Return the state of the optimizer alone."""
        return {key: value for key, value in state.items() if key != LOSS_SCALE} if self._enabled else state


def clip(gradient: torch.Tensor, training: Training) -> None:
    """Clip a gradient, or each row of a matrix of gradients, in place: each value first, then the norm."""
    import torch

    if training.clip_value is not None:
        gradient.clamp_(-training.clip_value, training.clip_value)
    if training.clip_norm is not None:
        norms = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        gradient.mul_((training.clip_norm / (norms + 1e-6)).clamp(max=1.0))
