"""A world of nodes that share securely, and what tests of them need."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any
from unittest import mock

import numpy as np

from shoal.algorithms.dpsgd import DPSGD
from shoal.engines.simulation.kernel import park
from shoal.engines.simulation.world import World
from shoal.environment.network.links import Uniform
from shoal.environment.network.model import NetworkModel
from shoal.experiment.setup import run_interactively
from shoal.message import RUN_LENGTH, Message, Payload
from shoal.node import InteractiveSharing, Node
from shoal.results.records import Event, Record
from shoal.sharing.full import FullSharing
from shoal.sharing.secure import secure
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.masks import Keys
from shoal.sharing.secure.messages import Gathering, Statement, naming, rows
from shoal.sharing.secure.secure import Secure
from shoal.sharing.secure.unmasking import Opening, Sum
from shoal.testing import FakeRuntime
from shoal.topologies.graph import Links, Topology

RUN = "0" * RUN_LENGTH


# A world of nodes that share securely


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A graph in which each node hears each other one with some probability, in every round or once and for all."""

    density: float
    static: bool = False

    def build(self, nodes: int, seed: int) -> DrawnGraph:
        return DrawnGraph(nodes, self.density, self.static, seed)


@dataclasses.dataclass
class DrawnGraph:
    nodes: int
    density: float
    static: bool
    seed: int

    def links(self, node: int, round: int) -> Links:
        hears = self._hears(round)
        return Links(tuple(np.flatnonzero(hears[:, node]).tolist()), tuple(np.flatnonzero(hears[node]).tolist()))

    def degree(self, node: int, round: int) -> int:
        return int(self._hears(round)[node].sum())

    def _hears(self, round: int) -> Any:
        rng = np.random.default_rng([self.seed, 0 if self.static else round])
        hears = rng.random((self.nodes, self.nodes)) < self.density
        np.fill_diagonal(hears, False)
        return hears


class Witnessed(Secure):
    """Remembers its models and, as a receiver, what it was told and what it opened."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.models: dict[int, Any] = {}
        self.heard: dict[int, Mapping[int, Payload]] = {}
        self.companies: dict[int, Mapping[int, float]] = {}
        self.positions: dict[int, Any] = {}
        self.sums: dict[int, Sum] = {}

    def outgoing(self, params: Any, round: int) -> Any:
        self.models[round] = np.array(params)
        return super().outgoing(params, round)

    async def after_receive(self, node: Node, received: Any, round: int) -> Any:
        self.heard[round] = dict(received)
        self.companies[round] = self._sender_groups.of(node, node.id, round).weights
        opened = await super().after_receive(node, received, round)
        for said in opened.values():
            self.positions[round] = said.arrays.get("positions", slice(None))
        return opened


class WitnessedOpening(Opening):
    async def open(self) -> Sum:
        found = await super().open()
        self._node.sharing.sums[self._gathering.round] = found  # type: ignore[attr-defined]
        return found


class Together:
    """Nodes of one simulated world, each with a sharing of its own, that run an algorithm."""

    def __init__(
        self,
        algorithm: Any,
        sharings: list[Any],
        *,
        topology: Topology | None = None,
        network: Uniform | None = None,
        receive_timeout: float | None = None,
        size: int = 32,
        models: Callable[[int], Any] | None = None,
        seed: int = 0,
    ) -> None:
        """`models` gives what each node's training ends with; None: it drifts at random."""
        self.algorithm, self.sharings = algorithm, sharings
        served = hasattr(algorithm, "serve")
        self.learners = len(sharings) - served
        timeline = None if network is None else network.build(len(sharings), seed)
        network_model = None if timeline is None else NetworkModel(timeline.initial_state, len(sharings), seed)
        self.world = World(len(sharings), network_model, learners=self.learners)
        self.sent: list[tuple[int, Message]] = []
        self.nodes: list[Node] = []
        self.records: list[list[Record]] = []
        for id, sharing in enumerate(sharings):
            fake, drift = FakeRuntime(), np.random.default_rng([seed, id])

            def train(params: Any, id: int = id, drift: Any = drift) -> Any:
                return models(id) if models is not None else params + drift.normal(size=params.size)

            node = fake.node(
                id,
                nodes=self.learners,
                params=np.zeros(size, np.float32),
                train=train,
                sharing=sharing,
                topology=topology,
                seed=seed,
                receive_timeout=receive_timeout,
                services={"algorithm": self.learners} if served else None,
            )
            node.runtime = runtime = self.world.runtimes[id]
            self.nodes.append(node)
            self.records.append(fake.records)
            self._record(runtime)

    def dies(self, node: int, after: int) -> Together:
        """`node` dies when it has sent so many messages and is about to send one more."""
        runtime = self.world.runtimes[node]
        send, left = runtime.send, itertools.count(after, -1)

        async def until_death(to: int, message: Message) -> bool:
            if next(left) == 0:
                self.world.kernel.soon(runtime.crash)
                await park()
            return await send(to, message)

        runtime.send = until_death  # type: ignore[method-assign]
        return self

    def withhold(self, node: int, which: Callable[[int, Message], bool]) -> Together:
        """What `node` sends is lost on its way, where `which` says so."""
        runtime = self.world.runtimes[node]
        send = runtime.send

        async def some(to: int, message: Message) -> bool:
            return True if which(to, message) else bool(await send(to, message))

        runtime.send = some  # type: ignore[method-assign]
        return self

    def run(self) -> Together:
        for node in self.nodes:
            self.world.runtimes[node.id].start(self._live(node))
        with mock.patch.object(secure, "Opening", WitnessedOpening):
            self.world.kernel.run()
        self.world.raise_if_deadlocked()
        return self

    def events(self, node: int) -> list[tuple[str, str]]:
        return [(record.what, record.detail) for record in self.records[node] if isinstance(record, Event)]

    def expected(self, receiver: int, round: int, speakers: Collection[int]) -> Any:
        """The sum of the encodings of what `speakers` had to say, without any mask."""
        sharing = self.sharings[receiver]
        ring = FixedPoint(sharing.bits, sharing.range)
        weights, positions = sharing.companies[round], sharing.positions[round]
        models = {speaker: self.sharings[speaker].models[round][positions] for speaker in speakers}
        return sum(ring.encode(model, weights[speaker]) for speaker, model in models.items())

    def check_sums(self) -> int:
        """All sums that were opened are exact; how many they are."""
        opened = 0
        for receiver, sharing in enumerate(self.sharings):
            for round, found in sharing.sums.items():
                assert np.array_equal(found.words, self.expected(receiver, round, found.speakers)), (receiver, round)
                opened += 1
        return opened

    def _record(self, runtime: Any) -> None:
        send = runtime.send

        async def recorded(to: int, message: Message) -> bool:
            self.sent.append((to, message))
            return bool(await send(to, message))

        runtime.send = recorded

    async def _live(self, node: Node) -> None:
        life = self.algorithm.serve(node) if node.id == self.learners else self.algorithm.run(node)
        await (run_interactively(life, node, node.sharing) if isinstance(node.sharing, InteractiveSharing) else life)


