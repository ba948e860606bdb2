"""The average of models of which a node has received some coordinates."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.compression.compressors import Part
from shoal.types import NodeId, Params


def merge_sparse(params: Params, parts: Mapping[NodeId, Part], weights: Mapping[NodeId, float]) -> Params:
    """Return the weighted average in which a coordinate that a peer did not send counts as the node's own.

    This is x[p] + Σ_j w_j (v_j[p] − x[p]) over the peers j that sent p.
    """
    merged = weighted_change(params, parts, weights)
    merged += params
    return merged


def weighted_change(params: Params, parts: Mapping[NodeId, Part], weights: Mapping[NodeId, float]) -> Params:
    """Return the change of each coordinate by `merge_sparse`."""
    change = np.zeros_like(params)
    for peer, part in parts.items():
        own = params if part.positions is None else params[part.positions]
        weight = np.float32(weights[peer])
        # Multiply first: the difference of two finite values could be infinite. For equal values the result is still 0.
        Part(part.values * weight - own * weight, part.positions).add_to(change)
    return change
