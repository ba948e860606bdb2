"""Secure aggregation: the models that colluders and eavesdroppers read, as `benchmarks/attacks.py` computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from secure_world import one_receiver, recording_sharings
from shoal.plugins import load
from shoal.sharing.secure import masks
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.messages import ProtocolRound, describe_content

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "attacks.py"
AttackedRun, attack, determined, known_sums = (
    load(f"{SCRIPT}:{name}") for name in ("AttackedRun", "attack", "determined", "known_sums")
)


def sets(*members: str) -> list[frozenset[int]]:
    return [frozenset(map(int, one)) for one in members]


# What can be computed from sums


@pytest.mark.parametrize(
    ("sums", "read"),
    [
        (sets("123"), ""),
        (sets("123", "123"), ""),
        (sets("123", "12"), "3"),
        (sets("123", "12", "1"), "123"),
        (sets("12", "23", "13"), "123"),  # the sum of the first and the last minus the other is twice node 1
        (sets("12", "23", "34", "14"), ""),  # a circle of four: of even length
        (sets("12", "34", "1234"), ""),
        (sets("12", "34", "124"), "34"),
    ],
)
def test_models_are_read_if_the_sums_determine_them(sums: Any, read: str) -> None:
    assert determined(sums) == frozenset(map(int, read))


def protocol_round(senders: int, threshold: float, partners: int = 8) -> ProtocolRound:
    return ProtocolRound(0, 0, range(1, senders + 1), partners, threshold, seed=3)


def on_circle(protocol_round: ProtocolRound) -> list[int]:
    """Return the senders in their order: neighbours on the circle have more common partners than others."""
    partners = {node: set(others) for node, others in protocol_round.partners.items()}
    order = [1]
    while len(order) < len(partners):
        near = [node for node in partners[order[-1]] if node not in order]
        order.append(max(near, key=lambda node: len(partners[node] & partners[order[-1]])))
    return order


@pytest.mark.parametrize(
    ("colluders", "threshold", "expected"),
    [
        ({1, 2}, 0.5, []),  # no receiver among them
        ({0}, 0.5, sets("12345")),
        ({0, 1}, 0.5, sets("2345")),
        ({0, 1, 2}, 0.5, sets("3", "4", "5")),  # two shares reconstruct the secrets of each
        ({0, 1, 2}, 0.75, sets("345")),
        ({0, 1, 2, 3}, 0.75, sets("4", "5")),
        ({0, 1, 2, 3}, 1.0, sets("45")),
    ],
)
def test_colluders_know_the_sum_of_the_others_or_their_models(colluders: Any, threshold: float, expected: Any) -> None:
    assert sorted(known_sums(protocol_round(5, threshold), colluders), key=sorted) == expected


def test_on_a_circle_colluders_on_both_sides_know_the_sum_of_the_nodes_between_them() -> None:
    one = protocol_round(8, 1.0, partners=2)
    order = on_circle(one)
    expected = {frozenset(order[1:4]), frozenset(order[5:])}
    assert set(known_sums(one, {0, order[0], order[4]})) == expected


@pytest.mark.parametrize(
    ("threshold", "places", "own_partners"),
    [(0.5, (1, 2, 5, 6, 13, 15, 16), 3), (0.75, (1, 2, 3, 5, 6, 7, 14, 15, 16, 17), 5)],
)
def test_on_a_circle_partners_of_its_partners_can_reveal_a_model(
    threshold: float, places: tuple[int, ...], own_partners: int
) -> None:
    """The example in docs/privacy.md: too few of the node's own partners collude to reconstruct its secrets."""
    one = protocol_round(20, threshold)
    order = on_circle(one)
    colluders = {order[place] for place in places}
    assert len(colluders & set(one.partners[order[0]])) == own_partners < one.shares_needed
    assert {order[0]} in known_sums(one, {0, *colluders})
    for node in colluders:
        assert {order[0]} not in known_sums(one, {0, *colluders} - {node})


