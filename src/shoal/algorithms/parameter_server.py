"""Parameter server: workers push steps, the server applies them, workers pull (Li et al., OSDI 2014)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.support.server import alive, call, calls, dismiss
from shoal.algorithms.support.server_optimizers import ServerOptimizer, ServerSGD
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.traits import Traits
from shoal.types import Bounds, Nested, NodeId

PATIENCE = 10
"""How often running an asynchronous server waits for anybody at all, before it gives up on those that train."""


@dataclass(frozen=True)
class ParameterServer:
    """Li et al. 2014: workers push the steps of their training, a server applies them, workers pull its model.

    What is pushed is u = train(x) − x; after one local step of plain SGD that is −η times the gradient. The server
    then takes x ← x + ū, or what its optimizer makes of the direction ū:
    - synchronous: ū is the mean of all workers' u, once in a round; the dead and the silent are left out;
    - asynchronous: ū is u/n of n workers alive, at once for each u that comes, and its sender goes on with the new
      model without waiting for the others. So n pushes move the model as far as one synchronous round does; with
      `server.lr` = n each is applied whole.

    A round of an asynchronous worker is an iteration of its own; a round of the server is as many pushes as there are
    nodes. The last ones are empty when workers have died.

    An asynchronous server that hears nobody for as long as it has patience goes on waiting, but no longer holds the
    fastest back for those that are silent: a late push counts as any other. Workers are given up when nobody at all was
    heard ten times running, and the server ends before its time when nobody is left. Its checkpoints hold how far each
    worker is, but not what was under way: a server that is restored calls all workers anew.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    asynchronous: bool = False
    staleness: Annotated[int, Bounds(at_least=0)] | None = None
    """How many iterations the fastest asynchronous worker may be ahead of the slowest before it has to wait: stale
    synchronous parallel (Ho et al. 2013). No limit when not given."""
    server: Annotated[ServerOptimizer, Nested("server-optimizer")] = field(default_factory=ServerSGD)

    traits: ClassVar[Traits] = Traits(own_payloads=True, has_service=True)

    def __post_init__(self) -> None:
        if self.staleness is not None and not self.asynchronous:
            raise ValueError("staleness is a limit for asynchronous workers: set asynchronous = true, or remove it")

    async def run(self, node: Node) -> None:
        async for r in calls(node):
            step = await node.train(node.params) - node.params
            await node.send([node.server], node.sharing.outgoing(step, r), round=r)

    async def serve(self, node: Node) -> None:
        await (self._asynchronous(node) if self.asynchronous else self._synchronous(node))
        await dismiss(node, self.rounds)

    async def _synchronous(self, node: Node) -> None:
        async for r in node.rounds(self.rounds):
            workers = alive(node)
            await call(node, workers, r)
            pushed = await node.receive_each(workers, round=r)
            if pushed:
                self._apply(node, pushed, 1 / len(pushed))
            else:
                node.event("nobody answered", f"round {r}: the model stays as it was")

    async def _asynchronous(self, node: Node) -> None:
        workers = _Workers(node)
        async for r in node.rounds(self.rounds):
            for _ in range(node.nodes):
                push = await self._next_push(node, workers)
                if push is not None:
                    self._apply(node, {push.sender: push.payload}, 1 / max(1, len(alive(node))))
                    workers.has_pushed(push.sender)
            if not workers.left():
                node.event("nobody left", f"round {r}: no worker is left to learn from; the server ends")
                await node.evaluate(r)
                break
        workers.report()

    async def _next_push(self, node: Node, workers: _Workers) -> Message | None:
        """Calls those that may begin another iteration, and waits for any that was called. None when nobody is left."""
        silences = 0
        while silences < PATIENCE:
            workers.forget_returned()
            for worker in self._ready(workers):
                workers.pulled[worker] = workers.steps
                await call(node, [worker], workers.clocks[worker])
            training = [worker for worker in workers.left() if worker in workers.pulled]
            if not training:
                return None
            push = await node.receive_first(training)
            if push is None:
                silences += 1
                workers.kept_silent(training)
            elif push.round == workers.clocks[push.sender]:  # else it is counted: its sender died, and was called again
                return push
        workers.give_up()
        return None

    def _ready(self, workers: _Workers) -> list[NodeId]:
        """The workers that may begin another iteration now."""
        left = workers.left()
        slowest = min((workers.clocks[worker] for worker in left if worker not in workers.silent), default=0)
        furthest = self.rounds if self.staleness is None else min(self.rounds, slowest + self.staleness + 1)
        return [worker for worker in left if worker not in workers.pulled and workers.clocks[worker] < furthest]

    def _apply(self, node: Node, pushed: Mapping[NodeId, Payload], share: float) -> None:
        direction = node.sharing.merge(np.zeros_like(node.params), pushed, dict.fromkeys(pushed, share))
        node.params = self.server.step(node.params, direction, node.memory)


class _Workers:
    """What an asynchronous server knows of its workers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.clocks: dict[NodeId, int] = dict(enumerate(node.memory.get("clocks", [0] * node.nodes)))
        """How many steps each has pushed."""
        self.pulled: dict[NodeId, int] = {}
        """Of those that train: how many steps the model had when they got it."""
        self.silent: set[NodeId] = set()
        """Of those that train: who was waited for in vain."""
        self._given_up: set[NodeId] = set()
        self._returns = dict(node.rejoin_counts)
        self.steps, self._staleness, self._stalest = node.memory.get("staleness", [0, 0, 0])
        """How many steps the model has made."""

    def left(self) -> list[NodeId]:
        """Who may still push: neither dead nor given up."""
        return [worker for worker in alive(self._node) if worker not in self._given_up]

    def has_pushed(self, worker: NodeId) -> None:
        stale = self.steps - self.pulled.pop(worker)
        self.silent.discard(worker)
        self.clocks[worker] += 1
        self.steps, self._staleness, self._stalest = self.steps + 1, self._staleness + stale, max(self._stalest, stale)
        self._node.memory["clocks"] = list(self.clocks.values())
        self._node.memory["staleness"] = [self.steps, self._staleness, self._stalest]

    def forget_returned(self) -> None:
        """Those that died and came back do not train any longer, and are to be called again."""
        for worker, times in self._node.rejoin_counts.items():
            if times != self._returns.get(worker):
                self._returns[worker] = times
                self.pulled.pop(worker, None)
                self.silent.discard(worker)
                self._given_up.discard(worker)

    def kept_silent(self, workers: Iterable[NodeId]) -> None:
        silent = set(workers).intersection(alive(self._node))
        if news := sorted(silent - self.silent):
            self._node.event("timed out", f"nothing from {', '.join(map(str, news))}; the others go on")
        self.silent |= silent

    def give_up(self) -> None:
        """On those that train: nobody waits for them any longer."""
        lost = sorted(worker for worker in self.left() if worker in self.pulled)
        self._node.event("gave up", f"nothing from {', '.join(map(str, lost))} in {PATIENCE} times the patience")
        self._given_up.update(lost)

    def report(self) -> None:
        if self.steps:
            mean = self._staleness / self.steps
            said = f"steps of others between a pull and its push: mean {mean:.3g}, at most {self._stalest}"
            self._node.event("staleness", said)
