"""A sharing: what a node says of its model, and how it merges what it hears."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from shoal import Bounds, NodeId, Params, Payload
from shoal.errors import MessageError


@dataclass
class PluginName:
    """Every `parts`-th value of the model, other ones each round: all have been said after `parts` rounds."""

    parts: Annotated[int, Bounds(at_least=1)] = 2  # an experiment sets it: sharing = { name = …, parts = 4 }

    def start(self, params: Params) -> None:
        """Called once with the first model, before any round. This sharing keeps nothing."""

    def outgoing(self, params: Params, round: int) -> Payload:
        part = round % self.parts
        return Payload({"values": params[part :: self.parts]}, {"part": part})

    def check(self, payload: Payload, params: Params) -> None:  # what it refuses is dropped and counted, never merged
        part, values = payload.fields.get("part"), payload.arrays.get("values")
        expected = params[part :: self.parts] if isinstance(part, int) and 0 <= part < self.parts else None
        if expected is None or values is None or values.dtype != expected.dtype or values.shape != expected.shape:
            raise MessageError(f"part = {part!r}: expected 0 to {self.parts - 1}, and its values in float32")

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        merged = params.copy()  # `params` is read-only
        for peer, payload in received.items():  # what a peer did not say counts as equal to the own value
            said = slice(payload.fields["part"], None, self.parts)
            merged[said] += np.float32(weights[peer]) * (payload.arrays["values"] - params[said])
        return merged
