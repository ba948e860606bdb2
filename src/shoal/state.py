"""What lives on from round to round, as plain data: what a checkpoint has to keep.

Momentum, accumulated change, the order of the batches, where a generator stands: whoever keeps such things offers
`state()` and `restore()`. An object made anew from the same experiment and restored goes on as the old one would have.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

State: TypeAlias = dict[str, Any]
"""Arrays, numbers, strings, None, and lists and dictionaries (with strings for keys) of these."""


@runtime_checkable
class Stateful(Protocol):
    """Something that keeps more than its parameters."""

    def state(self) -> State:
        """Everything that the next round depends on. Nobody writes into what this returns."""
        ...

    def restore(self, state: State) -> None:
        """Go on from `state`, which an equal object's `state()` gave."""
        ...


def generator_state(rng: np.random.Generator) -> State:
    """Where a generator stands, as plain data; its 128-bit numbers are spelt in hexadecimal."""
    words = rng.bit_generator.state
    return {
        "state": f"{words['state']['state']:x}",
        "inc": f"{words['state']['inc']:x}",
        "has_uint32": int(words["has_uint32"]),
        "uinteger": int(words["uinteger"]),
    }


def restore_generator(rng: np.random.Generator, state: State) -> None:
    """Have `rng`, a PCG64 like all of ours, stand where `generator_state` saw one."""
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(state["state"], 16), "inc": int(state["inc"], 16)},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }
