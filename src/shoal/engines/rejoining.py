"""How a node that died comes back: it has lost all that it had, and begins where its peers are.

It asks everybody from which round on they count on it. Each says the round after its own, and from that round on the
two send to each other and wait for each other again; so no pair of nodes disagrees, wherever each of them is. Then it
takes over the model of the peer that is furthest on. Where a server leads, only the server's answer is waited for.

Of two that come back at the same time neither has a round to name yet. Both say so; then the one with the higher id
waits until the other is back, and is told.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import numpy as np

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.types import NodeId, Params

REJOIN_REQUEST = "rejoin"
REJOIN_ANSWER = "rejoin-answer"
MODEL_REQUEST = "rejoin-want"
MODEL_ANSWER = "rejoin-model"
REJOIN_KINDS = frozenset({REJOIN_REQUEST, REJOIN_ANSWER, MODEL_REQUEST, MODEL_ANSWER})
"""The kinds of messages that are not an algorithm's."""

ANSWER_TIMEOUT = 10.0
"""Seconds: how long to wait for answers where the experiment does not say how long to wait for anybody."""
LATEST = 2**53


class Absence:
    """Of a node that comes back: whether it is still on its way, and who asked it meanwhile."""

    def __init__(self) -> None:
        self.over = False
        self.askers: set[NodeId] = set()


async def answer_rejoining_peers(node: Node, absence: Absence | None = None) -> None:
    """Answer those that come back, for as long as this node takes part. Runs beside its algorithm."""
    node.background(_give_models(node))
    while True:
        message = await node.receive(kind=REJOIN_REQUEST)
        if message is None:
            continue
        if absence is None or absence.over:
            await _count_on(node, message.sender)
        else:
            absence.askers.add(message.sender)
            await node.runtime.send(message.sender, node.message(REJOIN_ANSWER, Payload({})))


async def rejoin(node: Node, others: Collection[NodeId]) -> bool:
    """Take up the round and the model of `others`, those that learn and are alive; answer who comes back later.

    False when nobody answers: there is nothing to come back to. To a node that has just been started again all that
    learn are gone, until they have answered.
    """
    absence = Absence()
    node.background(answer_rejoining_peers(node, absence))
    for peer in (*sorted(others), *sorted(set(node.context.services.values()))):
        await node.runtime.send(peer, node.message(REJOIN_REQUEST, Payload({})))
    led = "algorithm" in node.context.services
    answers = await _answers(node, {node.server} if led else set(others))
    for peer, round in answers.items():
        if peer < node.nodes:
            node.mark_rejoined(peer, round)
    giver = next(iter(answers), None) if led else await _take_over(node, answers)
    if giver is None:
        node.event("not rejoined", "nobody answered: the others have ended, or cannot be reached")
        return False
    how = f"node {giver} leads" if led else f"from round {node.next_round} on, with the model of node {giver}"
    node.event("rejoined", how)
    absence.over = True
    for asker in sorted(absence.askers - answers.keys()):
        if asker > node.id:
            await _count_on(node, asker)
    return True


async def _answers(node: Node, awaited: set[NodeId]) -> dict[NodeId, int]:
    """From which round on each of the others counts on this node: of all, or of those that answer in time."""
    answers: dict[NodeId, int] = {}
    until = node.now() + _patience(node)
    while awaited and (left := until - node.now()) > 0:
        message = await node.receive(kind=REJOIN_ANSWER, timeout=left, check=_round)
        if message is None or message.sender not in awaited:
            continue
        round = _round(message.payload)
        if round is not None:
            answers[message.sender] = round
        if round is not None or message.sender > node.id:  # one that is on its way back, and waits for this one
            awaited.discard(message.sender)
    return answers


async def _take_over(node: Node, answers: dict[NodeId, int]) -> NodeId | None:
    """Begin with the model of the first who gives one, of those furthest on; who that is."""
    for giver in sorted(answers, key=lambda peer: (-answers[peer], peer)):
        await node.send([giver], Payload({}), round=0, kind=MODEL_REQUEST)
        given = await node.receive(
            kind=MODEL_ANSWER, sender=giver, timeout=_patience(node), check=partial(_full_model, node)
        )
        if given is not None:
            node.begin_at(min(answers.values()), _full_model(node, given.payload))
            return giver
    return None


async def _count_on(node: Node, peer: NodeId) -> None:
    """Send to `peer`, and wait for it, from the next round on, and let it know."""
    round = node.next_round + 1
    node.mark_rejoined(peer, round)
    await node.send([peer], Payload({}, {"round": round}), round=0, kind=REJOIN_ANSWER)


async def _give_models(node: Node) -> None:
    while True:
        message: Message | None = await node.receive(kind=MODEL_REQUEST)
        if message is not None:
            await node.send([message.sender], Payload({"params": node.params}), round=0, kind=MODEL_ANSWER)


def _full_model(node: Node, payload: Payload) -> Params:
    """Return the complete model in `payload`. Raises `MessageError` if it holds anything else."""
    params = payload.arrays.get("params")
    if params is None or params.dtype != np.float32 or params.shape != node.params.shape:
        raise MessageError(f"expected params, {node.params.size} float32 values")
    if not np.isfinite(params).all():
        raise MessageError("some values are not finite")
    return np.array(params)


def _round(payload: Payload) -> int | None:
    """The round that an answer names; none by one that is on its way back itself."""
    round = payload.fields.get("round")
    if round is not None and (type(round) is not int or not 0 <= round < LATEST):
        raise MessageError(f"round = {round!r}: expected the round from which on a node is counted on")
    return round


def _patience(node: Node) -> float:
    return node.receive_timeout or ANSWER_TIMEOUT