# One receiver, and all others speak to it


@dataclasses.dataclass(frozen=True)
class Audience:
    """Everybody speaks to node 0, and nobody to anybody else."""

    def build(self, nodes: int, seed: int) -> AudienceGraph:
        return AudienceGraph(nodes)


@dataclasses.dataclass
class AudienceGraph:
    nodes: int
    static = True

    def links(self, node: int, round: int) -> Links:
        return Links((0,), ()) if node else Links((), tuple(range(1, self.nodes)))

    def degree(self, node: int, round: int) -> int:
        return 0 if node else self.nodes - 1


def audience(speakers: list[Any], rounds: int = 1, **more: Any) -> Together:
    """Node 0 hears `speakers`, which are nodes 1, 2, …"""
    options = {key: getattr(speakers[0], key) for key in ("bits", "range", "threshold", "partners", "few")}
    receiver = Witnessed(**options, inner=more.pop("inner", FullSharing()))
    return Together(DPSGD(rounds), [receiver, *speakers], topology=Audience(), **more)


def witnesses(count: int, **options: Any) -> list[Any]:
    return [Witnessed(**options) for _ in range(count)]


# One speaker, whom the test asks


class Peers:
    """Nodes 2, 3, … that speak to node 0 as node 1 does, played by the test: it knows their keys."""

    def __init__(self, count: int = 4, **options: Any) -> None:
        self.fake = FakeRuntime()
        self.sharing = Secure(**options)
        self.model = np.linspace(-3, 3, 16, dtype=np.float32)
        self.node = self.fake.node(
            1, nodes=count + 1, params=self.model, sharing=self.sharing, topology=Audience(), receive_timeout=5.0
        )
        self.keys = {peer: Keys(RUN) for peer in range(2, count + 1)}
        weights = dict.fromkeys(range(1, count + 1), 1 / (count + 1))
        sharing = self.sharing
        self.gathering = Gathering(0, 0, weights, sharing.partners, sharing.threshold, self.node.seed)

    def speak(self, without: Collection[int] = (), rounds: int = 1, pause: float = 0.0) -> Peers:
        """Node 1 speaks in each round; those `without` do not tell it a key."""
        for peer, keys in self.keys.items():
            if peer not in without:
                self.fake.deliver(self.message(peer, "secure-key", **{"secure-key": np.frombuffer(keys.public, "u1")}))

        async def main() -> None:
            self.node.background(self.sharing.serve_peers(self.node))
            for round in range(rounds):
                await self.node.send([0], self.sharing.outgoing(self.model, round), round=round)
                await self.node.sleep(pause)
            await self.node.sleep(100.0)

        self.fake.run(main())
        for keys in self.keys.values():
            keys.agree(1, self.sharing._exchange.keys(self.node).public)
        return self

    def message(self, sender: int, kind: str, round: int = 0, **arrays: Any) -> Message:
        return Message(sender, kind, round, Payload(arrays))

    def statement(self, round: int = 0) -> Statement:
        said = [m.payload for to, m in self.fake.sent if m.kind == "model" and m.round == round]
        return Statement.read(said[0], len(self.gathering.partners[1]))

    def answers(self, kind: str = "secure-opened") -> list[Payload]:
        return [message.payload for to, message in self.fake.sent if message.kind == kind]

    def refusals(self) -> list[str]:
        return [r.detail for r in self.fake.records if isinstance(r, Event) and r.what == "payload rejected"]

    def asks(self, *speakers: int, at: float = 50.0, sender: int = 0, round: int = 0) -> Peers:
        self.fake.deliver(self.message(sender, "secure-open", round, speakers=naming(speakers)), at=at)
        return self

    def asks_help(self, of: Any, shares: list[bytes], at: float = 60.0) -> Peers:
        self.fake.deliver(self.message(0, "secure-help", of=naming(of), shares=rows(shares)), at=at)
        return self
