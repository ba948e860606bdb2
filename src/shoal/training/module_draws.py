"""Random draws inside a module, such as dropout: repeatable for every node, whichever generator the module uses."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


class ModuleDraws:
    """Seeds the global generators that a module draws from in training.

    torch's are seeded in every training. NumPy's and Python's are seeded in the first training, and in the others only
    if the module has drawn from them by then. They have their former states again after the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uses_others: bool | None = None
        """Whether the module draws from the generators of NumPy or Python; None before the first training."""
        self._kept: tuple[Any, Any] | None = None
        self._seeded: object = None

    def seed(self, seed: int) -> None:
        import torch

        if self._device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)  # all devices
        if self._uses_others is not False:
            self._kept = np.random.get_state(), random.getstate()
            np.random.seed(seed % 2**32)
            random.seed(seed)
            self._seeded = _other_states()

    def restore(self) -> None:
        """Restore the generators of NumPy and Python; call it after each training."""
        if self._kept is None:
            return
        self._uses_others = self._uses_others or _other_states() != self._seeded
        numpy_state, python_state = self._kept
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        self._kept = None


def global_states() -> object:
    """Return the states of all global generators, to compare them: torch's on the CPU, NumPy's and Python's."""
    import torch

    return torch.default_generator.get_state().numpy().tobytes(), _other_states()


def _other_states() -> object:
    numpy_state: Any = np.random.get_state(legacy=False)
    inner = numpy_state["state"]
    return inner["key"].tobytes(), inner["pos"], numpy_state["has_gauss"], numpy_state["gauss"], random.getstate()
