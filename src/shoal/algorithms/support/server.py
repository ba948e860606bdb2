"""How a server and its clients talk: calls to rounds, each with the server's model, and a last one to say goodbye.

The server's model is always said in full, whatever the sharing: a client that was not called for a while has nothing
that less could build on.

A client may go uncalled for many rounds, so its patience cannot be that of a receive. Where the experiment sets a
`receive_timeout`, a client that has heard nothing for so long asks whether the server is there, and gives it as long
again to say so.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping
from weakref import WeakSet

import numpy as np

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Check, InteractiveSharing, Node
from shoal.sharing.full import FullSharing
from shoal.sharing.sharing import SenderGroup
from shoal.types import NodeId

GLOBAL = "global"
LAST = "last"
COMPANY, WEIGHT = "company", "weight"
ASK, HERE = "is the server there", "the server is there"
_FULL = FullSharing()
_answering: WeakSet[Node] = WeakSet()
"""The servers that say so when they are asked."""


def alive(node: Node) -> list[NodeId]:
    """The clients that are not known to have died."""
    gone = node.failed_peers
    return [client for client in range(node.nodes) if client not in gone]


async def call(
    node: Node, clients: Iterable[NodeId], round: int, company: Mapping[NodeId, float] | None = None
) -> None:
    """The server calls `clients` to a round, with its model. `company`: all that are called, and how much each counts.
    If their sharing has to know, each is told who is called, and how much it counts itself."""
    if node.receive_timeout is not None and node not in _answering:
        _answering.add(node)
        node.background(_answer(node))
    model = _FULL.outgoing(node.params, round)
    if company is None or not isinstance(node.sharing, InteractiveSharing):
        await node.send(clients, model, round=round, kind=GLOBAL)
        return
    node.sharing.set_sender_group(node.id, round, SenderGroup(company.keys(), company))
    arrays = Payload({**model.arrays, COMPANY: np.array(list(company), np.uint32)}).frozen().arrays

    def said(client: NodeId) -> Payload:
        return Payload(arrays, {WEIGHT: company[client]})

    await node.send(clients, said, round=round, kind=GLOBAL)


async def dismiss(node: Node, rounds: int) -> None:
    """The server tells everybody what was learnt in all rounds."""
    final = Payload({"params": node.params}, {LAST: True})
    await node.send(alive(node), final, round=rounds - 1, kind=GLOBAL)


async def calls(node: Node) -> AsyncIterator[int]:
    """The rounds that the server calls this client to. In each, `node.params` is the model that came with the call.

    Of several calls that have come, the last counts: who was too slow for a round does not train for it any more. One
    to a round that this client was called to before, or to an earlier one, is refused: it has come twice, or was
    overtaken.
    Ends with the server's last model. Should the server die, or fall silent, it ends with the model of the latest call:
    that is what all have learnt together, where the client's own next step would be of its own data alone. Either is
    evaluated.
    """
    latest = -1

    def check(said: Payload) -> None:
        _FULL.check(said, node.params)
        _company(said, node)

    while (heard := await _next_call(node, check)) is not None:
        message: Message | None = None
        while heard is not None:
            if heard.round > latest or heard.payload.fields.get(LAST) is True:
                message, latest = heard, max(latest, heard.round)
            else:
                node.reject(
                    heard.sender, f"a call to round {heard.round}, and this node has been called to round {latest}"
                )
            heard = await node.receive(kind=GLOBAL, sender=node.server, timeout=0.0, check=check)
        if message is None:
            continue
        node.params = message.payload.arrays["params"]
        if message.payload.fields.get(LAST) is True:
            await node.evaluate(message.round)
            return
        if (group := _company(message.payload, node)) is not None and isinstance(node.sharing, InteractiveSharing):
            node.sharing.set_sender_group(node.server, latest, group)
        async with node.round(latest):
            yield latest
    kept = f"the model that it was sent in round {latest}" if latest >= 0 else "the model that it began with"
    fate = "died" if node.server in node.failed_peers else "keeps silent"
    node.event("server lost", f"node {node.server} {fate}; this node keeps {kept}")
    await node.evaluate(max(0, latest - 1))  # what a round begins with is what the one before ended with


def _company(said: Payload, node: Node) -> SenderGroup | None:
    """All that are called, and how much this node counts; None where nobody has to know. Raises `MessageError`."""
    if not isinstance(node.sharing, InteractiveSharing) or said.fields.get(LAST) is True:
        return None
    ids, weight = said.arrays.get(COMPANY), said.fields.get(WEIGHT)
    if ids is None or ids.dtype != np.uint32 or ids.ndim != 1 or len(np.unique(ids)) != len(ids):
        raise MessageError(f"expected an array {COMPANY!r} of the nodes that are called")
    if not isinstance(weight, float) or not 0 < weight <= 1:
        raise MessageError(f"expected a field {WEIGHT!r}, how much this node counts, above 0 and at most 1")
    if node.id not in ids or ids.max() >= node.nodes:
        raise MessageError("expected this node among those that are called, and nobody but clients")
    return SenderGroup(ids.tolist(), {node.id: weight})


async def _next_call(node: Node, check: Check) -> Message | None:
    """The server's next word; None when it has died, or does not even say that it is there."""
    patience = math.inf if node.receive_timeout is None else node.receive_timeout
    while True:
        message = await node.receive(kind=GLOBAL, sender=node.server, timeout=patience, check=check)
        if message is not None or node.server in node.failed_peers:
            return message
        await node.send([node.server], Payload({}), round=0, kind=ASK)
        if await node.receive(kind=HERE, sender=node.server, timeout=patience) is None:
            return await node.receive(kind=GLOBAL, sender=node.server, timeout=0.0, check=check)


async def _answer(node: Node) -> None:
    while (asked := await node.receive(kind=ASK)) is not None:
        if asked.sender < node.nodes:
            await node.send([asked.sender], Payload({}), round=0, kind=HERE)
