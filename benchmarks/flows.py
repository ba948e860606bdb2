"""The processor time of the max-min fair allocation of bandwidth to flows.

    python benchmarks/flows.py                 # a minute

In a star, every node has an upload link and a download link. Flows run between random pairs of nodes. When a flow ends,
another one starts, so the number of concurrent flows stays constant.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from measuring import Figure, median, script, show, step
from shoal.environment.network.flows import Flows

CAPACITY = 12.5e6
"""100 Mbit/s."""
Draw = Callable[[random.Random], tuple[int, ...]]


def star(nodes: int) -> tuple[int, Draw]:
    def draw(draws: random.Random) -> tuple[int, ...]:
        sender, receiver = draws.randrange(nodes), draws.randrange(nodes - 1)
        return sender, nodes + receiver + (receiver >= sender)

    return 2 * nodes, draw


def one_link(_: int) -> tuple[int, Draw]:
    return 1, lambda draws: (0,)


def one_sender(receivers: int) -> tuple[int, Draw]:
    return receivers + 1, lambda draws: (0, 1 + draws.randrange(receivers))


def one_receiver(senders: int) -> tuple[int, Draw]:
    return senders + 1, lambda draws: (1 + draws.randrange(senders), 0)


def dense_star(_: int) -> tuple[int, Draw]:
    """All flows are connected through shared links: a change on one link may change the rates on all others."""
    return star(100)


def microseconds(network: tuple[int, Draw], concurrent: int, transfers: int) -> float:
    """The processor time of a transfer, in microseconds."""
    links, draw = network
    draws = random.Random(1)
    flows = Flows(np.full(links, CAPACITY))
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
    """The cost of a transfer with the number of flows. It is linear in the number of rates that a transfer changes."""
    figures = []
    shapes: dict[str, tuple[Callable[[int], tuple[int, Draw]], float | None]] = {
        "star, as many nodes as flows": (star, 5),
        "star, 100 nodes": (dense_star, None),
        "all over one link": (one_link, 150),
        "one sender, as many receivers": (one_sender, 150),
        "one receiver, as many senders": (one_receiver, 150),
    }
    for name, (shape, aim) in shapes.items():
        costs = [
            median([microseconds(shape(flows), flows, transfers) for _ in range(3)])
            for flows, transfers in ((100, 2000), (1000, 2000), (10_000, 500))
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
