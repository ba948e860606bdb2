"""A runtime for unit tests of algorithms: one node, a script of messages, and a record of the messages it sent.

    def test_a_node_averages_with_its_peer():
        fake = FakeRuntime(Message(1, "model", 0, Payload({"params": np.ones(4, np.float32)})))
        node = fake.node(nodes=2, params=np.zeros(4, np.float32), train=lambda params: params + 1)
        fake.run(DPSGD(rounds=1).run(node))
        assert (node.params == 1).all()
        assert [to for to, message in fake.sent] == [1]

The clock is virtual: a test does not wait, and it gives the same result every time. No event loop is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from shoal.engines.simulation.kernel import Kernel, Task, park
from shoal.errors import DeadlockError
from shoal.experiment.registry import from_table, to_table
from shoal.mailbox import Filter, Mailbox
from shoal.message import RUN_LENGTH, Message
from shoal.node import Node, PeerDiscovery
from shoal.node_activity import NodeActivity
from shoal.node_context import EvaluationSchedule, NodeContext, NonFinite
from shoal.results.records import Record
from shoal.runtime import Work
from shoal.sharing.full import FullSharing
from shoal.sharing.sharing import Sharing
from shoal.topologies.graph import FromLabels, Mixing, Topology, WeightScheme
from shoal.topologies.static import Ring
from shoal.training.trainer import Trained
from shoal.traits import traits_of
from shoal.types import NodeId, Params

R = TypeVar("R")


class FakeRuntime:
    """The runtime of a single node. Messages given here arrive before the node receives anything."""

    def __init__(self, *messages: Message) -> None:
        self.sent: list[tuple[NodeId, Message]] = []
        """The receiver and the message of each send, in order."""
        self.sent_at: list[float] = []
        """The time of each send."""
        self.records: list[Record] = []
        """The records of the node that `node` made."""
        self.mailbox = Mailbox()
        self.activity = NodeActivity()
        self.transmission = 0.0
        """Seconds that `send_and_wait` takes."""
        self._kernel = Kernel()
        self._ended: float | None = None
        self._background: list[Task] = []
        self.deliver(*messages)

    def deliver(self, *messages: Message, at: float = 0.0) -> FakeRuntime:
        """Deliver `messages` at a time, in this order."""
        for message in messages:
            self._at(at, partial(self.mailbox.put, message))
        return self

    def mark_failed(self, *nodes: NodeId, at: float = 0.0) -> FakeRuntime:
        """Fail `nodes` at a time."""
        for node in nodes:
            self._at(at, partial(self.mailbox.mark_failed, node))
        return self

    def node(
        self,
        id: NodeId = 0,
        *,
        nodes: int,
        params: Params,
        train: Callable[[Params], Params] = np.copy,
        sharing: Sharing | None = None,
        topology: Topology | None = None,
        seed: int = 0,
        receive_timeout: float | None = None,
        services: Mapping[str, NodeId] | None = None,
        shapes: tuple[tuple[int, ...], ...] | None = None,
        discovery: PeerDiscovery | None = None,
        labels: NDArray[np.int64] | None = None,
        non_finite: NonFinite = "reject",
        learning_rate: float = 0.1,
        local_steps: int = 1,
    ) -> Node:
        """Return a node on this runtime. A training step calls `train` and takes one virtual second.

        By default the topology is a ring, the sharing is full, and a training has one step. `labels` are for topologies
        that are built from them: the number of samples of each class on each node. The node is not evaluated.
        """
        params = np.array(params, np.float32)
        mixing_factory = _FakeMixingFactory(nodes, seed, labels)
        context = NodeContext(
            id,
            nodes=nodes,
            seed=seed,
            run="0" * RUN_LENGTH,
            shapes=shapes or (params.shape,),
            schedule=EvaluationSchedule(every=0, evaluated=False, averaged=False),
            mixing=mixing_factory.build(topology or Ring()),
            mixing_factory=mixing_factory,
            services=services or {},
            receive_timeout=receive_timeout,
            non_finite=non_finite,
            learning_rate=learning_rate,
        )
        return Node(
            context,
            params=params,
            runtime=self,
            trainer=_FakeTrainer(train, local_steps),
            sharing=sharing or FullSharing(),
            observer=_RecordingObserver(self.records),
            discovery=discovery,
        )

    def run(self, main: Coroutine[Any, Any, R]) -> R:
        """Run `main` and return its result. Raises `DeadlockError` if it waits for a message that the script lacks."""
        results: list[R] = []

        async def body() -> None:
            results.append(await main)

        def ended(task: Task, crashed: bool) -> None:
            self._ended = self.now()  # later events of the script do not advance the clock
            for other in self._background:
                other.cancel()
            self._background.clear()

        self._ended = None
        self._kernel.spawn(body(), ended)
        self._kernel.run()
        if not results:
            waits = " and ".join(str(waiter.wanted) for waiter in self.mailbox.waiting)
            main.close()
            raise DeadlockError(
                f"at {self.now():g} s the node waits for {waits or 'an event'}, and the script has no more events; "
                "pass the message to FakeRuntime or deliver(), or give the receive a timeout"
            )
        return results[0]

    def now(self) -> float:
        return self._kernel.now if self._ended is None else self._ended

    async def sleep(self, seconds: float) -> None:
        self._at(self.now() + max(0.0, seconds), self._kernel.task().resume)
        await park()

    async def compute(self, work: Work[R]) -> R:
        await self.sleep(work.seconds)
        return work.run()

    async def send(self, to: NodeId, message: Message) -> bool:
        self.sent.append((to, message))
        self.sent_at.append(self.now())
        return True

    async def send_and_wait(self, to: NodeId, message: Message) -> bool:
        """Send `message` after `transmission` seconds."""
        await self.sleep(self.transmission)
        return await self.send(to, message)

    def receive_available(self, kind: str) -> list[Message]:
        return self.mailbox.receive_available(kind)

    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        resume = self._kernel.task().resume
        await self.sleep(0.0)  # messages of the script for this moment arrive first
        waiter = self.mailbox.start_receive(wanted, lambda: self._kernel.soon(resume))
        if not waiter.done:
            if timeout is not None and timeout != math.inf:
                self._at(self.now() + timeout, lambda: None if waiter.done else resume())
            await park()
            self.mailbox.end_receive(waiter)
        return waiter.messages

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        self._background.append(self._kernel.spawn(task, lambda task, _: self._background.remove(task)))

    def failed_peers(self) -> Collection[NodeId]:
        return self.mailbox.failed

    def late_messages(self, node: NodeId) -> int:
        return self.mailbox.late_from[node]

    def mark_rejoined(self, node: NodeId, round: int) -> None:
        self.mailbox.mark_rejoined(node, round)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._kernel.at(time, action)


class _FakeMixingFactory:
    """Graphs for the nodes of a test."""

    def __init__(self, nodes: int, seed: int, labels: NDArray[np.int64] | None) -> None:
        self._nodes, self._seed, self._labels = nodes, seed, labels

    def build(self, topology: Topology, weights: WeightScheme | None = None) -> Mixing:
        if self._labels is not None and traits_of(topology, "topology").needs_labels:
            graph = cast(FromLabels, topology).build_from(self._labels, self._seed)
        else:
            graph = topology.build(self._nodes, self._seed)
        return Mixing(graph, weights or "metropolis-hastings")

    def to_table(self, topology: Topology) -> dict[str, Any]:
        return to_table("topology", topology)

    def from_table(self, table: Mapping[str, Any]) -> Topology:
        topology: Topology = from_table("topology", table)
        return topology


class _FakeTrainer:
    """A trainer that calls a function of the parameters."""

    step_seconds = 1.0
    cpu_seconds = 0.0

    def __init__(self, train: Callable[[Params], Params], local_steps: int) -> None:
        self._train = train
        self._local_steps = local_steps

    @property
    def samples(self) -> int:
        return 1

    def steps(self, steps: int | None) -> int:
        return self._local_steps if steps is None else steps

    def train(self, params: Params, steps: int | None = None) -> Trained:
        for _ in range(self.steps(steps)):
            params = self._train(params)
        return Trained(np.asarray(params, np.float32), 0.0)

    def evaluate(self, params: Params) -> dict[str, float]:
        return {}


class _RecordingObserver:
    """An observer that keeps the records."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def record(self, record: Record) -> None:
        self._records.append(record)

    def submit_for_average(self, round: int, params: Params) -> None:
        """Averages are not computed."""

    async def before_round(self, round: int) -> None:
        """There are no faults."""

    def defer_evaluation(self, round: int, params: Params, progress: tuple[int, int]) -> bool:
        return False
