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


class NotStackableError(Exception):
    """Nodes must be computed one by one. The message is the reason."""


def without_draws(compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`, which computes a stack of nodes.

    Raises `NotStackableError` if it drew from a global generator, because nodes that are computed together draw other
    numbers than each node alone, or if it raised an exception, except when memory ran out.
    """
    before = global_states()
    try:
        result = compute()
    except Exception as error:  # a user's code may raise anything; computing each node alone reports the error
        if _is_out_of_memory(error):
            raise
        text = str(error).partition("\n")[0]
        raise NotStackableError(f"computing them together raised {type(error).__name__}: {text}") from error
    if global_states() != before:
        raise NotStackableError("the code of a plug-in drew from a global generator, and each node needs its own draws")
    return result


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    kinds = MemoryError, torch.cuda.OutOfMemoryError
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)  # for a CPU, torch has no class


def global_states() -> object:
    """Return the states of all global generators, to compare them: torch's on the CPU, NumPy's and Python's."""
    import torch

    numpy_state: Any = np.random.get_state(legacy=False)
    inner = numpy_state["state"]
    numpy_values = inner["key"].tobytes(), inner["pos"], numpy_state["has_gauss"], numpy_state["gauss"]
    return torch.default_generator.get_state().numpy().tobytes(), numpy_values, random.getstate()
