"""Run all benchmarks, one after another.

make bench                             # the short ones
python benchmarks/run.py               # all of them, including 1024 processes
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main(short: bool) -> None:
    commands = [
        ["simulation.py", *(["--short"] if short else [])],
        ["recording.py", *(["--short"] if short else [])],
        ["processes.py", *([] if short else ["--thousand"])],
        ["accuracy.py", *(["--short"] if short else [])],
        ["codec_costs.py"],
        ["sharing.py"],
        ["secure.py", *(["--short"] if short else [])],
        ["colluders.py", *(["--short"] if short else [])],
        ["sampler.py", *(["--short"] if short else [])],
        ["flows.py"],
        ["shaper.py", *(["--short"] if short else [])],
        ["fuzz.py", *(["--codec", "100000", "--node", "2000"] if short else [])],
        ["agreement.py"],
        ["sealed.py", *(["--short"] if short else [])],
        ["divshare.py", *(["--overhead"] if short else [])],
        ["checkpoints.py", *(["--short"] if short else [])],
        *([] if short else [["checkpoints.py", "--kills", "10"], ["chaos.py"], ["soak.py"]]),
    ]
    for command in commands:
        print(f"benchmarks/{' '.join(command)}", flush=True)
        subprocess.run([sys.executable, str(FOLDER / command[0]), *command[1:]], check=True)


if __name__ == "__main__":
    main("--short" in sys.argv)
