"""D-PSGD that records which incarnation of a node sent each merged model. A plug-in for `chaos.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.message import Payload
from shoal.node import Node
from shoal.traits import Traits
from shoal.types import parse_node_ids

BORN = "born"
MERGED = "merged"
"""The event of a merged model of a watched node: its sender, when that process of the sender began to train, and when
the receive began."""


@dataclass(frozen=True)
class TracedDPSGD:
    """`shoal.algorithms.dpsgd.DPSGD`, with the time at which the sender began in each message."""

    rounds: int = 100
    watched: str = ""
    """The nodes whose messages are recorded, as in "3, 8"."""

    traits: ClassVar[Traits] = Traits(needs_only_sum=True)

    async def run(self, node: Node) -> None:
        born = node.now()
        watched = frozenset(parse_node_ids(self.watched, node.nodes) if self.watched else ())
        async for r in node.rounds(self.rounds):
            node.params = await node.train(node.params)
            peers = await node.peers(r)
            outgoing = node.sharing.outgoing(node.params, r)
            assert isinstance(outgoing, Payload)
            await node.send(peers, outgoing.with_field(BORN, born), round=r)
            since = node.now()
            received = await node.receive_each(peers, round=r)
            for sender in sorted(watched.intersection(received)):
                node.record_event(MERGED, f"{sender} {received[sender].fields[BORN]} {since}")
            node.params = node.sharing.merge(node.params, received, node.weights(received))
