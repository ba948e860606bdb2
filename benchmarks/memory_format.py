"""Training steps with images in both memory formats: channels one after another, and channels last.

    python benchmarks/memory_format.py     # about two minutes

For each network, the time of a step in one thread with channels last, relative to the default format. The formats are
measured in turns, and the shortest time of each counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from measuring import Figure, show, step
from shoal.models.basic import GnLenet
from shoal.models.images import LeafCnn, Lenet
from shoal.models.model import Model
from shoal.models.resnets import Resnet8, Resnet18
from shoal.training.memory_format import channels_last, prefers_channels_last

BATCHES = (8, 32)
CASES: list[tuple[Model, tuple[int, int, int]]] = [
    (GnLenet(), (3, 32, 32)),
    (GnLenet(), (1, 28, 28)),
    (Lenet(), (3, 32, 32)),
    (LeafCnn(), (1, 28, 28)),
    (LeafCnn(), (3, 84, 84)),
    (LeafCnn(batch_norm=True), (3, 84, 84)),
    (Resnet8(), (3, 32, 32)),
    (Resnet18(), (3, 32, 32)),
]


def main() -> None:
    torch.set_num_threads(1)
    figures = []
    for model, shape in CASES:
        name = f"{type(model).__name__} {'×'.join(map(str, shape))}"
        with step(name):
            network = model.build(shape, 10)
            prefers = prefers_channels_last(network, torch.randn(2, *shape), torch.Tensor.mean)
            used = "used" if prefers else "not used"
            for batch in BATCHES:
                figures.append(_compare(f"{name}, batch {batch}", network, shape, batch, used))
    show("A step with channels last / with the default format", figures)


def _compare(name: str, network: torch.nn.Module, shape: tuple[int, ...], batch: int, used: str) -> Figure:
    inputs, labels = torch.randn(batch, *shape), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, foreach=False)

    def train(arrange: Callable[[torch.Tensor], torch.Tensor]) -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(arrange(inputs)), labels).backward()
        optimizer.step()
        return time.perf_counter() - started

    formats: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.clone, channels_last]
    first = [max(train(arrange) for _ in range(3)) for arrange in formats]
    repeats = max(5, min(100, int(2 / max(first))))
    plain, last = (min(times) for times in zip(*[[train(f) for f in formats] for _ in range(repeats)], strict=True))
    return Figure(name, last / plain, "×", note=f"{1e3 * plain:.1f} ms and {1e3 * last:.1f} ms; {used} by Shoal")


if __name__ == "__main__":
    main()
