"""How a server and its clients talk: calls to rounds, each with the server's model, and a last one to say goodbye.

The server's model is always said in full, whatever the sharing: a client that was not called for a while has nothing
that less could build on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from shoal.message import Payload
from shoal.node import Node
from shoal.sharing.full import Full
from shoal.topologies.graph import NodeId

GLOBAL = "global"
LAST = "last"
_FULL = Full()


def alive(node: Node) -> list[NodeId]:
    """The clients that are not known to have died."""
    gone = node.runtime.gone()
    return [client for client in range(node.nodes) if client not in gone]


async def call(node: Node, clients: Iterable[NodeId], round: int) -> None:
    """The server calls `clients` to a round, with its model."""
    await node.send(clients, _FULL.outgoing(node.params, round), round=round, kind=GLOBAL)


async def dismiss(node: Node, rounds: int) -> None:
    """The server tells everybody what was learnt in all rounds."""
    final = Payload({"params": node.params}, {LAST: True})
    await node.send(alive(node), final, round=rounds - 1, kind=GLOBAL)


async def calls(node: Node) -> AsyncIterator[int]:
    """The rounds that the server calls this client to. In each, `node.params` is the model that came with the call.

    Ends with the server's last model. Should the server die, it ends with the model of the latest call: that is what
    all have learnt together, where the client's own next step would be of its own data alone. Either is evaluated.
    """
    latest = -1

    def check(said: Payload) -> None:
        _FULL.check(said, node.params)

    while (message := await node.receive(kind=GLOBAL, sender=node.server, check=check)) is not None:
        node.params = message.payload.arrays["params"]
        if message.payload.fields.get(LAST) is True:
            await node.evaluate(message.round)
            return
        latest = message.round
        async with node.round(latest):
            yield latest
    kept = f"the model that it was sent in round {latest}" if latest >= 0 else "the model that it began with"
    node.event("server lost", f"node {node.server} died; this node keeps {kept}")
    await node.evaluate(max(0, latest - 1))  # what a round begins with is what the one before ended with
