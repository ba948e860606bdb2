"""The processor time of a change does not grow with the number of flows on one link, or elsewhere in the network."""

from __future__ import annotations

import random
import time

import numpy as np

from shoal.environment.network.flows import Flows


def star(nodes: int, concurrent: int, transfers: int) -> float:
    """Processor seconds for each of so many transfers, each replaced by another when it ends."""
    draws = random.Random(1)
    flows = Flows(np.full(2 * nodes, 1e7))

    def start(now: float) -> None:
        sender, receiver = draws.sample(range(nodes), 2)
        flows.start(now, (sender, nodes + receiver), 1.0, draws.uniform(1e5, 1e6))

    for _ in range(concurrent):
        start(0.0)
    began, done = time.process_time(), 0
    while done < transfers:
        now = flows.next_time()
        for _ in flows.advance(now):
            start(now)
            done += 1
    assert flows.active == concurrent
    return (time.process_time() - began) / done


def fan_out(receivers: int, transfers: int) -> float:
    """Processor seconds per transfer from one node; many rates change whenever a flow starts or ends."""
    draws = random.Random(1)
    capacities = [10 ** draws.uniform(1, 6) for _ in range(receivers)]
    flows = Flows(np.array([0.2 * sum(capacities), *capacities]))

    def start(now: float) -> None:
        receiver = draws.randrange(receivers)
        flows.start(now, (0, 1 + receiver), 1.0 + receiver % 3, draws.uniform(1e3, 1e4))

    for _ in range(receivers):
        start(0.0)
    began, done = time.process_time(), 0
    while done < transfers:
        now = flows.next_time()
        for _ in flows.advance(now):
            flows.next_time()
            start(now)
            done += 1
    return (time.process_time() - began) / done


def test_the_cost_of_a_change_does_not_grow_with_the_number_of_rates_that_change() -> None:
    """A sender with 30 times as many receivers: 30 times as many rates change whenever a flow starts or ends."""
    fan_out(10, 100)
    assert fan_out(3000, 2000) < 5 * fan_out(100, 2000)


def test_flows_on_other_links_do_not_add_to_the_cost_of_a_change() -> None:
    star(10, 10, 100)
    assert star(1000, 1000, 2000) < 5 * star(100, 100, 2000)
