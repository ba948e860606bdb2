"""How a node agrees on keys with its mask partners.

Two partners send each other their keys when they first send to the same receiver. A node waits once for a key. In later
rounds it sends its own key again and asks for the missing one; the partner answers when it next looks for keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.secure.masks import KEY_BYTES, Keys
from shoal.sharing.secure.messages import PUBLIC_KEY, RESEND
from shoal.types import NodeId


class KeyExchange:
    """The key exchange of one node with all others."""

    def __init__(self) -> None:
        self.rejected: set[NodeId] = set()
        """The nodes whose key is not valid."""
        self._keys: Keys | None = None
        self._sent_to: set[NodeId] = set()
        self._timed_out: set[NodeId] = set()
        """The nodes whose key did not arrive before the timeout."""

    def keys(self, node: Node) -> Keys:
        if self._keys is None:
            self._keys = Keys(node.context.run)
        return self._keys

    def with_key(self, node: Node, partners: Collection[NodeId]) -> tuple[NodeId, ...]:
        """Return the partners that this node has a key with. Some of them may have failed since."""
        keys = self.keys(node)
        return tuple(partner for partner in partners if partner in keys and partner not in self.rejected)

    async def run(self, node: Node, partners: set[NodeId]) -> None:
        """Agree on a key with each of `partners`. They do the same, because they send to the same receiver."""
        keys = self.keys(node)
        for message in node.receive_available(kind=PUBLIC_KEY):
            await self._handle(node, message)
        if new := sorted(partners - self._sent_to):
            self._sent_to.update(new)
            await self._send_key(node, new)
        if missing := sorted(p for p in (partners & self._timed_out) - self.rejected if p not in keys):
            await self._send_key(node, missing, resend=True)
        deadline = None if node.receive_timeout is None else node.now() + node.receive_timeout
        # A partner that timed out once is not waited for again: this node's own update would be late every time.
        for peer in sorted(partners - self.rejected - self._timed_out):
            if peer in keys:
                continue
            # A key has no round: the two partners may send theirs in different rounds.
            timeout = None if deadline is None else max(0.0, deadline - node.now())
            answer = await node.receive(kind=PUBLIC_KEY, sender=peer, timeout=timeout)
            if answer is not None:
                await self._handle(node, answer)
            elif peer not in node.failed_peers:
                deadline = node.now() if deadline is None else deadline  # the other partners had the same time
                self._timed_out.add(peer)
                node.record_event("key timed out", f"no key from node {peer}: this node does not mask with it")

    async def _send_key(self, node: Node, to: Sequence[NodeId], resend: bool = False) -> None:
        public = np.frombuffer(self.keys(node).public, np.uint8)
        await node.send(to, Payload({PUBLIC_KEY: public}, {RESEND: True} if resend else {}), round=0, kind=PUBLIC_KEY)

    async def _handle(self, node: Node, message: Message) -> None:
        if message.sender in self.rejected:
            return
        keys, peer = self.keys(node), message.sender
        try:
            public = _read_key(message.payload)
            if peer not in keys:
                self._agree(node, peer, public)
            elif keys.owner(public) != peer:
                raise MessageError("a second, different key; the first one stays in use")
            if message.payload.fields.get(RESEND) is True:
                await self._send_key(node, [peer])
        except MessageError as error:
            if peer not in keys:
                self.rejected.add(peer)
            node.reject(peer, str(error))

    def _agree(self, node: Node, peer: NodeId, public: bytes) -> None:
        keys = self.keys(node)
        if (owner := keys.owner(public)) is not None:
            self.rejected.add(owner)
            node.reject(owner, f"its key is also the key of node {peer}: the true owner is unknown")
        keys.agree(peer, public)


def _read_key(payload: Payload) -> bytes:
    key = payload.arrays.get(PUBLIC_KEY)
    if key is None or key.dtype != np.uint8 or key.shape != (KEY_BYTES,):
        raise MessageError(f"expected a public key, {KEY_BYTES} bytes")
    return key.tobytes()
