"""Random draws inside a module, such as dropout: repeatable for every node, whichever generator the module uses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.random.mtrand import get_bit_generator, set_bit_generator

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


class ModuleDraws:
    """Seeds the global generators that a module, an augmentation or an optimizer may draw from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy = np.random.MT19937(0)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """The global generators of torch, NumPy and Python with this seed.

        Afterwards, those of NumPy and Python are as before, except that NumPy has forgotten a normal number that it
        drew in advance. NumPy's is replaced meanwhile: to save and restore its state would take 40 times as long.
        """
        import torch

        if self._device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)  # all devices
        kept_numpy, kept_python = get_bit_generator(), random.getstate()
        set_bit_generator(self._numpy)
        try:
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            set_bit_generator(kept_numpy)
            random.setstate(kept_python)


def without_draws(compute: Callable[[], Result]) -> Result | None:
    """Return the result of `compute`; None if it drew from a global generator, or raised an exception.

    Nodes that are computed together would draw other numbers than each node alone.
    """
    before = global_states()
    try:
        result = compute()
    except Exception:  # a user's code may raise anything; computing each node alone reports the error
        return None
    return result if global_states() == before else None


def global_states() -> object:
    """Return the states of all global generators, to compare them: torch's on the CPU, NumPy's and Python's."""
    import torch

    numpy_state: Any = np.random.get_state(legacy=False)
    inner = numpy_state["state"]
    numpy_values = inner["key"].tobytes(), inner["pos"], numpy_state["has_gauss"], numpy_state["gauss"]
    return torch.default_generator.get_state().numpy().tobytes(), numpy_values, random.getstate()
