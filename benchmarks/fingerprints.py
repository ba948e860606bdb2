"""Check that a change of the code changes no result: the digest, the bytes and the messages of many short runs.

    python benchmarks/fingerprints.py record                 # on the commit before the change
    python benchmarks/fingerprints.py compare                # after it: lists every run that differs
    python benchmarks/fingerprints.py compare --only dpsgd   # the runs with "dpsgd" in their names

The runs are every example, shortened, and one or more runs for each algorithm, each sharing, every topology except
`file`, every partition except `natural`, five models (no sequence model, no resnet18), six faults, and a few
networks, devices and availability models; those of FedScale need its files. Each runs in the simulation with
`batching = "off"`. The synchronous ones also run as processes: their results do not depend on the speed of the machine.

Digests depend on the processor and on the version of PyTorch, so record and compare on the same machine.
Examples with real data run when SHOAL_DATA names the folder with the data.

A run that ends with an error has the type of the error in place of a digest. In the recorded file these are an injected
error, which ends the run as it should ("fault raise by round"), and examples whose data or packages were missing:
fashion-mnist and flower.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shoal import Experiment, ShoalError

EXAMPLES = Path(__file__).parent.parent / "examples"
RECORDED = Path(__file__).with_suffix(".json")
NODES, ROUNDS = 8, 4

ALGORITHMS: dict[str, dict[str, Any]] = {
    "dpsgd": {},
    "dpsgd overlapped": {"algorithm.overlap": True},
    "el-oracle": {},
    "el-local": {},
    "adpsgd": {},
    "swift": {},
    "divshare": {},
    "shatter": {},
    "gossip": {},
    "fedavg": {},
    "fedavg fraction": {"algorithm.fraction": 0.5, "algorithm.server": {"name": "adam"}},
    "parameter-server": {},
    "parameter-server asynchronous": {"algorithm.asynchronous": True},
    "sgp": {},
    "relaysum": {"topology.name": "tree"},
    "d2": {"training.local_steps": 1},
    "gradient-tracking": {"training.local_steps": 1},
    "k-gt": {},
    "adpsgd-artifact": {},
    "swift-artifact": {},
    "qg-dsgdm": {},
    "d-cliques": {"topology.name": "d-cliques", "dataset.partition.name": "shards"},
    "ipls": {},
    "muffliato": {"training.local_steps": 1},
}
SHARINGS: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        *("full", "random", "topk", "choco", "deepsqueeze", "powergossip", "jwins", "qsgd", "float16", "bfloat16"),
        *("int8", "data", "secure"),
    )
} | {"secure topk": {"sharing.inner": {"name": "topk", "fraction": 0.3}}}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "ring": {},
    "full": {},
    "star": {},
    "grid": {},
    "torus": {"nodes": 9},
    "regular": {"topology.degree": 3},
    "regular dynamic": {"topology.degree": 3, "topology.dynamic": True},
    "erdos-renyi": {"topology.probability": 0.6},
    "small-world": {},
    "tree": {},
    "exponential": {},
    "one-peer-exponential": {},
    "peer-sampler": {"topology.graph": {"name": "regular", "degree": 3, "dynamic": True}},
    "gossip-sampler": {"topology.degree": 3, "topology.view": 6, "topology.healer": 1, "topology.swapper": 2},
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {},
    "shards": {},
    "dirichlet": {},
    "classes": {},
    "quantity": {},
}
MODELS: dict[str, dict[str, Any]] = {"mlp": {}, "logistic": {}}
IMAGE_MODELS: dict[str, dict[str, Any]] = {
    "gn-lenet": {"dataset.images": True},
    "lenet": {"dataset": {"name": "synthetic", "shape": [1, 16, 16], "samples": 512, "test_samples": 64}},
    "resnet8": {"dataset.images": True},
}
FAULTS: dict[str, list[dict[str, Any]]] = {
    "crash by round": [{"kind": "crash", "node": 3, "round": 1}],
    "raise by round": [{"kind": "raise", "node": 2, "round": 1}],
    "crash and return": [{"kind": "crash", "node": 3, "time": 0.05, "until": 0.1}],
    "partition": [{"kind": "partition", "nodes": "0-3", "time": 0.05, "until": 0.1}],
    "drop": [{"kind": "drop", "probability": 0.3, "time": 0.0}],
    "slow": [{"kind": "slow", "nodes": "0-1", "factor": 3.0, "time": 0.02, "lasting": 0.05}],
}
SYNCHRONOUS = frozenset(
    {
        "dpsgd",
        "el-oracle",
        "fedavg",
        "sgp",
        "relaysum",
        "d2",
        "gradient-tracking",
        "k-gt",
        "qg-dsgdm",
        "d-cliques",
        "muffliato",
    }
    | {"shatter"}
)
"""Algorithms whose models do not depend on when messages arrive."""
TIMED = frozenset({"fault", "duration", "availability"})
"""Keys of examples whose results depend on the clock."""

BASE: dict[str, Any] = {
    "nodes": NODES,
    "seed": 7,
    "algorithm": {"name": "dpsgd", "rounds": ROUNDS},
    "topology": {"name": "ring"},
    "dataset": {"name": "digits", "partition": {"name": "iid"}},
    "model": {"name": "mlp"},
    "training": {"lr": 0.1, "batch_size": 16, "local_steps": 2},
    "evaluation": {"every": 2, "samples": 200},
    "simulation": {"batching": "off"},
}


def runs() -> Iterator[tuple[str, Callable[[], Experiment]]]:
    """The name of every run, and how to build its experiment."""
    for file in sorted(EXAMPLES.glob("*.toml")):
        if file.stem != "sweep":  # it is not one experiment
            yield from _example(file)
    for kind, variants in (
        ("algorithm", ALGORITHMS),
        ("sharing", SHARINGS),
        ("topology", TOPOLOGIES),
        ("dataset.partition", PARTITIONS),
        ("model", MODELS),
    ):
        for name, overrides in variants.items():
            overrides = {f"{kind}.name": name.split()[0], **overrides}
            yield f"{kind} {name}, simulation", partial(_experiment, overrides)
            synchronous = kind != "algorithm" or name.split()[0] in SYNCHRONOUS
            if synchronous and name != "gossip-sampler" and kind in ("algorithm", "sharing", "topology"):
                yield f"{kind} {name}, processes", partial(_experiment, {**overrides, "engine": "processes"})
    for name, overrides in IMAGE_MODELS.items():
        overrides = {"model.name": name, "nodes": 4, "algorithm.rounds": 2, **overrides}
        yield f"model {name}, simulation", partial(_experiment, overrides)
    for name, faults in FAULTS.items():
        yield f"fault {name}, simulation", partial(_experiment, {"fault": faults, "simulation.receive_timeout": 1.0})
    for name, overrides in {
        "uniform": {
            "network": {"name": "uniform", "upload": 20.0, "download": 40.0, "latency": 0.005, "jitter": 0.002}
        },
        "uniform, lossy": {
            "network": {"name": "uniform", "upload": 20.0, "loss": 0.1},
            "simulation.receive_timeout": 1.0,
        },
        "lognormal devices": {"speed": {"name": "lognormal"}},
        "day and night": {
            "availability": {"name": "day-night", "period": 0.2},
            "simulation.receive_timeout": 1.0,
        },
    }.items():
        yield f"environment {name}, simulation", partial(_experiment, overrides)


def _example(file: Path) -> Iterator[tuple[str, Callable[[], Experiment]]]:
    table = tomllib.loads(file.read_text())
    overrides: dict[str, Any] = {
        "nodes": min(table["nodes"], NODES if table["dataset"]["name"] != "digits" else 2 * NODES),
        "algorithm.rounds": ROUNDS,
        "evaluation.samples": 200,
        "simulation.batching": "off",
    }
    if table["dataset"]["name"] not in ("digits", "synthetic"):
        overrides["training.local_steps"] = 2
    if table["dataset"]["name"] == "synthetic":
        overrides |= {"dataset.samples": 512, "dataset.test_samples": 64}
    if "duration" in table:
        overrides["algorithm.rounds"] = table["algorithm"]["rounds"]
        if table["dataset"]["name"] != "digits":
            overrides["duration"] = 1.0
    yield (
        f"example {file.stem}, simulation",
        partial(Experiment.from_file, file, {**overrides, "engine": "simulation"}),
    )
    if table["algorithm"]["name"] in SYNCHRONOUS and not TIMED & table.keys():
        overrides["nodes"] = min(overrides["nodes"], NODES)
        yield (
            f"example {file.stem}, processes",
            partial(Experiment.from_file, file, {**overrides, "engine": "processes"}),
        )


def _experiment(overrides: dict[str, Any]) -> Experiment:
    return Experiment.from_table(BASE, overrides, base=EXAMPLES)


def fingerprint(experiment: Experiment) -> dict[str, Any]:
    """What a run must have in common with the same run of another commit."""
    with tempfile.TemporaryDirectory() as folder:
        summary = experiment.run(folder).summary
    return {
        "status": summary["status"],
        "digest": summary["digest"],
        "bytes": summary["bytes_sent"]["total"],
        "messages": summary["messages_sent"],
        "virtual_s": summary["time"]["virtual_s"],
    }


def measured(only: str | None) -> dict[str, dict[str, Any]]:
    """The fingerprints of all runs, or of those with `only` in their names."""
    found = {}
    for name, build in runs():
        if only is None or only in name:
            try:
                found[name] = fingerprint(build())
            except ShoalError as error:
                found[name] = {"status": type(error).__name__}
                print(f"{name}: {error}", file=sys.stderr)
            print(f"{name}: {found[name]}", flush=True)
    return found


def differences(recorded: dict[str, Any], found: dict[str, Any], only: str | None = None) -> list[str]:
    """Every run whose fingerprint is not the recorded one, that is not recorded, or that no longer exists.

    With `only`, `found` has only the runs with this text in their names.
    """
    lines = [f"{name}: recorded, but no longer run" for name in recorded if name not in found and (only or "") in name]
    for name, now in found.items():
        before = recorded.get(name)
        if before is None:
            lines.append(f"{name}: not recorded")
        elif before != now:
            changed = ", ".join(f"{k}: {before.get(k)} -> {now.get(k)}" for k in now if before.get(k) != now[k])
            lines.append(f"{name}: {changed}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("--only", help="only the runs with this text in their names")
    parser.add_argument("--file", type=Path, default=RECORDED, help="where fingerprints are recorded")
    options = parser.parse_args()
    os.environ.setdefault("SHOAL_CACHE", tempfile.mkdtemp(prefix="shoal-fingerprints-"))
    warnings.simplefilter("ignore")
    found = measured(options.only)
    without_digest = sum("digest" not in fingerprint for fingerprint in found.values())
    recorded = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.command == "record":
        kept = {} if options.only is None else recorded
        options.file.write_text(json.dumps({**kept, **found}, indent=1) + "\n")
        print(f"{len(found)} runs recorded, {without_digest} without a digest")
        return 0
    lines = differences(recorded, found, options.only)
    print(f"{len(found)} runs, {without_digest} without a digest, {len(lines)} differ", *lines, sep="\n")
    return 1 if lines or not found else 0


if __name__ == "__main__":
    sys.exit(main())
