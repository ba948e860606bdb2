"""Many runs in one Python process: the time of each run, with a template of zygotes and without.

    python benchmarks/many_runs.py          # 3 series of 6 runs each, in turns; about two minutes

Processor time is that of the Python process, of its children that have ended, and of the template. The series without
template change a variable of the environment before each run.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
import psutil

import shoal

RUNS = 6
SERIES = 3


def processor_seconds() -> float:
    used = [sum(resource.getrusage(whose)[:2]) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used) + sum(sum(child.cpu_times()[:4]) for child in psutil.Process().children())


def run_series(with_template: bool) -> list[tuple[float, float, str]]:
    """The seconds, the processor time and the digest of each run."""
    series = []
    experiment = shoal.Experiment(nodes=4, engine="processes", algorithm={"name": "dpsgd", "rounds": 5}, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        for run in range(RUNS):
            if not with_template:
                os.environ["RUN"] = str(run)
            began, used = time.perf_counter(), processor_seconds()
            digest = experiment.run(folder).summary["digest"]
            seconds = time.perf_counter() - began
            time.sleep(0.1)  # the template reaps the zygote after the run
            series.append((seconds, processor_seconds() - used, digest))
    return series


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(run_series(sys.argv[1] == "template")))
        return
    digests = set()
    for _ in range(SERIES):
        for kind in ("template", "new"):
            command = [sys.executable, __file__, kind]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            series = json.loads(done.stdout)
            times = np.array([run[:2] for run in series])
            digests |= {run[2] for run in series}
            for name, values in (("seconds", times[:, 0]), ("processor time", times[:, 1])):
                print(f"{kind:8} {name:14}", *(f"{value:6.2f}" for value in values), f"  sum {values.sum():.2f}")
    print("digests:", len(digests))


if __name__ == "__main__":
    main()
