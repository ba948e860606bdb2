"""How a node that died comes back: it has lost all that it had, and begins where its peers are.

It asks everybody from which round on they count on it. Each says the round after its own, and from that round on the
two send to each other and wait for each other again; so no pair of nodes disagrees, wherever each of them is. Then it
takes over the model of the peer that is furthest on.
"""

from __future__ import annotations

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.topologies.graph import NodeId

ASK = "rejoin"
ANSWER = "rejoin-answer"
WANT = "rejoin-want"
MODEL = "rejoin-model"
REJOINING = frozenset({ASK, ANSWER, WANT, MODEL})
"""The kinds of messages that are not an algorithm's."""

PATIENCE = 10.0
"""Seconds: how long to wait for answers where the experiment does not say how long to wait for anybody."""
LATEST = 2**53


async def welcome(node: Node) -> None:
    """Answer those that come back, for as long as this node takes part. Runs beside its algorithm."""
    node.background(_give_models(node))
    while True:
        message = await node.receive(kind=ASK)
        if message is not None:
            round = node.next_round + 1
            node.runtime.regain(message.sender, round)
            await node.send([message.sender], Payload({}, {"round": round}), round=0, kind=ANSWER)


async def rejoin(node: Node) -> bool:
    """Take up the others' round and model. False when nobody answers: there is nothing to come back to.

    To a node that has just been started again everybody is gone, until they have answered.
    """
    others = [peer for peer in range(node.nodes) if peer != node.id]
    for peer in others:
        await node.runtime.send(peer, node.message(ASK, Payload({})))
    answers = await _answers(node, len(others))
    for peer, round in answers.items():
        node.runtime.regain(peer, round)
    for giver in sorted(answers, key=lambda peer: (-answers[peer], peer)):
        await node.send([giver], Payload({}), round=0, kind=WANT)
        given = await node.receive(kind=MODEL, sender=giver, timeout=_patience(node), check=node.full_model)
        if given is not None:
            node.begin_at(min(answers.values()), node.full_model(given.payload))
            node.event("rejoined", f"from round {node.next_round} on, with the model of node {giver}")
            return True
    node.event("not rejoined", "nobody answered: the others have ended, or cannot be reached")
    return False


async def _answers(node: Node, wanted: int) -> dict[NodeId, int]:
    """From which round on each of the others counts on this node: of all, or of those that answer in time."""
    answers: dict[NodeId, int] = {}
    until = node.now() + _patience(node)
    while len(answers) < wanted and (left := until - node.now()) > 0:
        message = await node.receive(kind=ANSWER, timeout=left, check=_round)
        if message is not None:
            answers[message.sender] = _round(message.payload)
    return answers


async def _give_models(node: Node) -> None:
    while True:
        message: Message | None = await node.receive(kind=WANT)
        if message is not None:
            await node.send([message.sender], Payload({"params": node.params}), round=0, kind=MODEL)


def _round(payload: Payload) -> int:
    round = payload.fields.get("round")
    if type(round) is not int or not 0 <= round < LATEST:
        raise MessageError(f"round = {round!r}: expected the round from which on a node is counted on")
    return round


def _patience(node: Node) -> float:
    return node.receive_timeout or PATIENCE
