"""A simulated network with random delays, losses and failures, for invariants that must hold in any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shoal.engines.simulation.engine import World
from shoal.message import Message
from shoal.node import Node
from shoal.testing import FakeRuntime


class Unsteady:
    """Nodes on an unreliable network.

    Nodes train for different times. Messages take up to `delay` seconds and overtake each other; the share `loss` of
    them is lost. A node fails at any moment, its messages in transit may be lost, and each of the others learns of the
    failure at a different time. There are no timeouts unless `receive_timeout` is given. `models` are the initial
    models; `train(node, params)` returns the trained model.
    """

    def __init__(
        self,
        seed: int,
        nodes: int,
        algorithm: Any,
        *,
        models: Any = None,
        train: Callable[[int, Any], Any] = lambda node, params: params / 2 + node + 1,
        topology: Any = None,
        delay: float = 1.0,
        loss: float = 0.0,
        receive_timeout: float | None = None,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.world = World(nodes)
        self.delay, self.loss = delay, loss
        self.delivered = 0
        self.fakes = [FakeRuntime() for _ in range(nodes)]
        """The records of the nodes."""
        self.nodes = [
            fake.node(
                id,
                nodes=nodes,
                params=np.zeros(23, np.float32) if models is None else models[id],
                train=partial(train, id),
                topology=topology,
                seed=seed,
                receive_timeout=receive_timeout,
            )
            for id, fake in enumerate(self.fakes)
        ]
        for node in self.nodes:
            runtime = self.world.runtimes[node.id]
            runtime.send = partial(self._send, node.id)  # type: ignore[method-assign]
            runtime.send_and_wait = partial(self._send_and_wait, node.id)  # type: ignore[method-assign]
            node.runtime = runtime
            node.trainer.step_seconds = 0.5 + self.rng.random()  # type: ignore[attr-defined]
            runtime.start(algorithm.run(node))

    def fail(self, node: int, at: float) -> None:
        self.world.kernel.at(at, partial(self._fail, node))

    def run(self) -> list[Node]:
        """Run to the end, and return the nodes that did not fail."""
        self.world.kernel.run()
        self.world.raise_if_deadlocked()
        left = [node for node in self.nodes if not self.world.runtimes[node.id].failed]
        assert not any(self.world.runtimes[node.id].running for node in left)
        return left

    async def _send(self, sender: int, to: int, message: Message) -> bool:
        self._put_in_transit(sender, to, message)
        return True

    async def _send_and_wait(self, sender: int, to: int, message: Message) -> bool:
        await self.world.runtimes[sender].sleep(self.delay * self.rng.random())
        self._put_in_transit(sender, to, message)
        return True

    def _put_in_transit(self, sender: int, to: int, message: Message) -> None:
        arrival = self.world.kernel.now + self.delay * self.rng.random()
        if self.rng.random() >= self.loss:
            self.world.kernel.at(arrival, partial(self._deliver, sender, to, message))

    def _deliver(self, sender: int, to: int, message: Message) -> None:
        lost = self.world.runtimes[sender].failed and self.rng.random() < 0.5
        if not lost and not self.world.runtimes[to].failed:
            self.delivered += 1
            self.world.runtimes[to].mailbox.put(message)

    def _fail(self, node: int) -> None:
        runtime = self.world.runtimes[node]
        runtime.failed, runtime.running = True, False
        runtime.stop()
        for other in self.world.runtimes:
            if not other.failed:
                self.world.kernel.at(
                    self.world.kernel.now + 6 * self.rng.random(), partial(other.mailbox.mark_failed, node)
                )
