"""Runs of thousands of rounds on quadratics, and how far their models are from an oracle in double precision.

Node i minimises ½ Σ a_i (x − b_i)² by gradient descent with a small step. A rounding error that an algorithm adds up is
divided by the step size in the end, so it shows. An oracle is a generator: it yields what every node trains from in
round 0, 1, … (one row per node, or one vector if all are equal), and the models after the last round: see `recursions`.

    python tests/quadratics.py 20000  # print the errors of all cases after a quarter, half and all of 20,000 rounds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oracle import play

NODES, VALUES, ROUNDS, RATE = 4, 6, 2000, 0.002
TOLERANCE = 2e-5
"""The largest error in the first `ROUNDS` rounds: measured, and below the errors of forms that drift. A weighted sum of
models in place of differences has an error of 5e-5."""
ROUNDED_STEPS = 1e-4
"""The same where a step is added to a single model in float32, which no average with other models follows at once."""

draws = np.random.default_rng(3)
CURVATURE = draws.uniform(0.5, 1.5, (NODES, VALUES)).astype(np.float32)
CENTRE = draws.normal(1, 3, (NODES, VALUES)).astype(np.float32)
START = np.zeros((NODES, VALUES), np.float32)
OPTIMUM = (CURVATURE * CENTRE).sum(0) / CURVATURE.sum(0)
ROUNDING_LIMIT = float((np.spacing(np.abs(OPTIMUM)) / (2 * RATE * CURVATURE.mean(0))).max())
"""The largest error after any number of rounds for one rounding to float32 per round, ulp/(2ηa), which is 7.8e-5. A
round reduces the error of the mean model by the factor 1 − ηa, and each rounding adds up to ulp/2. Here η is `RATE`, a
the mean curvature of a coordinate, and ulp the unit in the last place of its value."""


def train(node: int, params: Any) -> Any:
    return params - np.float32(RATE) * (CURVATURE[node] * (params - CENTRE[node]))


def steps(models: Any) -> Any:
    """Every node's step u = train(x) − x in double precision; the rate is rounded as in `train`."""
    return -float(np.float32(RATE)) * (CURVATURE.astype(np.float64) * (models - CENTRE))


def step(node: int, model: Any) -> Any:
    """The step of one node."""
    return -float(np.float32(RATE)) * (CURVATURE[node].astype(np.float64) * (model - CENTRE[node]))


@dataclass(frozen=True)
class Case:
    """An algorithm, its oracle, and further arguments of `oracle.play`."""

    algorithm: Any
    topology: Any
    oracle: Callable[[int], Iterator[Any]]
    """Takes the number of rounds."""
    local_steps: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    trainings: int | None = None
    """How often a node trains in a round: by default as often as it takes local steps. With 0 it is not known, and only
    the models after the last round are compared."""

    def errors(self, rounds: int = ROUNDS) -> dict[int, float]:
        """Run the algorithm, and return the largest error of any node after a quarter, half and all of the rounds."""
        per_round = self.local_steps if self.trainings is None else self.trainings
        seen: dict[int, dict[int, Any]] = {rounds // 4: {}, rounds // 2: {}} if per_round else {}
        trainings: Counter[int] = Counter()

        def watched(node: int, params: Any) -> Any:
            if per_round and trainings[node] % per_round == 0 and trainings[node] // per_round in seen:
                seen[trainings[node] // per_round][node] = params
            trainings[node] += 1
            return train(node, params)

        algorithm = replace(self.algorithm, rounds=rounds)
        nodes = play(algorithm, START, self.topology, watched, local_steps=self.local_steps, **self.settings)
        seen[rounds] = {node.id: node.params for node in nodes}
        expected = {number: models for number, models in enumerate(self.oracle(rounds)) if number in seen}
        return {
            number: max(float(np.abs(params - _row(expected[number], node)).max()) for node, params in models.items())
            for number, models in seen.items()
        }


def _row(models: Any, node: int) -> Any:
    return models if models.ndim == 1 else models[node]


# Matrices


def ring() -> Any:
    w = np.zeros((NODES, NODES))
    for node in range(NODES):
        w[node, [node, (node + 1) % NODES, (node - 1) % NODES]] = 1 / 3
    return w


def lazy(w: Any) -> Any:
    return (w + np.eye(len(w))) / 2


def uniform(graph: Any, round: int) -> Any:
    """Row i: equal weights for node i and its senders."""
    w = np.eye(NODES)
    for node in range(NODES):
        w[node, list(graph.links(node, round).senders)] = 1
    return w / w.sum(1, keepdims=True)


def metropolis(graph: Any) -> Any:
    links = uniform(graph, 0) > 0
    degrees = links.sum(1)
    w = (links & ~np.eye(NODES, dtype=bool)) / np.maximum.outer(degrees, degrees)
    return w + np.diag(1 - w.sum(1))


if __name__ == "__main__":
    import sys

    from test_long_runs import CASES
    from test_long_runs_compressed import CASES as COMPRESSED

    for name, case in {**CASES, **COMPRESSED}.items():
        print(f"{name:34}", *(f"{error:9.1e}" for error in case.errors(int(sys.argv[1])).values()), flush=True)
