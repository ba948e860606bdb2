"""A sharing: what a node sends of its model, and how it merges what it receives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from shoal import Bounds, NodeId, Params, Payload
from shoal.errors import MessageError


@dataclass
class PluginName:
    """Send every `parts`-th value of the model, other values in each round: all are sent after `parts` rounds."""

    parts: Annotated[int, Bounds(at_least=1)] = 2  # an experiment sets it: sharing = { name = …, parts = 4 }

    def start(self, params: Params) -> None:
        """Called once with the initial model, before the first round. This sharing has no state."""

    def outgoing(self, params: Params, round: int) -> Payload:
        part = round % self.parts
        return Payload({"values": params[part :: self.parts]}, {"part": part})

    def check(self, payload: Payload, params: Params) -> None:  # a rejected payload is dropped and counted
        part, values = payload.fields.get("part"), payload.arrays.get("values")
        expected = params[part :: self.parts] if isinstance(part, int) and 0 <= part < self.parts else None
        if expected is None or values is None or values.dtype != expected.dtype or values.shape != expected.shape:
            raise MessageError(f"part = {part!r}: expected 0 to {self.parts - 1}, with its values in float32")

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        merged = params.copy()  # `params` is read-only
        for peer, payload in received.items():  # a value that a peer did not send counts as equal to the own value
            sent = slice(payload.fields["part"], None, self.parts)
            merged[sent] += np.float32(weights[peer]) * (payload.arrays["values"] - params[sent])
        return merged
