"""Accuracy on CIFAR-10: GN-LeNet, 16 nodes, IID, a 5-regular graph, simulated.

SHOAL_DATA=… python benchmarks/cifar10.py [PICTURE.png]     # needs CIFAR-10: shoal data fetch cifar10
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from measuring import Figure, shoal_run_in, show, step
from shoal.results.plots import metric_plot
from shoal.results.records import RunFolder

SETTINGS = {
    "nodes": 16,
    "algorithm.rounds": 40,
    "topology": {"name": "regular", "degree": 5},
    "dataset": {"name": "cifar10", "partition": {"name": "iid"}},
    "training": {"lr": 0.05, "batch_size": 32, "local_steps": 16},
    "evaluation": {"every": 5, "nodes": 4, "samples": 5000},
}


def main(picture: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with step("40 rounds of 16 steps"):
            run = shoal_run_in(Path(folder), "cifar10.toml", SETTINGS)
        summary = json.loads((run / "summary.json").read_text())
        if picture is not None:
            metric_plot([RunFolder(run)], Path(folder, "curve.png"), "accuracy")
            shutil.copy(Path(folder, "curve.png"), picture)
    minutes = summary["time"]["wall_s"] / 60
    figures = [
        Figure(
            "accuracy of the nodes", summary["accuracy"]["mean"], "", at_least=0.5, note=f"after {minutes:.1f} minutes"
        ),
        Figure("accuracy of the averaged model", summary["averaged_model"]["accuracy"], ""),
    ]
    show("CIFAR-10, GN-LeNet, 16 nodes, IID, 5-regular, 640 steps per node", figures)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
