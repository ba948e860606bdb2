"""Accuracy of the network model in real time: processes with links of 1 to 200 Mbit/s and 1 to 200 ms.

python benchmarks/shaper.py                # about two minutes
python benchmarks/shaper.py --short        # half of the links
python benchmarks/shaper.py --kernel       # kernel shaping instead of the model, as root
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import Figure, show, step
from shoal import Experiment
from shoal.results.records import Event, RunFolder

PROBE = str(Path(__file__).resolve().parent / "probe.py") + ":Probe"
MEGABITS = (1.0, 5.0, 20.0, 60.0, 100.0, 200.0)
MILLISECONDS = (1.0, 5.0, 20.0, 50.0, 100.0, 200.0)
SECONDS = 4.0
"""Seconds for which the bandwidth of a link is measured."""
GOODPUT = 1448 / 1514
"""The content of an Ethernet packet without headers, which the kernel counts and the model does not."""
LOSSES = (0.01, 0.1, 0.5)
MESSAGES = 3000


def run(
    folder: Path, links: list[dict[str, float]], probes: list[dict[str, Any]], training: bool, kernel: bool
) -> RunFolder:
    """Node 2i sends to node 2i + 1 over links[i] with probes[i]. For the kernel, bandwidths belong to nodes."""
    groups: list[dict[str, Any]] = [
        {"nodes": f"{2 * i}-{2 * i + 1}", "algorithm": probe} for i, probe in enumerate(probes)
    ]
    if kernel and "bandwidth" in links[0]:
        for group, link in zip(groups, links, strict=True):
            group["network"] = {"upload": link["bandwidth"], "download": link["bandwidth"]}
        links = []
    pairs = [{"from": str(2 * i), "to": str(2 * i + 1), **link} for i, link in enumerate(links)]
    described = Experiment(
        name="probe",
        nodes=2 * len(probes),
        engine="processes",
        algorithm={"name": PROBE, "training": training},
        group=groups,
        network={"name": "uniform", "latency": 0.001, "links": pairs},
        topology={"name": "ring"},
        model={"name": "gn-lenet"} if training else {"name": "logistic"},
        dataset={"name": "synthetic", "shape": [3, 32, 32], "samples": 2000} if training else {"name": "digits"},
        evaluation={"every": 0, "nodes": 0, "average": False},
        checkpoint={"final": False},
        processes={"training_slots": 1, "shaping": "kernel" if kernel else "model"},
    )
    return described.run(folder).folder


def took(folder: RunFolder, pair: int) -> list[tuple[float, float, int]]:
    """Return the send time, the arrival time and the size of each received message."""
    found = []
    for record in folder.read(2 * pair + 1):
        if isinstance(record, Event) and record.what == "took":
            sent, there, size = record.detail.split()
            found.append((float(sent), float(there), int(size)))
    return found


def received(folder: RunFolder, pair: int) -> int:
    """Return the number of received messages. A record may stand for several."""
    events = (record for record in folder.read(2 * pair + 1) if isinstance(record, Event))
    return sum(event.count for event in events if event.what == "took")


def bandwidth(folder: RunFolder, pair: int) -> float:
    """Return Mbit/s from the first arrival to the last one."""
    messages = took(folder, pair)
    return sum(size for _, _, size in messages[1:]) * 8e-6 / (messages[-1][1] - messages[0][1])


def latency(folder: RunFolder, pair: int) -> float:
    """Return the median in milliseconds."""
    return 1e3 * statistics.median(there - sent for sent, there, _ in took(folder, pair))


def main(short: bool, kernel: bool) -> None:
    share = GOODPUT if kernel else 1.0
    every = slice(None, None, 2 if short else 1)
    megabits, milliseconds = MEGABITS[every], MILLISECONDS[every]
    figures = []
    with tempfile.TemporaryDirectory() as place:
        for training in (False, True):
            how = "while a node trains" if training else "while no node trains"
            with step(f"bandwidths, {how}"):
                kilobytes = [min(400.0, 1000 * m / 8 * SECONDS / 20) for m in megabits]
                probes = [
                    {"count": max(10, int(1000 * m / 8 * SECONDS / k)), "kilobytes": k}
                    for m, k in zip(megabits, kilobytes, strict=True)
                ]
                folder = run(Path(place), [{"bandwidth": m} for m in megabits], probes, training, kernel)
            worst = max(abs(bandwidth(folder, i) / (m * share) - 1) for i, m in enumerate(megabits))
            for i, m in enumerate(megabits):
                figures.append(Figure(f"{m:g} Mbit/s, {how}", bandwidth(folder, i), "Mbit/s"))
            figures.append(Figure(f"bandwidth, worst error, {how}", 100 * worst, "%", at_most=10.0 if kernel else 5.0))
            with step(f"latencies, {how}"):
                quick = {"count": 100, "kilobytes": 1.0, "pause": 0.02}
                links = [{"latency": m / 1e3} for m in milliseconds]
                folder = run(Path(place), links, [quick] * len(links), training, kernel)
            errors = [latency(folder, i) - m for i, m in enumerate(milliseconds)]
            for m, error in zip(milliseconds, errors, strict=True):
                figures.append(Figure(f"{m:g} ms, {how}", m + error, "ms", note="median of 100 messages"))
            figures.append(Figure(f"latency, worst error, {how}", max(map(abs, errors)), "ms", at_most=2.0))
        with step("losses"):
            links = [{"loss": loss, "latency": 0.001} for loss in LOSSES]
            quick = {"count": MESSAGES, "kilobytes": 0.1}
            folder = run(Path(place), links, [quick] * len(links), training=False, kernel=kernel)
        for i, loss in enumerate(LOSSES):
            lost = 1 - received(folder, i) / MESSAGES
            deviations = abs(lost - loss) / math.sqrt(loss * (1 - loss) / MESSAGES)
            figures.append(
                Figure(f"loss {loss:g}: {lost:.4f} of {MESSAGES} messages, deviation", deviations, "σ", at_most=3.0)
            )
    show(f"Processes shaped by the {'kernel' if kernel else 'model'}", figures)


if __name__ == "__main__":
    main("--short" in sys.argv, "--kernel" in sys.argv)
