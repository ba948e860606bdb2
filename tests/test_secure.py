"""Secure aggregation: sums of neighbours' models are exact, whoever dies and whoever lies, and no model shows."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.el_local import ELLocal
from shoal.algorithms.fedavg import FedAvg
from shoal.engines.simulation.kernel import park
from shoal.environment.network.links import Uniform
from shoal.errors import PrivacyError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.full import FullSharing
from shoal.sharing.random import Random
from shoal.sharing.secure import shamir
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.key_exchange import Exchange
from shoal.sharing.secure.masks import Keys, commitment
from shoal.sharing.secure.messages import Gathering, naming, rows
from shoal.sharing.secure.responder import Answers
from shoal.sharing.secure.secure import Secure
from shoal.sharing.sharing import NodeInfo
from shoal.sharing.topk import TopK
from shoal.topologies.static import Full as FullGraph
from test_privacy_parts import unevenness
from together import RUN, Drawn, Peers, Together, Witnessed, audience, witnesses

# Sums are exact


@st.composite
def worlds(draw: Any) -> tuple[Together, dict[int, int], Any]:
    nodes = draw(st.integers(3, 8))
    options = {
        "bits": draw(st.sampled_from([32, 64])),
        "range": draw(st.sampled_from([16.0, 100.0])),
        "threshold": draw(st.sampled_from([0.1, 0.5, 0.75, 1.0])),
        "partners": draw(st.sampled_from([2, 4, 6])),
        "few": draw(st.sampled_from(["plain", "refuse"])),
    }
    algorithm = draw(st.sampled_from([DPSGD(3), DPSGD(3, overlap=True), FedAvg(3, 0.7), ELLocal(3, 2)]))
    network = draw(st.sampled_from([None, Uniform(0.1), Uniform(0.1, upload=0.01, jitter=0.05)]))
    topology = Drawn(draw(st.floats(0.3, 1.0)), draw(st.booleans()))
    dying = draw(st.dictionaries(st.integers(0, nodes - 1), st.integers(0, 30), max_size=2))
    inners = [FullSharing, lambda: Random(0.5)]
    if not hasattr(algorithm, "serve"):
        inners += [lambda: TopK(0.5)]
    inner = draw(st.sampled_from(inners))
    sharings = [Witnessed(**options, inner=inner()) for _ in range(nodes + hasattr(algorithm, "serve"))]
    seed = draw(st.integers(0, 2**32))
    world = Together(algorithm, sharings, topology=topology, network=network, size=512, seed=seed)
    for node, after in dying.items():
        world.dies(node, after)
    return world, dying, algorithm


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds())
def test_whatever_the_graph_the_weights_and_who_dies_when_sums_are_exact_and_words_look_random(drawn: Any) -> None:
    world, dying, algorithm = drawn
    world.run()  # and so nobody waits in vain
    world.check_sums()
    for receiver, sharing in enumerate(world.sharings):
        if receiver in dying or (receiver == world.learners) != hasattr(algorithm, "serve"):
            continue
        for round, heard in sharing.heard.items():
            company = sharing.companies[round]
            gathering = Gathering(receiver, round, company, sharing.partners, sharing.threshold, world.nodes[0].seed)
            assert gathering.masked or sharing.few == "plain" or not heard
            if not gathering.masked:
                continue
            if round in sharing.sums:
                assert len(sharing.sums[round].speakers) >= gathering.quorum
                assert dying or set(sharing.sums[round].speakers) == company.keys()
            else:
                assert dying
                assert any(w == "sum not opened" and d.startswith(f"round {round}:") for w, d in world.events(receiver))
            for speaker, said in heard.items():
                words = said.arrays["words"]
                # The sign and the free bit are alike in all that is not masked: of 256 words or more, that is 100 or
                # more. Of what is masked it is 25 less often than once in 10¹² times.
                assert unevenness((words >> (sharing.bits - 2)).astype(np.int64), 4) < 25
                if round in sharing.sums:
                    assert np.count_nonzero(words == world.expected(receiver, round, [speaker])) <= 2
    # One whose key was under way when it died has masked with somebody who did not know it: its words do not fit.
    assert dying or not any(node.rejected for node in world.nodes)


@pytest.mark.parametrize(("nodes", "threshold"), [(5, 0.5), (6, 0.75)])
def test_one_that_dies_at_any_moment_takes_nothing_with_it_but_its_own_words(nodes: int, threshold: float) -> None:
    helped = spoken = 0
    mortal, others = nodes - 1, set(range(nodes - 1))
    for after in itertools.count():
        world = Together(DPSGD(2), witnesses(nodes, threshold=threshold), topology=FullGraph()).dies(mortal, after)
        world.run()
        world.check_sums()
        for node in others:
            sums = world.sharings[node].sums
            assert set(sums) == {0, 1}
            assert all(others <= {*found.speakers, node} for found in sums.values())
            spoken += mortal in sums[1].speakers
        helped += any(message.kind == "secure-help" for _, message in world.sent)
        if not world.world.runtimes[mortal].failed:
            break
    assert after > 20  # messages: keys, words, what takes off masks, farewells
    assert helped > 5
    assert spoken > 20


@pytest.mark.parametrize("dead", [(3, 4), (1, 4), (1, 2)])
def test_two_that_die_after_their_words_are_in_the_sum_all_the_same(dead: tuple[int, int]) -> None:
    world = audience(witnesses(5))
    for node in dead:
        world.dies(node, after=5)  # four keys and the words; it is about to take off its masks
    world.run()
    assert world.sharings[0].sums[0].speakers == (1, 2, 3, 4, 5)
    assert world.check_sums() == 1


def test_with_fewer_than_the_threshold_the_model_stays_and_the_node_says_so() -> None:
    world = audience(witnesses(4, threshold=0.75), models=lambda node: np.full(32, node + 1.0))
    world.dies(3, after=3).dies(4, after=3).run()
    assert world.events(0) == [
        ("sum not opened", "round 0: 2 of 4 are in the sum, and it takes 4; the model stays as it is")
    ]
    assert (world.nodes[0].params == 1.0).all()
    assert not any(message.kind == "secure-open" for _, message in world.sent)


def test_when_too_few_are_left_to_recover_what_the_dead_would_have_said_the_model_stays() -> None:
    world = audience(witnesses(4, threshold=0.6), models=lambda node: np.full(32, node + 1.0))
    for node in (2, 3, 4):
        world.dies(node, after=4)
    world.run()
    (_, why) = world.events(0)[0]
    assert why == (
        "round 0: node 2 did not take off its masks, and of the shares of its secrets 1 came, not 2; "
        "the model stays as it is"
    )
    assert (world.nodes[0].params == 1.0).all()


def test_on_a_ring_those_beside_a_dead_node_keep_their_models_and_nobody_waits_for_ever() -> None:
    world = Together(DPSGD(3), witnesses(5)).dies(2, after=2)  # it has told both others its key
    world.run()
    for node in (1, 3):
        assert [what for what, _ in world.events(node)] == ["sum not opened"] * 3
    assert set(world.sharings[0].sums) == set(world.sharings[4].sums) == {0, 1, 2}
    world.check_sums()


def test_keys_are_exchanged_with_those_that_are_met_late() -> None:
    """In a graph that changes, long after the first keys were told."""
    world = Together(ELLocal(25, 2), witnesses(30)).run()
    late = [message.sender for _, message in world.sent[len(world.sent) // 2 :] if message.kind == "secure-key"]
    assert len(late) > 20
    world.check_sums()


def test_who_hangs_before_telling_its_key_delays_the_others_once() -> None:
    world = Together(FedAvg(4), witnesses(5), receive_timeout=5.0)

    async def hang(params: Any, steps: int | None = None) -> Any:
        world.world.runtimes[3].hang()
        await park()

    world.nodes[3].train = hang  # type: ignore[method-assign]
    world.run()
    assert world.events(0)[0] == ("no key", "gave up waiting for that of node 3: this node does not mask with it")
    server = world.sharings[4]
    assert [server.sums[r].speakers for r in (1, 2, 3)] == [(0, 1, 2)] * 3
    world.check_sums()


def test_a_key_that_is_lost_is_asked_for_again_and_nobody_is_left_out_for_it_for_long() -> None:
    world = Together(DPSGD(6), witnesses(6), topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0)
    lost = iter([True])
    world.withhold(1, lambda to, message: message.kind == "secure-key" and to == 4 and next(lost, False)).run()
    again = [(m.sender, to) for to, m in world.sent if m.kind == "secure-key" and "again" in m.payload.fields]
    assert set(again) == {(4, 1)}
    assert len(again) <= 3  # until the answer has come
    for sharing in world.sharings:
        assert [len(sharing.sums[round].speakers) for round in (4, 5)] == [5, 5]
    assert [what for what, _ in world.events(4)].count("no key") == 1
    # It is nobody's fault.
    left_out = ("left out of the sum", "round 0: node 4 and 1 have not masked with each other: a key has not come")
    assert world.events(0)[0] == left_out
    assert {what for what, _ in world.events(0)} == {"left out of the sum"}
    assert not any(node.rejected for node in world.nodes)
    world.check_sums()


def test_two_whose_keys_are_both_lost_find_each_other_later() -> None:
    world = Together(DPSGD(6), witnesses(6), topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0)
    for node, other in ((1, 4), (4, 1)):
        lost = iter([True])
        world.withhold(node, lambda to, m, o=other, lost=lost: m.kind == "secure-key" and to == o and next(lost, False))
    world.run()
    for sharing in world.sharings:
        assert len(sharing.sums[5].speakers) == 5
    world.check_sums()


def test_a_second_key_changes_nothing_and_is_refused_if_it_is_another() -> None:
    peers = Peers()
    for public in (Keys(RUN).public, b"short", peers.keys[2].public):
        said = {"secure-key": np.frombuffer(public, np.uint8)}
        peers.fake.deliver(peers.message(2, "secure-key", **said), at=1.0)
    peers.asks(1, 2, 3, 4).speak(rounds=2, pause=5.0)
    assert peers.refusals() == [
        "from node 2: another key than its first, which counts",
        "from node 2: expected a public key, 32 bytes",
    ]
    assert peers.statement(1).seals[1] == commitment(peers.keys[2].with_peer(1, 0, 1).seed, 0, 1)


# Against plain averaging


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("algorithm", [DPSGD(1), DPSGD(1, overlap=True), ELLocal(1, 3), FedAvg(1)], ids=repr)
def test_models_are_those_of_plain_averaging_up_to_rounding(algorithm: Any, bits: Any) -> None:
    count = 6 + hasattr(algorithm, "serve")
    drawn = np.random.default_rng(3).uniform(-40, 40, (count, 500)).astype(np.float32)
    some = {"topology": FullGraph(), "size": 500, "models": lambda node: drawn[node]}
    plain = Together(algorithm, [FullSharing() for _ in range(count)], **some)
    for node in plain.nodes:
        plain.world.runtimes[node.id].start(plain._live(node))
    plain.world.kernel.run()
    hidden = Together(algorithm, witnesses(count, bits=bits, few="plain"), **some).run()
    for one, other in zip(plain.nodes, hidden.nodes, strict=True):
        assert np.abs(one.params).max() > 10
        # The difference is mostly that of single precision, which plain averaging is done in.
        assert np.abs(one.params - other.params).max() <= 64 * 2.0**-18


def test_after_a_death_the_others_count_as_they_do_in_plain_averaging() -> None:
    drawn = np.random.default_rng(3).uniform(-40, 40, (5, 100)).astype(np.float32)
    world = audience(witnesses(4), size=100, models=lambda node: drawn[node]).dies(2, after=3).run()
    # Node 0 counts 1/5 as each of the four does, so with three of them it is 1/4 each.
    np.testing.assert_allclose(world.nodes[0].params, drawn[[0, 1, 3, 4]].astype(np.float64).mean(0), atol=64 * 2**-18)


# Some coordinates


@pytest.mark.parametrize(
    "inner", [lambda: TopK(0.25), lambda: Random(0.25)],
    ids=["topk", "random"],
)  # fmt: skip
@pytest.mark.parametrize("dying", [None, 3, 9, 14, 20])
def test_of_some_coordinates_all_say_the_same_and_sums_are_exact(inner: Any, dying: int | None) -> None:
    sharings = [Witnessed(inner=inner()) for _ in range(5)]
    world = Together(DPSGD(3), sharings, topology=FullGraph())
    if dying is not None:
        world.dies(4, dying)
    world.run()
    assert world.check_sums() >= 12
    for sharing in sharings[:4]:
        assert {len(positions) for positions in sharing.positions.values()} == {8}
    assert dying is not None or not any(node.rejected for node in world.nodes)


def test_coordinates_that_are_not_said_stay_as_they_are() -> None:
    world = audience(witnesses(3, inner=Random(0.25)), inner=Random(0.25), models=lambda node: np.full(32, node)).run()
    sharing = world.sharings[0]
    said = np.isin(np.arange(32), sharing.positions[0])
    assert np.flatnonzero(world.nodes[0].params).tolist() == np.flatnonzero(said).tolist()
    np.testing.assert_allclose(world.nodes[0].params[said], 1.5, rtol=1e-6)


def changed_at(*places: int) -> Any:
    model = np.zeros(32)
    model[list(places)] = 5.0
    return model


def test_the_coordinates_are_those_that_have_changed_most_at_the_receiver() -> None:
    sharings = [Witnessed(inner=TopK(0.0625)) for _ in range(5)]
    world = Together(DPSGD(1), sharings, topology=FullGraph(), models=lambda node: changed_at(node, 31)).run()
    for node, sharing in enumerate(sharings):
        assert sharing.positions[0].tolist() == [node, 31]
        # Those that it did not name are as its own, also where others have changed; those that it named are averages.
        assert np.flatnonzero(world.nodes[node].params).tolist() == [node, 31]
        np.testing.assert_allclose(world.nodes[node].params[[node, 31]], [1.0, 5.0], rtol=1e-6)
        # From now on a change counts from the average.
        assert np.array_equal(sharing._wanted._averaged, world.nodes[node].params)


def test_coordinates_of_a_sum_that_stays_closed_are_named_again() -> None:
    sharings = [Witnessed(inner=TopK(0.0625), threshold=1.0) for _ in range(5)]
    world = Together(DPSGD(2), sharings, topology=FullGraph(), models=lambda node: changed_at(node, 31))
    world.dies(4, after=8).run()  # four keys, and four times its coordinates
    for node, sharing in enumerate(sharings[:4]):
        assert not sharing.sums
        assert not sharing._wanted._averaged.any()
        assert sharing._supports[node].tolist() == [node, 31]


def test_a_receiver_that_names_no_coordinates_in_time_is_not_spoken_to_in_that_round() -> None:
    sharings = [Witnessed(inner=TopK(0.25)) for _ in range(5)]
    world = Together(DPSGD(3), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0)
    world.withhold(4, lambda to, message: message.kind == "secure-support" and message.round == 1).run()
    assert {round: len(found.speakers) for round, found in sharings[4].sums.items()} == {0: 4, 2: 4}
    for sharing in sharings[:4]:
        assert {round: len(found.speakers) for round, found in sharing.sums.items()} == {0: 4, 1: 4, 2: 4}
    assert world.check_sums() == 14


def test_a_receiver_that_hangs_is_waited_for_less_and_less_often_to_name_its_coordinates() -> None:
    sharings = [Witnessed(inner=TopK(0.25)) for _ in range(6)]
    world = Together(DPSGD(6), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=5.0)
    train, trained = world.nodes[3].train, itertools.count()

    async def hang(params: Any, steps: int | None = None) -> Any:
        if next(trained) == 1:
            world.world.runtimes[3].hang()
            await park()
        return await train(params, steps)

    world.nodes[3].train = hang  # type: ignore[method-assign]
    world.run()
    for node in (0, 1, 2, 4, 5):
        assert {round: len(found.speakers) for round, found in sharings[node].sums.items()} == dict(
            zip(range(6), [5, 4, 4, 4, 4, 4], strict=True)
        )
    # For its words it is waited in each of five rounds, as with any sharing; beside that in three of them for its
    # coordinates, and five times as long at the end for its goodbye.
    assert 13 * 5.0 < world.world.kernel.now < 15 * 5.0
    world.check_sums()


@pytest.mark.parametrize("lost", [{1}, {1, 2, 3}])
@pytest.mark.parametrize("to_it", [True, False])
def test_a_node_that_was_cut_off_while_coordinates_were_named_speaks_again(to_it: bool, lost: set[int]) -> None:
    sharings = [Witnessed(inner=TopK(0.25)) for _ in range(6)]
    world = Together(DPSGD(8), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0)
    for node in (0, 1, 2, 3, 5) if to_it else (4,):
        world.withhold(node, lambda to, m: 4 in (to, m.sender) and m.kind == "secure-support" and m.round in lost)
    world.run()
    back = max(lost) + 1
    for node in range(6):
        assert [len(sharings[node].sums[round].speakers) for round in range(back, 8)] == [5] * (8 - back)
    assert world.check_sums() >= 6 * (8 - back)


@pytest.mark.parametrize("arrays", [{}, {"secure-support": np.zeros(3, np.uint8)}, {"secure-support": np.zeros(1)}])
def test_coordinates_that_make_no_sense_are_refused(arrays: Any) -> None:
    class Babbling(Witnessed):
        async def _agree_on_coordinates(self, node: Node, inner: Any, to: Any, round: int) -> Any:
            await node.send(to, Payload(arrays), round=round, kind="secure-support")
            return ()

    sharings = [*(Witnessed(inner=TopK(0.25)) for _ in range(4)), Babbling(inner=TopK(0.25))]
    world = Together(DPSGD(1), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0).run()
    for node in range(4):
        assert world.events(node)[0][0] == "payload rejected"
        assert len(sharings[node].sums[0].speakers) == 3
    assert world.check_sums() == 4


class Lying(Witnessed):
    """Says something else than it should, by the function that it is given."""

    lie: Any = None

    def _words(self, receiver: int, params: Any, round: int) -> Payload:
        said = super()._words(receiver, params, round)
        return said if self.lie is None else self.lie(said, receiver, round)


def lying(lie: Callable[..., Payload], **options: Any) -> Lying:
    sharing = Lying(**options)
    sharing.lie = lie
    return sharing


def altered(**arrays: Any) -> Callable[..., Payload]:
    """Some arrays are replaced, or left out where None is given; a field is set where it is not an array."""

    def lie(said: Payload, receiver: int, round: int) -> Payload:
        made = {**said.arrays, **{k: v(said.arrays[k]) for k, v in arrays.items() if callable(v)}}
        fields = {k: v for k, v in arrays.items() if isinstance(v, bool)}
        return Payload({k: v for k, v in made.items() if arrays.get(k, 0) is not None}, fields)

    return lie


NOT_MASKS = "its masks do not fit those of 1, 3, 4: another key, or another round"


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (altered(words=lambda a: a.astype(np.uint64)), "expected an array 'words' of 32 words of 32 bits"),
        (altered(words=lambda a: a.astype(np.float32)), "expected an array 'words' of 32 words of 32 bits"),
        (altered(words=lambda a: a[:-1]), "expected an array 'words' of 32 words of 32 bits"),
        (altered(words=lambda a: a.reshape(2, 16)), "expected an array 'words' of 32 words of 32 bits"),
        (altered(words=None), "expected an array 'words' of 32 words of 32 bits"),
        (altered(seals=None), "expected 'seals', or the field 'plain' where nothing is masked"),
        (altered(plain=True), "expected 'seals', or the field 'plain' where nothing is masked"),
        (altered(plain=True, seals=None), "its words are not masked"),
        (altered(seals=lambda a: a[:-1]), "expected 4 commitments 'seals', of 16 bytes each"),
        (altered(seals=lambda a: a.astype(np.int8)), "expected 4 commitments 'seals', of 16 bytes each"),
        (altered(seals=lambda a: a[:, 0]), "expected 4 commitments 'seals', of 16 bytes each"),
        (altered(shares=None), "expected 3 sealed shares 'shares', of 80 bytes each"),
        (altered(shares=lambda a: a[:, :-1]), "expected 3 sealed shares 'shares', of 80 bytes each"),
        (altered(shares=lambda a: a.astype(np.uint16)), "expected 3 sealed shares 'shares', of 80 bytes each"),
        (altered(seals=lambda a: a ^ np.uint8(1)), NOT_MASKS),
    ],
)  # fmt: skip
def test_words_that_make_no_sense_are_refused_and_the_others_sum_is_opened(lie: Any, why: str) -> None:
    speakers = [Witnessed(), lying(lie), Witnessed(), Witnessed()]
    world = audience(speakers).run()
    assert world.events(0) == [("payload rejected", f"from node 2: {why}")]
    assert world.nodes[0].rejected == 1
    assert world.sharings[0].sums[0].speakers == (1, 3, 4)
    assert world.check_sums() == 1


def test_words_of_another_round_are_refused() -> None:
    kept: list[Payload] = []

    def replay(said: Payload, receiver: int, round: int) -> Payload:
        kept.append(said)
        return kept[0]

    world = audience([Witnessed(), lying(replay), Witnessed(), Witnessed()], rounds=3).run()
    assert [found.speakers for found in world.sharings[0].sums.values()] == [(1, 2, 3, 4), (1, 3, 4), (1, 3, 4)]
    assert world.events(0) == [("payload rejected", f"from node 2: {NOT_MASKS}")] * 2
    assert world.check_sums() == 3


def test_words_for_another_receiver_are_refused() -> None:
    kept: list[Payload] = []

    def misdirect(said: Payload, receiver: int, round: int) -> Payload:
        kept.append(said)
        return kept[0]  # what node 0 was told, for everybody

    world = Together(DPSGD(1), [*witnesses(4), lying(misdirect)], topology=FullGraph()).run()
    assert world.sharings[0].sums[0].speakers == (1, 2, 3, 4)
    for node in (1, 2, 3):
        assert set(world.sharings[node].sums[0].speakers) == {0, 1, 2, 3} - {node}
    assert world.check_sums() == 5


def test_a_repeated_message_changes_nothing() -> None:
    world = Together(DPSGD(3), witnesses(5), topology=FullGraph())
    for runtime in world.world.runtimes:

        async def twice(to: int, message: Message, send: Any = runtime.send) -> bool:
            await send(to, message)
            return bool(await send(to, message))

        runtime.send = twice  # type: ignore[method-assign]
    world.run()
    assert world.check_sums() == 15
    assert all(len(found.speakers) == 4 for sharing in world.sharings for found in sharing.sums.values())
    assert not any(node.rejected for node in world.nodes)


# Keys


class AnotherKey(Exchange):
    """Tells the others one key, and masks by another."""

    async def meet(self, node: Node, partners: set[int]) -> None:
        await super().meet(node, partners)
        assert self._keys is not None
        told, self._keys = self._keys, Keys(RUN)
        for peer, public in told._publics.items():
            self._keys.agree(peer, public)


class WithKey(Exchange):
    """Tells the others what it is given as its key."""

    def __init__(self, told: Keys | bytes) -> None:
        super().__init__()
        self._keys = Keys(RUN)
        if isinstance(told, Keys):
            self._keys._private, self._keys.public = told._private, told.public
        else:
            self._keys.public = told


def exchanging(exchange: Exchange) -> Witnessed:
    sharing = Witnessed()
    sharing._exchange = exchange
    return sharing


def test_one_that_masks_by_another_key_than_it_told_is_left_out() -> None:
    world = audience([Witnessed(), exchanging(AnotherKey()), Witnessed(), Witnessed()], rounds=2).run()
    assert world.events(0) == [("payload rejected", f"from node 2: {NOT_MASKS}")] * 2
    assert [found.speakers for found in world.sharings[0].sums.values()] == [(1, 3, 4)] * 2
    assert world.check_sums() == 2


def test_of_two_that_do_not_fit_nobody_knows_which_is_wrong_and_the_sum_stays_closed() -> None:
    world = audience([Witnessed(), exchanging(AnotherKey())]).run()
    assert world.events(0)[0] == (
        "payload rejected", "from node 2: its masks do not fit those of 1: another key, or another round",
    )  # fmt: skip
    assert world.events(0)[1][1].startswith("round 0: 1 of 2 are in the sum, and it takes 2")
    assert not world.sharings[0].sums


def test_a_key_that_two_nodes_have_is_nobody_s() -> None:
    twin = Keys(RUN)
    world = audience([Witnessed(), exchanging(WithKey(twin)), exchanging(WithKey(twin)), *witnesses(2)], rounds=2).run()
    for node in (1, 4, 5):
        assert world.events(node) == [
            ("payload rejected", "from node 2: its key is that of node 3: nobody knows whose it is"),
            ("payload rejected", "from node 3: its key is that of node 2; every node must have a key of its own"),
        ]
    assert world.events(2)[0][1] == ("from node 3: its key is this node's own; every node must have a key of its own")
    assert [found.speakers for found in world.sharings[0].sums.values()] == [(1, 4, 5)] * 2
    assert world.check_sums() == 2


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (bytes(32), "its key is not one to agree upon a secret with"),
        (b"short", "expected a public key, 32 bytes"),
    ],
)
def test_a_key_that_is_none_is_refused_and_its_owner_left_out(told: bytes, why: str) -> None:
    world = audience([Witnessed(), exchanging(WithKey(told)), Witnessed(), Witnessed()], rounds=2).run()
    for node in (1, 3, 4):
        ((what, detail),) = world.events(node)
        assert what == "payload rejected"
        assert detail.startswith(f"from node 2: {why}")
    assert [found.speakers for found in world.sharings[0].sums.values()] == [(1, 3, 4)] * 2
    assert world.check_sums() == 2


def test_one_that_nobody_masks_with_is_left_out_and_stays_hidden() -> None:
    class Deaf(WithKey):
        """Refuses all keys, and its own is refused."""

        async def meet(self, node: Node, partners: set[int]) -> None:
            self.refused.update(partners)
            await super().meet(node, partners)

    world = audience([Witnessed(), exchanging(Deaf(bytes(32))), Witnessed(), Witnessed()]).run()
    assert world.events(0) == [("left out of the sum", "round 0: too few mask with 2")]
    assert world.sharings[0].sums[0].speakers == (1, 3, 4)
    assert world.check_sums() == 1
    words, model = world.sharings[0].heard[0][2].arrays["words"], world.sharings[2].models[0]
    assert not np.array_equal(words, FixedPoint(32, 64.0).encode(model, 0.2))


# What is handed out


def test_two_halves_that_have_not_masked_with_each_other_are_not_opened_as_one() -> None:
    """Each half would be a sum of its own, of fewer than a sum takes."""
    speakers = witnesses(6, threshold=0.3)
    for node, sharing in enumerate(speakers, 1):
        sharing._exchange.refused.update({4, 5, 6} if node <= 3 else {1, 2, 3})
    world = audience(speakers).run()
    (closed,) = world.events(0)
    assert closed[0] == "sum not opened"
    assert "some did not mask with others, and parts of the sum would show" in closed[1]
    assert not any(message.kind == "secure-open" for _, message in world.sent)


class LyingAnswers(Answers):
    """Alters what it is asked for, by functions that it is given."""

    def __init__(self, opened: Any = None, helped: Any = None) -> None:
        super().__init__()
        self.lies = opened, helped

    def opened(self, node: Node, keys: Keys, asked: Message) -> Payload:
        said = super().opened(node, keys, asked)
        return said if self.lies[0] is None else self.lies[0](said)

    def helped(self, node: Node, keys: Keys, asked: Message) -> Payload:
        said = super().helped(node, keys, asked)
        return said if self.lies[1] is None else self.lies[1](said)


def answering(opened: Any = None, helped: Any = None, **options: Any) -> Witnessed:
    sharing = Witnessed(**options)
    sharing._answers = LyingAnswers(opened, helped)
    return sharing


def forging(**options: Any) -> Witnessed:
    """Hands out forged shares."""
    return answering(helped=lambda s: Payload({**s.arrays, "shares": s.arrays["shares"] ^ np.uint8(1)}), **options)


DIES_AFTER_WORDS = 4
"""Messages of one of four speakers: three keys, and its words."""


def test_a_forged_share_is_found_and_its_holder_named() -> None:
    world = audience([forging(), *witnesses(3)]).dies(4, DIES_AFTER_WORDS).run()
    assert world.events(0) == [("payload rejected", "from node 1: a forged share of a secret of node 4")]
    assert world.sharings[0].sums[0].speakers == (1, 2, 3, 4)
    assert world.check_sums() == 1


def test_nobody_is_asked_for_shares_of_one_that_it_has_not_masked_with() -> None:
    speakers = witnesses(6, threshold=0.6)
    speakers[0]._exchange.refused.add(5)
    speakers[4]._exchange.refused.add(1)
    world = audience(speakers).dies(5, after=6).dies(6, after=6).run()
    asked = {to: m.payload.arrays["of"].tolist() for to, m in world.sent if m.kind == "secure-help"}
    assert asked == {1: [6], 2: [5, 6], 3: [5, 6], 4: [5, 6]}
    assert not any(node.rejected for node in world.nodes)
    assert world.sharings[0].sums[0].speakers == (1, 2, 3, 4, 5, 6)
    assert world.check_sums() == 1


def test_more_forged_shares_than_can_be_told_keep_the_sum_closed() -> None:
    world = audience([forging(), forging(), *witnesses(2)]).dies(4, DIES_AFTER_WORDS).run()
    assert world.events(0) == [
        ("sum not opened", "round 0: node 4 did not take off its masks, and the shares of its secrets do not fit "
         "together: one is forged; the model stays as it is")
    ]  # fmt: skip
    assert not world.sharings[0].sums


def test_a_forged_share_among_many_is_found_without_trying_all_that_could_be_true() -> None:
    speakers = [forging(partners=24), *witnesses(23, partners=24)]
    world = audience(speakers, size=4).dies(24, after=24)
    with mock.patch.object(shamir, "combine", wraps=shamir.combine) as combine:
        world.run()
    assert world.events(0) == [("payload rejected", "from node 1: a forged share of a secret of node 24")]
    assert world.check_sums() == 1
    assert combine.call_count < 50


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda said: Payload({"of": said.arrays["of"]}), "expected an array 'shares' of rows of 16 bytes"),
        (lambda said: Payload({**said.arrays, "shares": said.arrays["shares"][:0]}),
         "expected 1 shares of what node 4 said"),
        (lambda said: Payload({**said.arrays, "of": naming([3])}),
         "it was not asked for its shares of what node 3 said"),
        (lambda said: Payload({"shares": said.arrays["shares"]}), "expected an array 'of' of increasing numbers"),
        (lambda said: Payload({}), "expected an array 'shares' of rows of 16 bytes"),
    ],
)  # fmt: skip
def test_help_that_makes_no_sense_is_refused_and_that_of_others_suffices(lie: Any, why: str) -> None:
    world = audience([answering(helped=lie), *witnesses(3)]).dies(4, DIES_AFTER_WORDS).run()
    ((what, detail),) = world.events(0)
    assert what == "payload rejected"
    assert detail.startswith(f"from node 1: {why}")
    assert world.sharings[0].sums[0].speakers == (1, 2, 3, 4)
    assert world.check_sums() == 1


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda said: Payload({**said.arrays, "own": said.arrays["own"] ^ np.uint8(1)}),
         "a seed is not the one that it committed itself to (with node 2)"),
        (lambda said: Payload({**said.arrays, "pairs": rows([bytes(16)])}), "expected its own seed and 0 others"),
        (lambda said: Payload({**said.arrays, "own": rows([])}), "expected its own seed and 0 others"),
        (lambda said: Payload({**said.arrays, "own": said.arrays["own"][0]}), "expected an array 'own' of rows"),
        (lambda said: Payload({}), "expected an array 'own' of rows of 16 bytes"),
        (lambda said: Payload({}, {"refused": 7}), "expected an array 'own' of rows of 16 bytes"),
    ],
)  # fmt: skip
def test_one_that_hands_out_wrong_seeds_is_refused_and_the_shares_of_others_give_the_right_ones(
    lie: Any, why: str
) -> None:
    world = audience([Witnessed(), answering(opened=lie), *witnesses(2)]).run()
    ((what, detail),) = world.events(0)
    assert what == "payload rejected"
    assert detail.startswith(f"from node 2: {why}")
    assert world.sharings[0].sums[0].speakers == (1, 2, 3, 4)
    assert world.check_sums() == 1


def test_wrong_seeds_of_an_absent_one_are_found_too() -> None:
    misleading = answering(lambda said: Payload({**said.arrays, "pairs": said.arrays["pairs"] ^ np.uint8(1)}))
    world = audience([Witnessed(), misleading, *witnesses(2)]).dies(4, after=3).run()  # when all have its key
    assert ("payload rejected", "from node 2: a seed is not the one that it committed itself to (with node 4)") in (
        world.events(0)
    )
    assert world.sharings[0].sums[0].speakers == (1, 2, 3)
    assert world.check_sums() == 1


def test_one_that_does_not_take_off_its_masks_keeps_the_sum_closed() -> None:
    unwilling = answering(lambda _: Payload({}, {"refused": "I would rather not" + 1000 * "!"}))
    world = audience([unwilling, *witnesses(3)]).run()
    assert world.events(0)[0][1] == (
        "round 0: node 1 does not take off its masks: I would rather not" + 182 * "!" + "; the model stays as it is"
    )


def test_shares_that_were_tampered_with_do_not_recover_anything() -> None:
    garbled = lying(altered(shares=lambda a: a ^ np.uint8(1)))
    world = audience([*witnesses(3), garbled], models=lambda node: np.full(32, node)).dies(4, DIES_AFTER_WORDS)
    world.run()
    for node in (1, 2, 3):
        assert world.events(node) == [
            ("payload rejected", "from node 0: not what the other has sealed: tampered with, or under another key")
        ]
    assert world.events(0)[0][1].startswith("round 0: node 4 did not take off its masks, and of the shares of")
    assert not world.nodes[0].params.any()


# What a node does not do


def test_a_model_outside_the_range_ends_its_node_before_anything_is_sent() -> None:
    world = audience(witnesses(3, range=2.0), models=lambda node: np.full(32, 2.5 if node == 2 else 1.0))
    with pytest.raises(
        PrivacyError, match=r"node 2, round 0: a parameter is 2.5, expected within ±2: it would garble the sum; set a"
    ):
        world.run()
    assert not any(message.sender == 2 for _, message in world.sent)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_model_that_is_not_finite_ends_its_node(value: float) -> None:
    sharing = Secure()
    sharing.bind(NodeInfo(4, 5, 0, ((2,),)))
    with pytest.raises(PrivacyError, match=r"node 4, round 7: a parameter is -?(nan|inf), expected a finite number"):
        sharing.outgoing(np.array([0.0, value], np.float32), 7)


def test_nobody_speaks_twice_to_a_receiver_in_a_round() -> None:
    peers = Peers().speak()
    with pytest.raises(PrivacyError, match="node 1 was to speak to node 0 in round 0 once more: two messages under"):
        peers.sharing.outgoing(peers.model, 0)(0)


def test_a_single_speaker_is_not_heard() -> None:
    world = audience(witnesses(1), rounds=2).run()
    assert world.events(0) == [
        ("hears nobody", f"round {r}: fewer than two speak to this node, so none may") for r in (0, 1)
    ]
    assert world.events(1) == [("not spoken to", f"round {r}: nobody else speaks to 0") for r in (0, 1)]
    assert not world.sent
    with pytest.raises(PrivacyError, match="node 1 was to speak to node 0 unmasked in round 2"):
        world.sharings[1].outgoing(world.nodes[1].params, 2)(0)


def test_a_single_speaker_is_heard_where_the_experiment_says_so() -> None:
    world = audience(witnesses(1, few="plain"), models=lambda node: np.full(32, 2.0 * node)).run()
    assert world.events(1) == [("spoken to unmasked", "round 0: nobody else speaks to 0")]
    assert (world.nodes[0].params == 1.0).all()
    ((_, message),) = world.sent
    assert message.payload.fields == {"plain": True}


def test_masked_words_of_a_single_speaker_are_refused() -> None:
    masked = lying(lambda said, *_: Payload({**said.arrays, "seals": np.zeros((1, 16), np.uint8)}), few="plain")
    world = audience([masked]).run()
    assert world.events(0) == [
        ("payload rejected", "from node 1: its words are masked, and nobody else's are there to cancel that")
    ]


def test_in_a_graph_that_changes_some_rounds_are_without_neighbours() -> None:
    for few in ("refuse", "plain"):
        world = Together(ELLocal(6, 1), witnesses(6, few=few)).run()
        said = Counter(what for node in range(6) for what, _ in world.events(node))
        plain = [m for _, m in world.sent if m.payload.fields.get("plain")]
        assert said[{"refuse": "not spoken to", "plain": "spoken to unmasked"}[few]] > 5
        assert bool(plain) == (few == "plain")
        assert world.check_sums() > 5


def test_no_statement_is_left_over_and_farewells_go_to_those_who_wait() -> None:
    world = Together(DPSGD(3), witnesses(5), topology=FullGraph()).run()
    assert Counter(m.kind for _, m in world.sent) == {
        "secure-key": 20, "model": 60, "secure-open": 60, "secure-opened": 60, "secure-bye": 20
    }  # fmt: skip
    for runtime in world.world.runtimes:
        assert not runtime.mailbox._unclaimed
    for sharing in world.sharings:
        assert all(list(kept) == [2] for kept in sharing._answers._said.values())  # of the last round alone


def test_what_is_kept_over_a_checkpoint_is_what_the_next_coordinates_follow_from() -> None:
    assert Secure().state() == {}
    Secure().restore({})
    one, other = Secure(inner=TopK(0.5)), Secure(inner=TopK(0.5))
    for sharing in (one, other):
        sharing.bind(NodeInfo(0, 3, 0, ((4,),)))
        sharing.start(np.zeros(4, np.float32))
    model = np.array([1, 2, 3, 4], np.float32)
    assert one._wanted is not None
    assert other._wanted is not None
    one._wanted.hear(model, one._wanted.name(model, 0), np.array([1.0, 2.0]), speakers=2)
    other.restore(one.state())
    assert one._wanted.name(model, 1).tolist() == other._wanted.name(model, 1).tolist() == [0, 1]
