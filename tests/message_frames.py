"""Messages and their frames: random ones, and ones with a changed header."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.message import (
    DTYPES,
    RUN_LENGTH,
    WIRE_VERSION,
    Message,
    Payload,
)

RUN = "r" * RUN_LENGTH
names = st.text(max_size=64)
naturals = st.integers(0, 2**48 - 1)
scalars = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40)
arrays = hnp.arrays(
    dtype=st.sampled_from(DTYPES).map(np.dtype), shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
)
payloads = st.builds(Payload, st.dictionaries(names, arrays, max_size=5), st.dictionaries(names, scalars, max_size=5))
messages = st.builds(Message, naturals, names, naturals, payloads, st.text(max_size=RUN_LENGTH))


def frames_of(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in message.frames()]


def model(values: int = 5, run: str = RUN) -> Message:
    return Message(3, "model", 7, Payload({"params": np.arange(values, dtype=np.float32)}, {"age": 2}), run)


def header(**changed: Any) -> list[Any]:
    """The header of `model()` as plain data, with some of it changed."""
    plain = {
        "version": WIRE_VERSION,
        "run": RUN,
        "sender": 3,
        "kind": "model",
        "round": 7,
        "fields": {"age": 2},
        "arrays": [["params", "<f4", [5]]],
    }
    return list({**plain, **changed}.values())


def with_header(changed: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(changed), *frames_of(model())[1:]]
