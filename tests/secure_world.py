"""A simulated world of nodes with secure aggregation, for tests."""

from __future__ import annotations

import dataclasses
import itertools
import math
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
from shoal.node import Node
from shoal.results.records import Event, Record
from shoal.sharing.full import FullSharing
from shoal.sharing.secure import secure
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.masks import Keys, PairSecrets
from shoal.sharing.secure.messages import MaskedUpdate, ProtocolRound, describe_content, to_node_ids, to_rows
from shoal.sharing.secure.secure import Secure
from shoal.sharing.secure.unmasking import UnmaskedSum, Unmasking
from shoal.testing import FakeRuntime
from shoal.topologies.graph import Links, Topology

RUN = "0" * RUN_LENGTH
ONE_MAY_FAIL: dict[str, Any] = {"threshold": 0.5}
"""Options with which a sum of three of four senders is unmasked. With the default, all four are needed."""


# A world of nodes with secure aggregation


@dataclasses.dataclass(frozen=True)
class RandomGraph:
    """A graph with each directed link at some probability, drawn in every round or once."""

    density: float
    static: bool = False

    def build(self, nodes: int, seed: int) -> RandomGraphInstance:
        return RandomGraphInstance(nodes, self.density, self.static, seed)


@dataclasses.dataclass
class RandomGraphInstance:
    nodes: int
    density: float
    static: bool
    seed: int

    def links(self, node: int, round: int) -> Links:
        linked = self._linked(round)
        return Links(tuple(np.flatnonzero(linked[:, node]).tolist()), tuple(np.flatnonzero(linked[node]).tolist()))

    def degree(self, node: int, round: int) -> int:
        return int(self._linked(round)[node].sum())

    def _linked(self, round: int) -> Any:
        rng = np.random.default_rng([self.seed, 0 if self.static else round])
        linked = rng.random((self.nodes, self.nodes)) < self.density
        np.fill_diagonal(linked, False)
        return linked


