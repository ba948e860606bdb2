"""How a restarted node rejoins a run: it has lost its state, and continues where its peers are.

A node that joins late has no state yet, and does the same.

It asks every peer for the first round in which the peer includes it. Each peer answers with the round after its own.
From that round on, the two send to each other and wait for each other again, so no pair of nodes disagrees, whatever
their rounds are. Then the node takes over the model of the peer that is furthest ahead. Where a server leads the
algorithm, the node waits only for the server's answer.

Two nodes that rejoin at the same time have no round to answer with yet, and both answer so. Then the node with the
higher id waits until the other node has rejoined and sends its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import numpy as np

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.results.records import REJOINED
from shoal.types import NodeId, Params

REJOIN_REQUEST = "rejoin"
REJOIN_ANSWER = "rejoin-answer"
MODEL_REQUEST = "rejoin-want"
MODEL_ANSWER = "rejoin-model"
REJOIN_KINDS = frozenset({REJOIN_REQUEST, REJOIN_ANSWER, MODEL_REQUEST, MODEL_ANSWER})
"""The kinds of messages that belong to no algorithm."""

ANSWER_TIMEOUT = 10.0
"""Seconds to wait for answers, if the experiment sets no receive timeout."""
MAX_ROUND = 2**53


class RejoinState:
    """Whether a restarted node has rejoined, and which peers asked it before that."""

    def __init__(self) -> None:
        self.rejoined = False
        self.askers: set[NodeId] = set()


async def answer_rejoining_peers(node: Node, state: RejoinState | None = None) -> None:
    """Answer restarted peers until cancelled. Runs in the background of the node's algorithm."""
    node.background(_send_models(node))
    while True:
        message = await node.receive(kind=REJOIN_REQUEST)
        if message is None:
            continue
        if state is None or state.rejoined:
            await _include(node, message.sender)
        else:
            state.askers.add(message.sender)
            await node.runtime.send(message.sender, node.make_message(REJOIN_ANSWER, Payload({})))


async def rejoin(
    node: Node,
    others: Collection[NodeId],
    restore_own: Callable[[Node], int | None] = lambda node: None,
    event: str = REJOINED,
) -> bool:
    """Take over a round and a model of `others`, the training nodes that have not failed; answer later rejoiners.

    If no peer answers, continue from the node's own checkpoint: `restore_own` restores it and returns its next round,
    or returns None if there is none. Then `rejoin` returns False. All training nodes count as failed for a restarted
    node until they answer. `event` is the name of the recorded event: `REJOINED`, or `JOINED` for a late node.
    """
    state = RejoinState()
    node.background(answer_rejoining_peers(node, state))
    for peer in (*sorted(others), *sorted(set(node.context.services.values()))):
        await node.runtime.send(peer, node.make_message(REJOIN_REQUEST, Payload({})))
    led = "algorithm" in node.context.services
    answers = await _answers(node, {node.server} if led else set(others))
    for peer, round in answers.items():
        if peer < node.nodes:
            node.mark_rejoined(peer, round)
    giver = next(iter(answers), None) if led else await _take_over(node, answers)
    if giver is not None:
        how = f"node {giver} leads" if led else f"from round {node.next_round} on, with the model of node {giver}"
    elif (restored := restore_own(node)) is not None:
        how = f"from round {restored} on, with its own checkpoint: no peer answered"
    else:
        node.record_event(f"not {event}", "no peer answered: the others have ended, or are unreachable")
        return False
    node.record_event(event, how)
    state.rejoined = True
    for asker in sorted(state.askers - answers.keys()):
        if asker > node.id:
            await _include(node, asker)
    return True


async def _answers(node: Node, awaited: set[NodeId]) -> dict[NodeId, int]:
    """Wait for the first rounds in which the others include this node. Returns the answers that arrive in time."""
    answers: dict[NodeId, int] = {}
    until = node.now() + _answer_timeout(node)
    while awaited and (left := until - node.now()) > 0:
        message = await node.receive(kind=REJOIN_ANSWER, timeout=left, check=_round)
        if message is None or message.sender not in awaited:
            continue
        round = _round(message.payload)
        if round is not None:
            answers[message.sender] = round
        if round is not None or message.sender > node.id:  # it rejoins as well, and waits for this node
            awaited.discard(message.sender)
    return answers


async def _take_over(node: Node, answers: dict[NodeId, int]) -> NodeId | None:
    """Begin with a model of the peer that is furthest ahead, or of the next that sends one. Returns that peer."""
    for giver in sorted(answers, key=lambda peer: (-answers[peer], peer)):
        await node.send([giver], Payload({}), round=0, kind=MODEL_REQUEST)
        given = await node.receive(
            kind=MODEL_ANSWER, sender=giver, timeout=_answer_timeout(node), check=partial(_full_model, node)
        )
        if given is not None:
            node.start_at_round(min(answers.values()), _full_model(node, given.payload))
            return giver
    return None


async def _include(node: Node, peer: NodeId) -> None:
    """Send to `peer`, and wait for it, from the next round on, and inform `peer`."""
    round = node.next_round + 1
    node.mark_rejoined(peer, round)
    await node.send([peer], Payload({}, {"round": round}), round=0, kind=REJOIN_ANSWER)


async def _send_models(node: Node) -> None:
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
    """The round in an answer; None if its sender has not rejoined yet."""
    round = payload.fields.get("round")
    if round is not None and (type(round) is not int or not 0 <= round < MAX_ROUND):
        raise MessageError(f"round = {round!r}: expected the first round in which the node is included")
    return round


def _answer_timeout(node: Node) -> float:
    return node.receive_timeout or ANSWER_TIMEOUT
