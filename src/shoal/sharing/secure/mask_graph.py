"""Who of those that speak to one receiver mask with whom.

With all others, where they are few. With many, each stands on a circle and masks with its nearest on both sides, so
that masks and shares grow with their number and not with its square (Bell et al., "Secure single-server aggregation
with (poly)logarithmic overhead", CCS 2020, draw such graphs at random; so is the order on the circle here).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Hashable, Mapping
from typing import TypeAlias

from shoal.types import NodeId

_PLACE = struct.Struct("<qQQ")
_Circle: TypeAlias = Mapping[NodeId, tuple[NodeId, ...]]
_latest: dict[NodeId, tuple[Hashable, _Circle]] = {}
"""The last circle around each receiver, and what it is of. In a simulation all who stand on it need it, in every
round."""


def circle(company: Collection[NodeId], partners: int, receiver: NodeId, seed: int) -> _Circle:
    """For each of `company` its partners, in ascending order. Alike on all nodes; who is whose partner is mutual."""
    if len(company) - 1 <= partners:
        return {node: tuple(sorted(set(company) - {node})) for node in sorted(company)}
    asked = tuple(sorted(company)), partners, seed
    if receiver not in _latest or _latest[receiver][0] != asked:
        _latest[receiver] = asked, _circle(company, partners, receiver, seed)
    return _latest[receiver][1]


def _circle(company: Collection[NodeId], partners: int, receiver: NodeId, seed: int) -> _Circle:
    order = sorted(company, key=lambda node: hashlib.sha256(_PLACE.pack(seed, receiver, node)).digest())
    count, reach = len(order), partners // 2
    return {
        node: tuple(sorted(order[(place + step) % count] for step in range(-reach, reach + 1) if step))
        for place, node in enumerate(order)
    }


def connected(partners: Mapping[NodeId, Collection[NodeId]], among: Collection[NodeId]) -> bool:
    """Whether masks link all of `among`, directly or by way of each other: if not, parts of their sum would show."""
    left = set(among)
    reached = [left.pop()] if left else []
    while reached:
        for partner in partners[reached.pop()]:
            if partner in left:
                left.discard(partner)
                reached.append(partner)
    return not left
