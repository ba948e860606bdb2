"""The processor time of the max-min fair allocation of bandwidth to flows.

    python benchmarks/flows.py                 # a minute

In a star, every node has an upload link and a download link. Flows run between random pairs of nodes, or between a
server and random clients in both directions. When a flow ends, another one starts, so the number of concurrent flows
stays constant.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from measuring import Figure, median, script, show, step
from shoal.environment.network.flows import Flows

CAPACITY = 12.5e6
"""100 Mbit/s."""
Draw = Callable[[random.Random], tuple[int, ...]]
Network = tuple[NDArray[np.float64], Draw]
"""The capacities of links, and a function that draws the route of a flow."""


def star(nodes: int) -> Network:
    def draw(draws: random.Random) -> tuple[int, ...]:
        sender, receiver = draws.randrange(nodes), draws.randrange(nodes - 1)
        return sender, nodes + receiver + (receiver >= sender)

    return np.full(2 * nodes, CAPACITY), draw


def dense_star(_: int) -> Network:
    """All flows are connected through shared links: a change on one link may change the rates on all others."""
    return star(100)


def one_link(_: int) -> Network:
    return np.full(1, CAPACITY), lambda draws: (0,)


def one_sender(receivers: int) -> Network:
    return np.full(receivers + 1, CAPACITY), lambda draws: (0, 1 + draws.randrange(receivers))


def one_receiver(senders: int) -> Network:
    return np.full(senders + 1, CAPACITY), lambda draws: (1 + draws.randrange(senders), 0)


def server(clients: int, capacities: NDArray[np.float64], part: float) -> Network:
    """A server whose links have this part of the capacity of all clients together."""

    def draw(draws: random.Random) -> tuple[int, ...]:
        client = 2 + draws.randrange(clients)
        return (0, client) if draws.random() < 0.5 else (clients + client, 1)

    return np.concatenate([np.full(2, part * capacities.sum()), capacities, capacities]), draw


def fat_server(clients: int) -> Network:
    """Every flow is limited by the link of its client."""
    return server(clients, np.full(clients, CAPACITY / 10), 2.0)


def full_server(clients: int) -> Network:
    """Fast clients share what slow clients leave of the server's link."""
    capacities = CAPACITY * 10 ** np.random.default_rng(1).uniform(-2, 0, clients)
    return server(clients, capacities, 0.2)


def microseconds(network: Network, concurrent: int, transfers: int) -> float:
    """The processor time of a transfer, in microseconds."""
    capacities, draw = network
    draws = random.Random(1)
    flows = Flows(capacities)
    todo = [(draw(draws), draws.uniform(1e5, 1e6)) for _ in range(concurrent + 2 * transfers)]
    for route, size in todo[:concurrent]:
        flows.start(0.0, route, 1.0, size)
    flows.next_time()
    began, done = time.process_time(), 0
    while done < transfers:
        now = flows.next_time()
        for _ in flows.advance(now):
            route, size = todo[concurrent + done]
            flows.start(now, route, 1.0, size)
            done += 1
    return 1e6 * (time.process_time() - began) / done


def throughput() -> list[Figure]:
    figures = []
    for nodes, concurrent in ((60, 60), (60, 120), (60, 360), (1000, 1000)):
        each = median([microseconds(star(nodes), concurrent, 5000) for _ in range(3)])
        figures.append(Figure(f"star, {nodes} nodes, {concurrent} flows", 1e6 / each, "transfers/s", at_least=10_000,
                              note=f"{each:.1f} µs a transfer"))  # fmt: skip
    return figures


def growth() -> list[Figure]:
    """The cost of a transfer with the number of flows."""
    figures = []
    shapes: dict[str, tuple[Callable[[int], Network], float | None]] = {
        "star, as many nodes as flows": (star, 5),
        "star, 100 nodes": (dense_star, None),
        "all over one link": (one_link, 5),
        "one sender, as many receivers": (one_sender, 5),
        "one receiver, as many senders": (one_receiver, 5),
        "fat server, as many slow clients": (fat_server, 5),
        "full server, as many different clients": (full_server, 10),
    }
    for name, (shape, aim) in shapes.items():
        costs = [
            median([microseconds(shape(flows), flows, transfers) for _ in range(3)])
            for flows, transfers in ((100, 2000), (1000, 2000), (10_000, 2000 if aim else 300))
        ]
        note = f"{' → '.join(f'{cost:.1f}' for cost in costs)} µs for 100, 1,000 and 10,000 flows"
        figures.append(Figure(f"{name}: 10,000 / 100 flows", costs[2] / costs[0], "×", at_most=aim, note=note))
    return figures


def first_use() -> list[Figure]:
    program = (
        "import time; began = time.perf_counter(); import numpy; from shoal.environment.network.flows import Flows; "
        "flows = Flows(numpy.ones(1)); flow = flows.start(0.0, (0,), 1.0, 1.0); flows.rate(flow); flows.next_time(); "
        "flows.remaining(0.5, flow); flows.set_capacity(0.5, 0, 2.0); flows.advance(0.6); flows.cancel(0.6, flow); "
        "print(time.perf_counter() - began)"
    )
    script(program)
    return [Figure("first use in a process", median([script(program) for _ in range(3)]), "s", at_most=1.0,
                   note="with the import; compiled before, from the cache on disk")]  # fmt: skip


def main() -> None:
    with step("compiling, or loading compiled code"):
        microseconds(star(4), 8, 100)
    figures: list[Figure] = []
    for part in (throughput, growth, first_use):
        with step(part.__name__.replace("_", " ")):
            figures += part()
    show("Flows: starts and ends of transfers, with new rates after each", figures)
    missed = [figure.what for figure in figures if figure.met is False]
    print(f"Aims not met: {'; '.join(missed)}." if missed else "All aims are met.")


if __name__ == "__main__":
    main()