# The same computed from the messages of runs

SETTINGS: dict[str, Any] = {
    "nodes": 16,
    "seed": 1,
    "model": {"name": "logistic"},
    "training": {"lr": 0.3, "batch_size": 8},
    "evaluation": {"every": 0, "nodes": 1, "average": False, "samples": 10},
    "checkpoint": {"final": False},
    "simulation": {"batching": "off"},
}


@pytest.mark.parametrize(
    ("degree", "partners", "colluders", "read"),
    [
        (5, 8, {7, 11, 12, 13, 14, 15}, {0.5: 8, 0.75: 2, 1.0: 0}),
        (9, 4, {1, 3, 4, 6, 10}, {0.5: 10, 0.75: 2, 1.0: 1}),  # senders on a circle
    ],
)
def test_colluders_read_from_messages_and_their_keys_what_is_computed_and_nothing_else(
    degree: int, partners: int, colluders: set[int], read: dict[float, int]
) -> None:
    for threshold, expected in read.items():
        topology = {"name": "regular", "degree": degree}
        found = attack(
            AttackedRun({**SETTINGS, "topology": topology}, threshold=threshold, partners=partners), colluders
        )
        assert found.errors.keys() == set(range(16)) - colluders
        assert len(found.read) == expected
        assert found.error < 1e-5
        assert found.least_error_of_others > 1e-3


def test_an_eavesdropper_on_plain_links_reads_all_models_if_the_graph_has_an_inverse() -> None:
    found = attack(AttackedRun({**SETTINGS, "topology": {"name": "regular", "degree": 5}}))
    assert found.read == set(range(16))
    assert found.error < 1e-5


def test_an_eavesdropper_reads_no_model_from_the_sums_of_a_ring_whose_length_is_a_multiple_of_four() -> None:
    found = attack(AttackedRun({**SETTINGS, "topology": {"name": "ring"}}))
    assert not found.read
    assert found.least_error_of_others > 1e-3


# Absent nodes on a circle


CONTENT = describe_content(FixedPoint(32, 64.0), dict.fromkeys(range(1, 13), 1 / 13), None)


def test_on_a_circle_absent_nodes_and_few_colluders_reveal_the_sum_of_the_nodes_between_them() -> None:
    """Two colluders, one fewer than can reconstruct a secret, and two absent nodes around two others."""
    senders = recording_sharings(12, partners=4, threshold=0.75)
    one = ProtocolRound(0, 0, range(1, 13), 4, 0.75, seed=0, content=CONTENT)
    assert one.shares_needed == 3
    absent, colluder, first, second, other_colluder, other_absent = on_circle(one)[:6]
    world = one_receiver(senders)
    for node in (absent, other_absent):
        world.fails(node, after=4)  # its four keys
    world.run()
    assert set(world.sharings[0].sums[0].senders) == set(range(1, 13)) - {absent, other_absent}
    updates = {m.sender: m.payload for to, m in world.sent if to == 0 and m.kind == "model"}
    answers = {m.sender: m.payload for to, m in world.sent if to == 0 and m.kind == "secure-opened"}
    total = np.zeros(32, np.uint32)
    for node in (first, second):
        total += updates[node].arrays["words"]
        masks.subtract(total, answers[node].arrays["own"].tobytes())
        (missing,) = {absent, other_absent} & set(one.partners[node])
        seeds = {missing: answers[node].arrays["pairs"].tobytes()}
        for each in (colluder, other_colluder):
            keys = world.sharings[each].key_exchange.keys(world.nodes[each])
            seeds[each] = keys.pair_secrets(node, one.terms).seed
        for partner, seed in seeds.items():
            (masks.subtract if node < partner else masks.add)(total, seed)
    models = [world.sharings[node].models[0] for node in (first, second)]
    assert np.array_equal(total, sum(FixedPoint(32, 64.0).encode(model, 1 / 13) for model in models))
