"""End times of the same experiments in the simulation (virtual time) and in processes (real time).

python benchmarks/agreement.py             # about two minutes

The experiments are small, so nodes do not wait for a core: 8 nodes, 10 Mbit/s links, devices slower than this machine.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from measuring import Figure, show, step
from shoal import Experiment

COMMON: dict[str, Any] = {
    "nodes": 8,
    "seed": 1,
    "network": {"name": "uniform", "latency": 0.01, "upload": 10.0, "download": 10.0},
    "model": {"name": "mlp", "hidden": [512]},
    "partition": {"name": "shards", "per_node": 2},
    "training": {"lr": 0.1, "batch_size": 16, "local_steps": 4},
    "speed": {"step_seconds": 0.1},
    "evaluation": {"every": 0},
    "simulation": {"batching": "off"},
}
CASES: dict[str, dict[str, Any]] = {
    "D-PSGD, 3-regular": {
        "algorithm": {"name": "dpsgd", "rounds": 20},
        "topology": {"name": "regular", "degree": 3},
    },
    "D-PSGD, one slow node": {
        "algorithm": {"name": "dpsgd", "rounds": 20},
        "topology": {"name": "regular", "degree": 3},
        "group": [{"nodes": "0", "network": {"upload": 2.0, "download": 2.0}, "speed": {"slowdown": 1.5}}],
    },
    "DivShare": {"algorithm": {"name": "divshare", "rounds": 20}},
    "AD-PSGD": {"algorithm": {"name": "adpsgd", "rounds": 20}, "topology": {"name": "ring"}},
    "SWIFT": {"algorithm": {"name": "swift", "rounds": 20}, "topology": {"name": "ring"}},
}


def main() -> None:
    figures = []
    with tempfile.TemporaryDirectory() as place:
        for what, case in CASES.items():
            with step(what):
                virtual, real = (
                    Experiment(name="agreement", engine=engine, **COMMON, **case).run(place).summary
                    for engine in ("simulation", "processes")
                )
            seconds, wall = virtual["time"]["virtual_s"], real["time"]["wall_s"]
            sent, really = (summary["bytes_sent"]["total"] / 1e6 for summary in (virtual, real))
            figures.append(
                Figure(
                    f"{what}: virtual and real differ by",
                    100 * abs(wall / seconds - 1),
                    "%",
                    at_most=10.0,
                    note=f"{seconds:.2f} s virtual, {wall:.2f} s real; {sent:.1f} MB and {really:.1f} MB sent",
                )
            )
    show("Virtual and real end times, 8 nodes, 10 Mbit/s", figures)


if __name__ == "__main__":
    sys.exit(main())
