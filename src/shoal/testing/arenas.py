"""Where runtimes are put to the test: a few of them in one world, each with a coroutine of yours on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from shoal.environment.network.model import NetworkModel
from shoal.environment.network.network import Network
from shoal.mailbox import Mailbox
from shoal.message import RUN_LENGTH
from shoal.runtime import Runtime
from shoal.types import NodeId

if TYPE_CHECKING:  # the engines import torch; who only tests a topology need not wait for it
    from shoal.engines.processes.transport import Transport
    from shoal.engines.simulation.world import World

Body: TypeAlias = Callable[[Runtime], Coroutine[Any, Any, Any]]
"""What a node does, given its runtime."""


class Arena(Protocol):
    """A world of nodes that can talk to each other, made anew for each `run`."""

    def run(self, bodies: Mapping[NodeId, Body]) -> dict[NodeId, Any]:
        """Run nodes 0, 1, … to their ends; returns what each body returned, without those that were lost.

        What a body raises, or one of its background tasks, ends the run and is raised here.
        """
        ...

    def mark_failed(self, node: NodeId) -> None:
        """For a body to call: `node` dies now, and all others learn of it. It must be waiting for a message."""
        ...


class SimulatedArena:
    """The simulation's runtimes, under a virtual clock. `network` is what they are linked by, an ideal one if None."""

    def __init__(self, network: Network | None = None) -> None:
        self._network = network
        self._world: World | None = None

    def run(self, bodies: Mapping[NodeId, Body]) -> dict[NodeId, Any]:
        from shoal.engines.simulation.world import World

        nodes = len(bodies)
        timeline = None if self._network is None else self._network.build(nodes, seed=0)
        world = self._world = World(
            nodes, None if timeline is None else NetworkModel(timeline.initial_state, nodes, seed=0)
        )
        results: dict[NodeId, Any] = {}

        async def main(id: NodeId) -> None:
            results[id] = await bodies[id](world.runtimes[id])

        for id in range(nodes):
            world.runtimes[id].start(main(id))
        world.kernel.run()
        world.raise_if_deadlocked()
        return results

    def mark_failed(self, node: NodeId) -> None:
        assert self._world is not None
        self._world.mark_failed(node)


class SocketArena:
    """The process engine's runtimes: real time and TCP on this machine, though all in one process.

    Nodes that are not done after `patience` seconds are an error.
    """

    def __init__(self, patience: float = 30.0) -> None:
        self.patience = patience
        self.rejected: list[str] = []
        """Why messages were refused."""
        self.endpoints: list[str] = []
        """Where each node of the run listens."""
        self._places: list[tuple[Transport, Mailbox]] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def run(self, bodies: Mapping[NodeId, Body]) -> dict[NodeId, Any]:
        return asyncio.run(self._run(bodies))

    def mark_failed(self, node: NodeId) -> None:
        self._tasks[node].cancel()
        for other, (transport, mailbox) in enumerate(self._places):
            if other != node:
                mailbox.mark_failed(node)
                transport.mark_failed(node)

    async def _run(self, bodies: Mapping[NodeId, Body]) -> dict[NodeId, Any]:
        import zmq

        from shoal.engines.processes.runtime import ProcessRuntime
        from shoal.engines.processes.slots import Slots

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._places = [self._place(context, id) for id in range(len(bodies))]
        self.endpoints = [transport.endpoint for transport, _ in self._places]
        for transport, _ in self._places:
            transport.start(self.endpoints)
        slots = Slots(len(bodies))

        async def live(id: NodeId) -> Any:
            runtime = ProcessRuntime(id, *self._places[id], slots, trainings_per_slot=1.0)
            try:
                return await bodies[id](runtime)
            except asyncio.CancelledError:
                if runtime.failure is None:
                    raise
            finally:
                await runtime.end()

        self._tasks = [asyncio.create_task(live(id)) for id in range(len(bodies))]
        try:
            _, waiting = await asyncio.wait(self._tasks, timeout=self.patience, return_when=asyncio.FIRST_EXCEPTION)
            failures = [t.exception() for t in self._tasks if t.done() and not t.cancelled() and t.exception()]
            if failures:
                raise failures[0]  # type: ignore[misc]
            if waiting:
                stuck = [str(id) for id, task in enumerate(self._tasks) if task in waiting]
                raise TimeoutError(f"after {self.patience:g} s, these nodes are not done: {', '.join(stuck)}")
            return {id: task.result() for id, task in enumerate(self._tasks) if not task.cancelled()}
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for transport, _ in self._places:
                transport.close()
            context.destroy(linger=0)

    def _place(self, context: Any, id: NodeId) -> tuple[Transport, Mailbox]:
        from shoal.engines.processes.transport import Transport

        mailbox = Mailbox()
        transport = Transport(
            context,
            id=id,
            run="0" * RUN_LENGTH,
            host="127.0.0.1",
            port=None,
            max_message_bytes=2**24,
            connections=64,
            send_timeout=self.patience,
            deliver=mailbox.put,
            reject=self.rejected.append,
        )
        return transport, mailbox
