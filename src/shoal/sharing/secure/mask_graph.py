"""The mask graph: which of the nodes that send to one receiver mask their updates with each other.

Few senders mask with all others. Many senders stand on a circle, and each masks with its nearest neighbours on both
sides, so that the number of masks and key shares grows with the number of senders and not with its square (Bell et al.,
"Secure single-server aggregation with (poly)logarithmic overhead", CCS 2020, draw such graphs at random; the order on
the circle is random here too).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Hashable, Mapping
from typing import TypeAlias

from shoal.types import NodeId

_POSITION = struct.Struct("<qQQ")
_Partners: TypeAlias = Mapping[NodeId, tuple[NodeId, ...]]
_latest: dict[NodeId, tuple[Hashable, _Partners]] = {}
"""The latest circle of each receiver, with its arguments. In a simulation all its senders need it in every round."""


def mask_partners(senders: Collection[NodeId], count: int, receiver: NodeId, seed: int) -> _Partners:
    """Return the partners of each sender in ascending order: all others, or `count` of them if there are more.

    All nodes compute the same partners, and partnership is mutual.
    """
    if len(senders) - 1 <= count:
        return {node: tuple(sorted(set(senders) - {node})) for node in sorted(senders)}
    key = tuple(sorted(senders)), count, seed
    if receiver not in _latest or _latest[receiver][0] != key:
        _latest[receiver] = key, _partners_on_circle(senders, count, receiver, seed)
    return _latest[receiver][1]


def _partners_on_circle(senders: Collection[NodeId], count: int, receiver: NodeId, seed: int) -> _Partners:
    order = sorted(senders, key=lambda node: hashlib.sha256(_POSITION.pack(seed, receiver, node)).digest())
    size, reach = len(order), count // 2
    return {
        node: tuple(sorted(order[(place + step) % size] for step in range(-reach, reach + 1) if step))
        for place, node in enumerate(order)
    }


def connected(partners: Mapping[NodeId, Collection[NodeId]], among: Collection[NodeId]) -> bool:
    """Return whether masks link all of `among`, directly or through each other.

    If they do not, the masks cancel in parts of the sum, and these parts would be visible.
    """
    left = set(among)
    reached = [left.pop()] if left else []
    while reached:
        for partner in partners[reached.pop()]:
            if partner in left:
                left.discard(partner)
                reached.append(partner)
    return not left
