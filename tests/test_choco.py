"""CHOCO with lost messages and failed neighbours."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_exchange import RingExchange, experiment, random_models
from shoal.algorithms.dpsgd import DPSGD
from shoal.message import Payload
from shoal.sharing.choco import CHOCO
from shoal.testing import Faults
from shoal.types import Params

# Lost messages and failed neighbours of CHOCO


def assert_pulls_are_correct(exchange: RingExchange, alive: Collection[int]) -> None:
    """Check that the pull of each node follows from the public copies of its neighbours."""
    states = [sharing.state() for sharing in exchange.sharings]
    for i in alive:
        expected = sum(w * (states[j]["copy"] - states[i]["copy"]) for j, w in followed(exchange.sharings[i]).items())
        np.testing.assert_allclose(states[i]["pull"], expected, atol=1e-12)


def followed(sharing: CHOCO) -> dict[int, float]:
    """The neighbours in the pull of a node, with their weights."""
    return {int(peer): weight for peer, weight in sharing.state()["followed"].items()}


@pytest.mark.parametrize("lost", [{(0, 1)}, {(0, 1), (1, 0)}, {(0, 1), (2, 1), (3, 4)}], ids=str)
def test_choco_recovers_from_lost_messages(lost: set[tuple[int, int]]) -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200))
    for r in range(60):
        exchange.round(r, lost if r in (3, 4, 9) else ())
        if r == 2 or r > 12:
            assert all(
                followed(s) == pytest.approx({(i - 1) % 5: 1 / 3, (i + 1) % 5: 1 / 3}) for i, s in exchange.all()
            )
            assert_pulls_are_correct(exchange, range(5))
    assert exchange.max_deviation < 0.1


def test_choco_continues_without_a_failed_neighbour() -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200) + np.arange(5)[:, None])
    for r in range(150):
        exchange.round(r, failed=() if r < 5 else (2,))
    assert_pulls_are_correct(exchange, (0, 1, 3, 4))
    alive = exchange.models[[0, 1, 3, 4]]
    assert np.ptp(alive, axis=0).max() < 0.05
    last = alive.mean(0)
    for r in range(150, 200):
        exchange.round(r, failed=(2,))
    assert np.abs(exchange.models[[0, 1, 3, 4]].mean(0) - last).max() < 0.01  # the failed node does not pull


def test_choco_requests_a_copy_once_and_copies_go_only_to_nodes_with_lost_messages() -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200))
    copies = []
    for r in range(8):
        outgoing = [s.outgoing for s in exchange.sharings]
        recorded: dict[int, Any] = {}

        def keep(i: int, params: Params, round: int, outgoing: Any = outgoing, recorded: Any = recorded) -> Any:
            recorded[i] = outgoing[i](params, round)
            return recorded[i]

        for i, sharing in enumerate(exchange.sharings):
            sharing.outgoing = functools.partial(keep, i)
        exchange.round(r, {(0, 1)} if r == 2 else ())
        for i, sharing in enumerate(exchange.sharings):
            sharing.outgoing = outgoing[i]
        copies += [(r, i, j) for i, o in recorded.items() if callable(o) for j in range(5) if "copy" in o(j).arrays]
    assert copies == [(4, 0, 1), (4, 2, 1)]


class NeverSendsCopy(CHOCO):
    """A faulty CHOCO that never sends its copy."""

    def outgoing(self, params: Params, round: int) -> Any:
        outgoing = super().outgoing(params, round)
        return outgoing if isinstance(outgoing, Payload) else lambda peer: without_copy(outgoing(peer))


def without_copy(payload: Payload) -> Payload:
    return Payload({name: array for name, array in payload.arrays.items() if name != "copy"}, payload.fields)


@pytest.mark.parametrize("answers", [True, False], ids=["request lost", "no answer"])
def test_choco_continues_without_neighbours_that_send_no_copy(answers: bool) -> None:
    made = iter([CHOCO(0.2), CHOCO(0.2), CHOCO(0.2) if answers else NeverSendsCopy(0.2), CHOCO(0.2), CHOCO(0.2)])
    exchange = RingExchange(lambda: next(made), random_models(size=200) + np.arange(5)[:, None])
    one_way = {(1, 2)} if answers else set()  # node 2 does not receive from node 1, which receives from it
    for r in range(40):
        before = exchange.models[1].copy()
        exchange.round(r, one_way | ({(0, 1)} if r == 5 else set()))
        assert_pulls_are_correct(exchange, range(5))
        assert np.array_equal(exchange.models[1], before) == (r in (5, 6)), r
        if r > 6:
            assert followed(exchange.sharings[1]) == {0: pytest.approx(1 / 2)}
    exchange.sharings[2].__class__ = CHOCO  # from now on it sends its copy
    for r in range(40, 140):
        exchange.round(r)
    assert_pulls_are_correct(exchange, range(5))
    assert all(followed(s) == pytest.approx({(i - 1) % 5: 1 / 3, (i + 1) % 5: 1 / 3}) for i, s in exchange.all())
    assert exchange.max_deviation < 0.1


def test_choco_requests_a_copy_only_from_the_neighbour_that_was_missing_for_long() -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200))
    copies = []
    for r in range(20):
        exchange.round(r, {(2, 1)} if 4 <= r < 12 else ())
        copies += [(r, i, j) for i, s in exchange.all() for j in s.state()["asked_by"]]
    # Node 1 lost nodes 2 and 0; it recovered node 0 first, then node 2.
    assert copies == [(5, 0, 1), (5, 2, 1), (13, 2, 1)]
    assert_pulls_are_correct(exchange, range(5))


def test_choco_recovers_after_a_lost_first_round() -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200))
    for r in range(8):
        exchange.round(r, {(0, 1)} if r == 0 else ())
    assert_pulls_are_correct(exchange, range(5))


def test_a_run_with_a_crash_continues(tmp_path: Path) -> None:
    for name in ("choco", "deepsqueeze", "topk"):
        described = experiment(
            nodes=6, sharing={"name": name}, algorithm=DPSGD(8), fault=Faults().crash(2, round=3).schedule
        )
        run = described.run(tmp_path)
        assert run.summary["messages_rejected"] == 0
        models = np.stack([np.load(run.folder.model(node)) for node in (0, 1, 3, 4, 5)])
        assert np.abs(models).max() < 10
