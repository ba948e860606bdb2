"""Reading the results of a large run: `shoal show`, `compare` and `plot`, and writing the files at the end of a run.

    python benchmarks/results.py

The run has 1,024 nodes and 1,000 rounds: a million `round` records with three spans each, and an evaluation of every
node every 10 rounds. Its records are written with the functions that nodes use. Each command is the best of three.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import tomli_w

from measuring import Figure, show
from shoal.results.frames import read_lines
from shoal.results.metrics_file import write_metrics
from shoal.results.progress import Outcome
from shoal.results.records import Average, End, Evaluation, Record, RecordFile, Round, RunFolder, encode
from shoal.results.summary import summarize

NODES, ROUNDS, EVERY = 1024, 1000, 10


def write_run(root: Path) -> RunFolder:
    """Write the records of a run that has not ended."""
    folder, random_numbers = RunFolder.create(root, "large"), random.Random(1)
    table = {"name": "large", "nodes": NODES, "seed": 1, "engine": "simulation", "evaluation": {"target": 0.6}}
    folder.experiment.write_text(tomli_w.dumps(table))
    for node in range(NODES):
        _write(folder.node(node), [encode(record) for record in _records(node, random_numbers)])
    averages = (
        Average(r, 1.37 * r, NODES, 0.1, {"accuracy": 0.5, "loss": 1.0}) for r in range(EVERY - 1, ROUNDS, EVERY)
    )
    _write(folder.averages, [encode(average) for average in averages])
    return folder


def _records(node: int, random_numbers: random.Random) -> Iterator[Record]:
    before = 0.0
    for r in range(ROUNDS):
        now, draw = 1.37 * (r + 1) + random_numbers.random(), random_numbers.random()
        trained = before + 0.8 * draw * (now - before)
        sent = trained + 0.1 * (now - before)
        spans = [("train", before, trained), ("send", trained, sent), ("wait", sent, now)]
        sent_to = None if r else sorted((node + step) % NODES for step in range(1, 6))
        yield Round(r, now, draw, 359_336 * 5 * (r + 1), 5 * (r + 1), sent_to, spans)
        if (r + 1) % EVERY == 0:
            yield Evaluation(r, now, {"accuracy": 0.9 * r / ROUNDS + 0.1 * draw, "loss": draw})
        before = now
    yield End(1.37 * ROUNDS + 2, f"{node:064x}", 359_336 * 5 * ROUNDS, 5 * ROUNDS, 0, 0)


def _write(path: Path, lines: list[bytes]) -> None:
    file = RecordFile(path)
    file.write_all(lines)
    file.close()


def end_run(folder: RunFolder) -> float:
    """Write the files that are written at the end of a run. Returns the seconds that it takes."""
    start = time.perf_counter()
    records = read_lines(folder)
    summarize(folder, "simulation", NODES, 1, Outcome("completed", 1.0, 0.1), records=records)
    write_metrics(folder, records)
    return time.perf_counter() - start


def measure(*arguments: object) -> tuple[float, float, float]:
    """Return the seconds, the processor seconds and the peak memory in MB of a command: the best of three."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "shoal", *map(str, arguments)], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"shoal {' '.join(map(str, arguments))} ended with exit code {os.waitstatus_to_exitcode(status)}")
        found.append((time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6))
    return min(found)


def main() -> None:
    figures = []

    def add(what: str, *arguments: object) -> None:
        seconds, processor, memory = measure(*arguments)
        figures.append(Figure(what, seconds, "s", at_most=2, note=f"processor time {processor:.2f} s"))
        figures.append(Figure("… peak memory", memory, "MB", at_most=500))

    with tempfile.TemporaryDirectory() as root:
        folder = write_run(Path(root))
        add("shoal show of a run in progress", "show", folder.path)
        # In a process of its own: the peak memory of a command includes that of the process that starts it.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            end = pool.apply(end_run, (folder,))
        figures.append(Figure("summary.json and metrics.parquet at the end of a run", end, "s", at_most=5))
        add("shoal show of a completed run", "show", folder.path)
        add("shoal show --target 0.7", "show", folder.path, "--target", "0.7")
        add("shoal compare --target 0.7", "compare", folder.path, "--target", "0.7")
        picture = Path(root) / "picture.png"
        for options in ("", " --panels rounds,time,bytes", " --kind heatmap", " --kind timeline"):
            add(f"shoal plot{options}", "plot", folder.path, *options.split(), "--out", picture)
    show(f"Results of a run of {NODES} nodes and {ROUNDS} rounds", figures)


if __name__ == "__main__":
    main()