class RecordingSharing(Secure):
    """Records its models and, as a receiver, its payloads and unmasked sums."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.models: dict[int, Any] = {}
        self.received: dict[int, Mapping[int, Payload]] = {}
        self.weights: dict[int, Mapping[int, float]] = {}
        self.requested: dict[int, Any] = {}
        self.positions: dict[int, Any] = {}
        self.sums: dict[int, UnmaskedSum] = {}

    def outgoing(self, params: Any, round: int) -> Any:
        self.models[round] = np.array(params)
        return super().outgoing(params, round)

    async def before_send(self, node: Node, to: Any, round: int) -> Any:
        receivers = await super().before_send(node, to, round)
        self.requested[round] = self._positions.get(node.id)
        return receivers

    async def after_receive(self, node: Node, received: Any, round: int) -> Any:
        self.received[round] = dict(received)
        self.weights[round] = self._sender_groups.of(node, node.id, round).weights
        opened = await super().after_receive(node, received, round)
        for payload in opened.values():
            self.positions[round] = payload.arrays.get("positions", slice(None))
        return opened


class RecordingUnmasking(Unmasking):
    async def run(self) -> UnmaskedSum:
        found = await super().run()
        self._node.sharing.sums[self._protocol_round.round] = found  # type: ignore[attr-defined]
        return found


class SecureWorld:
    """Nodes of one simulated world that run an algorithm, each with its own sharing."""

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
        """`models` returns the model after training by node; None: a random walk."""
        self.algorithm, self.sharings = algorithm, sharings
        served = hasattr(algorithm, "serve")
        self.training_nodes = len(sharings) - served
        timeline = None if network is None else network.build(len(sharings), seed)
        network_model = None if timeline is None else NetworkModel(timeline.initial_state, len(sharings), seed)
        self.world = World(len(sharings), network_model, training_node_count=self.training_nodes)
        self.sent: list[tuple[int, Message]] = []
        self.nodes: list[Node] = []
        self.records: list[list[Record]] = []
        for id, sharing in enumerate(sharings):
            fake, drift = FakeRuntime(), np.random.default_rng([seed, id])

            def train(params: Any, id: int = id, drift: Any = drift) -> Any:
                return models(id) if models is not None else params + drift.normal(size=params.size)

            node = fake.node(
                id,
                nodes=self.training_nodes,
                params=np.zeros(size, np.float32),
                train=train,
                sharing=sharing,
                topology=topology,
                seed=seed,
                receive_timeout=receive_timeout,
                services={"algorithm": self.training_nodes} if served else None,
            )
            node.runtime = runtime = self.world.runtimes[id]
            self.nodes.append(node)
            self.records.append(fake.records)
            self._record(runtime)

    def fails(self, node: int, after: int) -> SecureWorld:
        """Let `node` fail when it sends the message after the first `after` ones."""
        runtime = self.world.runtimes[node]
        send, left = runtime.send, itertools.count(after, -1)

        async def until_failure(to: int, message: Message) -> bool:
            if next(left) == 0:
                self.world.kernel.soon(runtime.crash)
                await park()
            return await send(to, message)

        runtime.send = until_failure  # type: ignore[method-assign]
        return self

    def withhold(self, node: int, which: Callable[[int, Message], bool]) -> SecureWorld:
        """Drop the messages from `node` that `which` selects."""
        runtime = self.world.runtimes[node]
        send = runtime.send

        async def some(to: int, message: Message) -> bool:
            return True if which(to, message) else bool(await send(to, message))

        runtime.send = some  # type: ignore[method-assign]
        return self

    def run(self) -> SecureWorld:
        for node in self.nodes:
            self.world.runtimes[node.id].start(self.life(node))
        with mock.patch.object(secure, "Unmasking", RecordingUnmasking):
            self.world.kernel.run()
        self.world.raise_if_deadlocked()
        return self

    def events(self, node: int) -> list[tuple[str, str]]:
        return [(record.what, record.detail) for record in self.records[node] if isinstance(record, Event)]

    def expected(self, receiver: int, round: int, senders: Collection[int]) -> Any:
        """Return the sum of the encoded models of `senders`, without masks."""
        sharing = self.sharings[receiver]
        ring = FixedPoint(sharing.bits, sharing.range)
        weights, positions = sharing.weights[round], sharing.positions[round]
        models = {sender: self.sharings[sender].models[round][positions] for sender in senders}
        return sum(ring.encode(model, weights[sender]) for sender, model in models.items())

    def check_sums(self) -> int:
        """Check that all unmasked sums are exact, and return their number."""
        opened = 0
        for receiver, sharing in enumerate(self.sharings):
            for round, found in sharing.sums.items():
                assert np.array_equal(found.values, self.expected(receiver, round, found.senders)), (receiver, round)
                opened += 1
        return opened

    def _record(self, runtime: Any) -> None:
        send = runtime.send

        async def recorded(to: int, message: Message) -> bool:
            self.sent.append((to, message))
            return bool(await send(to, message))

        runtime.send = recorded

    async def life(self, node: Node) -> None:
        life = self.algorithm.serve(node) if node.id == self.training_nodes else self.algorithm.run(node)
        sharing = node.interactive_sharing
        await (life if sharing is None else run_interactively(life, node, sharing))


# One receiver for all others


@dataclasses.dataclass(frozen=True)
class InwardStar:
    """All nodes send to node 0, and to no other node."""

    def build(self, nodes: int, seed: int) -> InwardStarGraph:
        return InwardStarGraph(nodes)


@dataclasses.dataclass
class InwardStarGraph:
    nodes: int
    static = True

    def links(self, node: int, round: int) -> Links:
        return Links((0,), ()) if node else Links((), tuple(range(1, self.nodes)))

    def degree(self, node: int, round: int) -> int:
        return 0 if node else self.nodes - 1


def one_receiver(senders: list[Any], rounds: int = 1, **more: Any) -> SecureWorld:
    """Return a world in which node 0 receives from `senders`, which are nodes 1, 2, …"""
    options = {key: getattr(senders[0], key) for key in ("bits", "range", "threshold", "partners", "single_sender")}
    receiver = RecordingSharing(**options, inner=more.pop("inner", FullSharing()))
    return SecureWorld(DPSGD(rounds), [receiver, *senders], topology=InwardStar(), **more)


def recording_sharings(count: int, **options: Any) -> list[Any]:
    return [RecordingSharing(**options) for _ in range(count)]


# One sender that the test sends requests to


class PlayedPeers:
    """Node 1 sends to node 0. The test plays nodes 2, 3, …, which do the same, and knows their keys."""

    def __init__(self, count: int = 4, **options: Any) -> None:
        self.fake = FakeRuntime()
        self.sharing = Secure(**options)
        self.model = np.linspace(-3, 3, 16, dtype=np.float32)
        self.node = self.fake.node(
            1, nodes=count + 1, params=self.model, sharing=self.sharing, topology=InwardStar(), receive_timeout=5.0
        )
        self.keys = {peer: Keys(RUN) for peer in range(2, count + 1)}
        weights = dict.fromkeys(range(1, count + 1), 1 / (count + 1))
        sharing = self.sharing
        content = describe_content(FixedPoint(sharing.bits, sharing.range), weights, None)
        self.protocol_round = ProtocolRound(0, 0, weights, sharing.partners, sharing.threshold, self.node.seed, content)

    def secrets(self, peer: int, round: int = 0) -> PairSecrets:
        """The secrets that `peer` shares with node 1."""
        return self.keys[peer].pair_secrets(1, dataclasses.replace(self.protocol_round, round=round).terms)

    def send(self, without: Collection[int] = (), rounds: int = 1, pause: float = 0.0) -> PlayedPeers:
        """Let node 1 send in each round; nodes in `without` do not send it a key."""
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
            keys.agree(1, self.sharing.key_exchange.keys(self.node).public)
        return self

    def message(self, sender: int, kind: str, round: int = 0, **arrays: Any) -> Message:
        return Message(sender, kind, round, Payload(arrays))

    def update(self, round: int = 0) -> MaskedUpdate:
        payload = [m.payload for to, m in self.fake.sent if m.kind == "model" and m.round == round]
        return MaskedUpdate.from_payload(payload[0], len(self.protocol_round.partners[1]))

    def answers(self, kind: str = "secure-opened") -> list[Payload]:
        return [message.payload for to, message in self.fake.sent if message.kind == kind]

    def rejections(self) -> list[str]:
        return [r.detail for r in self.fake.records if isinstance(r, Event) and r.what == "payload rejected"]

    def ask_to_unmask(self, *senders: int, at: float = 50.0, sender: int = 0, round: int = 0) -> PlayedPeers:
        self.fake.deliver(self.message(sender, "secure-open", round, speakers=to_node_ids(senders)), at=at)
        return self

    def ask_for_shares(self, of: Any, shares: list[bytes], at: float = 60.0) -> PlayedPeers:
        self.fake.deliver(self.message(0, "secure-help", of=to_node_ids(of), shares=to_rows(shares)), at=at)
        return self


class LyingSharing(RecordingSharing):
    """Changes its payloads with the function `lie`."""

    lie: Any = None

    def outgoing(self, params: Any, round: int) -> Callable[[int], Payload]:
        update = super().outgoing(params, round)
        return lambda receiver: self.lie(update(receiver), receiver, round)


def lying(lie: Callable[..., Payload], **options: Any) -> LyingSharing:
    sharing = LyingSharing(**options)
    sharing.lie = lie
    return sharing


def altered(**arrays: Any) -> Callable[..., Payload]:
    """Return a function that replaces arrays, removes those given as None, and sets fields given as booleans."""

    def lie(payload: Payload, receiver: int, round: int) -> Payload:
        made = {**payload.arrays, **{k: v(payload.arrays[k]) for k, v in arrays.items() if callable(v)}}
        fields = {k: v for k, v in arrays.items() if isinstance(v, bool)}
        return Payload({k: v for k, v in made.items() if arrays.get(k, 0) is not None}, fields)

    return lie


NOT_MASKS = "its masks do not match those of 1, 3, 4: another key, or another round"


# Statistics


def unevenness(symbols: Any, kinds: int) -> float:
    """Return how many standard deviations chi-square is above its mean for equally likely symbols.

    Chance gives 8 or more less often than once in 10⁹ times.
    """
    counts = np.bincount(symbols, minlength=kinds)
    expected = counts.sum() / kinds
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float((chi_square - (kinds - 1)) / math.sqrt(2 * (kinds - 1)))
