"""Accuracy on the digits: 64 nodes, two shards each, on four graphs.

python benchmarks/accuracy.py             # 5 seeds
python benchmarks/accuracy.py --short     # 2 seeds
"""

from __future__ import annotations

import sys

from measuring import Figure, median, shoal_run, show, step

GRAPHS = {
    "dynamic 5-regular": {"topology.dynamic": True},
    "5-regular": {"topology.dynamic": False},
    "ring": {"topology": {"name": "ring"}},
    "fully connected": {"topology": {"name": "full"}},
}


def main(seeds: int) -> None:
    figures = []
    for name, settings in GRAPHS.items():
        with step(name):
            found = [shoal_run("topologies.toml", {**settings, "seed": seed}) for seed in range(seeds)]
        accuracy = median([s["accuracy"]["mean"] for s in found])
        sent = found[0]["bytes_sent"]["per_node_mean"] / 1e6
        note = f"after 200 rounds, {seeds} seeds; {sent:.1f} MB sent per node"
        figures.append(Figure(name, accuracy, "", at_least=0.9 if name == "dynamic 5-regular" else None, note=note))
    show("Accuracy on digits, 64 nodes, 2 shards each", figures)


if __name__ == "__main__":
    main(2 if "--short" in sys.argv else 5)
