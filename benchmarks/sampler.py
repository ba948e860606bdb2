"""The cost of a central peer sampler, which sends every node process its neighbours in every round over TCP.

python benchmarks/sampler.py               # 1024 nodes, about five minutes
python benchmarks/sampler.py --short       # 128 nodes
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import Figure, shoal_run_in, show, step

ROUNDS = 5
GRAPH = {"name": "regular", "degree": 5, "dynamic": True}


def main(nodes: int) -> None:
    settings: dict[str, Any] = {"nodes": nodes, "algorithm.rounds": ROUNDS}
    with tempfile.TemporaryDirectory() as folder:
        with step("neighbours from the seed"):
            alone = shoal_run_in(Path(folder, "alone"), "thousand-processes.toml", {**settings, "topology": GRAPH})
        sampled = {**settings, "topology": {"name": "peer-sampler", "graph": GRAPH}}
        with step("neighbours from the sampler"):
            sampled_run = shoal_run_in(Path(folder, "sampled"), "thousand-processes.toml", sampled)
        summary, without = (json.loads((run / "summary.json").read_text()) for run in (sampled_run, alone))
        records = [json.loads(line) for line in (sampled_run / "nodes" / f"{nodes}.jsonl").read_text().splitlines()]
    sampler = next(record for record in records if record["kind"] == "end")
    per_round, wall = sampler["total_cpu_s"] / ROUNDS, summary["time"]["wall_s"] / ROUNDS
    figures = [
        Figure("the sampler's share of a round", 100 * per_round / wall, "%", at_most=5.0,
               note=f"{1e3 * per_round:.0f} ms of processor time in rounds of {wall:.1f} s"),
        Figure("bytes for the sampler, share of all", 100 * (1 - _bytes(without) / _bytes(summary)), "%",
               note=f"{sampler['bytes_sent'] / ROUNDS / nodes:.0f} bytes to each node per round"),
        Figure("the run, relative to one without sampler", summary["time"]["wall_s"] / without["time"]["wall_s"], "×"),
    ]  # fmt: skip
    show(f"A peer sampler for {nodes} processes, GN-LeNet, {ROUNDS} rounds", figures)


def _bytes(summary: dict[str, Any]) -> float:
    return float(summary["bytes_sent"]["total"])


if __name__ == "__main__":
    main(128 if "--short" in sys.argv else 1024)
