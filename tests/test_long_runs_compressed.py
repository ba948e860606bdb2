"""Rounding over thousands of rounds with compressed sharings: no drift from the same recursion in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from oracle import play
from quadratics import NODES, ROUNDS, START, TOLERANCE, VALUES, Case, ring, steps, train
from shoal.algorithms.dpsgd import DPSGD
from shoal.compression.compressors import RandomCompressor, TopKCompressor, random_positions
from shoal.compression.sparse import kept_count
from shoal.randomness import derived_seed, generator
from shoal.sharing.choco import CHOCO
from shoal.sharing.deepsqueeze import DeepSqueeze
from shoal.sharing.powergossip import PowerGossip
from shoal.sharing.random import Random
from shoal.topologies.static import Ring

FIRST = START.astype(np.float64)
RANDOM = RandomCompressor(0.5)
"""Its coordinates do not depend on the values. Those of top-k do: a rounding error selects others."""
SHAPES = ((2, 2), (2,))
"""With rank 2, PowerGossip averages this matrix in all directions. With a smaller rank, its directions depend on the
values as well: a difference of 4e-9 to the oracle after 5 rounds becomes 1e-2 after 100."""


def mask(purpose: str, round: int) -> Any:
    """Row i: 1 for the coordinates that node i sends in this round."""
    sent = np.zeros((NODES, VALUES))
    for node in range(NODES):
        _, part = RANDOM.compress(np.ones(VALUES, np.float32), generator(0, purpose, node, round))
        sent[node, part.positions] = 1
    return sent


def choco(gamma: float, rounds: int) -> Iterator[Any]:
    w, x, copies = ring(), FIRST, np.zeros((NODES, VALUES))
    for r in range(rounds):
        yield x
        half = x + steps(x)
        copies = copies + mask("choco", r) * (half - copies)
        x = half + gamma * (w @ copies - copies)
    yield x


def deepsqueeze(gamma: float, rounds: int) -> Iterator[Any]:
    w, x, error = ring(), FIRST, np.zeros((NODES, VALUES))
    for r in range(rounds):
        yield x
        half = x + steps(x)
        compressed = mask("deepsqueeze", r) * (half + error)
        error = half + error - compressed
        x = half + gamma * (w @ compressed - compressed)
    yield x


def averaging(rounds: int) -> Iterator[Any]:
    w, x = ring(), FIRST
    for _ in range(rounds):
        yield x
        x = w @ (x + steps(x))
    yield x


def random_sharing(fraction: float, rounds: int) -> Iterator[Any]:
    """All nodes average the same coordinates."""
    w, x, count = ring(), FIRST, kept_count(VALUES, fraction)
    for r in range(rounds):
        yield x
        half = x + steps(x)
        shared = random_positions(derived_seed(0, "random sharing", r), VALUES, count)
        x = half.copy()
        x[:, shared] = w @ half[:, shared]
    yield x


def _case(sharing: Callable[[], Any], oracle: Callable[[int], Iterator[Any]]) -> Case:
    return Case(DPSGD(), Ring(), oracle, settings={"sharing": sharing, "shapes": SHAPES})


CASES: dict[str, Case] = {
    "random": _case(lambda: Random(0.5), partial(random_sharing, 0.5)),
    "choco": _case(lambda: CHOCO(0.2, RANDOM), partial(choco, 0.2)),
    "deepsqueeze": _case(lambda: DeepSqueeze(0.02, RANDOM), partial(deepsqueeze, 0.02)),
    "powergossip, full rank": _case(lambda: PowerGossip(rank=2), averaging),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_models_follow_the_recursion_in_double_precision(case: Case) -> None:
    found = case.errors()
    assert max(found.values()) < case.tolerance, found


@pytest.mark.parametrize(
    "sharing",
    [
        lambda: CHOCO(0.2, TopKCompressor(0.25)),
        DeepSqueeze,
        PowerGossip,
    ],
    ids=["choco, top-k", "deepsqueeze, int8", "powergossip, rank 1"],
)
def test_sharings_that_select_by_value_move_the_mean_by_the_mean_of_all_steps(
    sharing: Callable[[], Any],
) -> None:
    total = np.zeros((NODES, VALUES))

    def counted(node: int, params: Any) -> Any:
        trained = train(node, params)
        total[node] += trained.astype(np.float64) - params
        return trained

    nodes = play(DPSGD(ROUNDS), START, Ring(), counted, sharing=sharing, shapes=SHAPES)
    models = np.stack([node.params for node in nodes])
    assert np.abs(total).max() > 1
    np.testing.assert_allclose(models.mean(0, np.float64), total.mean(0), atol=TOLERANCE, rtol=0)
