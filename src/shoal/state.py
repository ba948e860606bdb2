"""State that persists between rounds, as plain data for checkpoints.

Objects that keep momentum, accumulated changes, the order of batches or the position of a generator implement `state()`
and `restore()`. A new object from the same experiment continues after `restore` exactly as the old one would have.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from shoal.randomness import generator
from shoal.types import NodeId

State: TypeAlias = dict[str, Any]
"""Arrays, numbers, strings, None, and lists, tuples and dictionaries of these."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state beyond its parameters."""

    def state(self) -> State:
        """Return all that the next round depends on. Callers must not modify it."""
        ...

    def restore(self, state: State) -> None:
        """Continue from the `state()` of an equal object."""
        ...


def generator_state(rng: np.random.Generator) -> State:
    """Return the state of a generator as plain data; 128-bit numbers are in hexadecimal."""
    internal = rng.bit_generator.state
    return {
        "state": f"{internal['state']['state']:x}",
        "inc": f"{internal['state']['inc']:x}",
        "has_uint32": int(internal["has_uint32"]),
        "uinteger": int(internal["uinteger"]),
    }


def restore_generator(rng: np.random.Generator, state: State) -> None:
    """Set `rng`, a PCG64, to a state from `generator_state`."""
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(state["state"], 16), "inc": int(state["inc"], 16)},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }


class Generators:
    """The generators of one node by purpose, each created when it is first used."""

    def __init__(self, seed: int, node: NodeId) -> None:
        self._seed = seed
        self._node = node
        self._by_purpose: dict[str, np.random.Generator] = {}

    def __getitem__(self, purpose: str) -> np.random.Generator:
        """The generator for `purpose`, the same object every time."""
        if purpose not in self._by_purpose:
            self._by_purpose[purpose] = generator(self._seed, purpose, self._node)
        return self._by_purpose[purpose]

    def state(self) -> State:
        return {purpose: generator_state(rng) for purpose, rng in self._by_purpose.items()}

    def restore(self, state: State) -> None:
        for purpose, kept in state.items():
            restore_generator(self[purpose], kept)
