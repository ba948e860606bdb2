"""The cost of the network's flow model.

    python benchmarks/flows.py                 # half a minute

Star: every node has an upload and a download link. When a transfer between two random nodes ends, another one replaces
it, so the number of concurrent flows is constant.
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
    """All flows are connected: a change of one link may affect every other."""
    return star(100)


def microseconds(network: tuple[int, Draw], concurrent: int, transfers: int) -> float:
    """Return the processor time per transfer."""
    links, draw = network
    draws = random.Random(1)
    flows = Flows(np.full(links, CAPACITY))
    todo = [(draw(draws), draws.uniform(1e5, 1e6)) for _ in range(concurrent + 2 * transfers)]
    for way, size in todo[:concurrent]:
        flows.start(0.0, way, 1.0, size)
    flows.next_time()
    began, done = time.process_time(), 0
    while done < transfers:
        now = flows.next_time()
        for _ in flows.advance(now):
            way, size = todo[concurrent + done]
            flows.start(now, way, 1.0, size)
            done += 1
    return 1e6 * (time.process_time() - began) / done


def throughput() -> list[Figure]:
    figures = []
    for nodes, concurrent in ((60, 60), (60, 120), (60, 360), (1000, 1000)):
        each = median([microseconds(star(nodes), concurrent, 5000) for _ in range(3)])
        figures.append(Figure(f"star, {nodes} nodes, {concurrent} flows", 1e6 / each, "transfers/s", at_least=50_000,
                              note=f"{each:.1f} µs per transfer"))  # fmt: skip
    return figures


def growth() -> list[Figure]:
    figures = []
    shapes = {
        "star, as many nodes as flows": star,
        "star, 100 nodes": dense_star,
        "all over one link": one_link,
        "one sender, as many receivers": one_sender,
        "one receiver, as many senders": one_receiver,
    }
    for name, shape in shapes.items():
        each = [median([microseconds(shape(flows), flows, 2000) for _ in range(3)]) for flows in (100, 1000, 10_000)]
        costs = " → ".join(f"{cost:.1f}" for cost in each)
        figures.append(Figure(f"{name}: 10,000 / 100 flows", each[2] / each[0], "×", at_most=30,
                              note=f"{costs} µs for 100, 1,000 and 10,000 flows"))  # fmt: skip
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
                   note="including the import; compiled before and cached on disk")]  # fmt: skip


def main() -> None:
    with step("compiling, or loading the compiled code"):
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
