"""How a node agrees upon keys with those that it masks with.

Each tells the other its key when they first speak to the same receiver. A key that does not come is waited for once; in
later rounds it is asked for again, with the own key, and whoever is asked so answers when it next looks for keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.secure.masks import KEY_BYTES, Keys
from shoal.sharing.secure.messages import AGAIN, KEY
from shoal.types import NodeId


class Exchange:
    """One node's, with all others."""

    def __init__(self) -> None:
        self.refused: set[NodeId] = set()
        """Those whose key is not one to mask with."""
        self._keys: Keys | None = None
        self._told: set[NodeId] = set()
        self._silent: set[NodeId] = set()
        """Those whose key was waited for in vain."""

    def keys(self, node: Node) -> Keys:
        if self._keys is None:
            self._keys = Keys(node.context.run)
        return self._keys

    def agreed(self, node: Node, partners: Collection[NodeId]) -> tuple[NodeId, ...]:
        """Those of `partners` that there is a key with. Some may have died since it was agreed upon."""
        keys = self.keys(node)
        return tuple(partner for partner in partners if partner in keys and partner not in self.refused)

    async def meet(self, node: Node, partners: set[NodeId]) -> None:
        """Agree upon a key with each of `partners`, who do the same: they speak to the same receiver."""
        keys = self.keys(node)
        for message in node.collect(kind=KEY):
            await self._hear(node, message)
        if untold := sorted(partners - self._told):
            self._told.update(untold)
            await self._tell(node, untold)
        if lost := sorted(p for p in (partners & self._silent) - self.refused if p not in keys):
            await self._tell(node, lost, again=True)
        patience = math.inf if node.receive_timeout is None else node.receive_timeout
        until = node.now() + patience
        # Who has kept silent once is not waited for again: this node's own words would be late every time.
        for peer in sorted(partners - self.refused - self._silent):
            if peer in keys:
                continue
            # Of any round: of two that meet, each tells the other its key when it comes to that.
            heard = await node.receive(kind=KEY, sender=peer, timeout=max(0.0, until - node.now()))
            if heard is not None:
                await self._hear(node, heard)
            elif peer not in node.failed_peers:
                self._silent.add(peer)
                node.event("no key", f"gave up waiting for that of node {peer}: this node does not mask with it")

    async def _tell(self, node: Node, to: Sequence[NodeId], again: bool = False) -> None:
        public = np.frombuffer(self.keys(node).public, np.uint8)
        await node.send(to, Payload({KEY: public}, {AGAIN: True} if again else {}), round=0, kind=KEY)

    async def _hear(self, node: Node, message: Message) -> None:
        if message.sender in self.refused:
            return
        keys, peer = self.keys(node), message.sender
        try:
            public = _key(message.payload)
            if peer not in keys:
                self._agree(node, peer, public)
            elif keys.owner(public) != peer:
                raise MessageError("another key than its first, which counts")
            if message.payload.fields.get(AGAIN) is True:
                await self._tell(node, [peer])
        except MessageError as error:
            if peer not in keys:
                self.refused.add(peer)
            node.reject(peer, str(error))

    def _agree(self, node: Node, peer: NodeId, public: bytes) -> None:
        keys = self.keys(node)
        if (owner := keys.owner(public)) is not None:
            self.refused.add(owner)
            node.reject(owner, f"its key is that of node {peer}: nobody knows whose it is")
        keys.agree(peer, public)


def _key(said: Payload) -> bytes:
    key = said.arrays.get(KEY)
    if key is None or key.dtype != np.uint8 or key.shape != (KEY_BYTES,):
        raise MessageError(f"expected a public key, {KEY_BYTES} bytes")
    return key.tobytes()
