"""Time and memory of decoding LEAF's JSON files.

    python benchmarks/leaf.py [megabytes]

The script writes a file in the format of FEMNIST, 256 MB or the given size, with writers of 200 images each. A separate
process decodes it and reads its peak memory from /proc/self/status. The target is a peak of at most three times the
decoded arrays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from measuring import Figure, show

IMAGES, PIXELS = 200, 28 * 28
DECODE = """
import re, sys, time
from pathlib import Path
from shoal.data.leaf import Femnist

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

before, started = peak(), time.monotonic()
data = Femnist(path=Path(sys.argv[1])).load(seed=0)
taken, held = time.monotonic() - started, peak()
bytes = sum(part.nbytes for samples in (data.train, data.test) for part in (samples.x, samples.y, samples.owner))
started = time.monotonic()
Femnist(path=Path(sys.argv[1])).load(seed=0)
print(taken, time.monotonic() - started, held, before, bytes, len(data.train))
"""


def write(folder: Path, megabytes: float) -> int:
    """Write a training file and a small test file. Returns the size of the training file."""
    rng = np.random.default_rng(1)

    def images() -> str:
        pixels = np.where(rng.random((IMAGES, PIXELS)) < 0.8, 255, rng.integers(0, 256, (IMAGES, PIXELS))) / 255
        return json.dumps({"x": pixels.tolist(), "y": rng.integers(0, 62, IMAGES).tolist()})

    for split, size in (("train", megabytes * 1e6), ("test", 1e3)):
        (folder / split).mkdir()
        with open(folder / split / "all_data_0.json", "w") as file:
            file.write('{"users": [], "num_samples": [], "user_data": {')
            number = 0
            while file.tell() < size:
                user = json.dumps(f"f{number:04}")
                file.write(f"{', ' if number else ''}{user}: {images()}")
                number += 1
            file.write("}}")
    return (folder / "train" / "all_data_0.json").stat().st_size


def main() -> None:
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 256.0
    with tempfile.TemporaryDirectory() as temporary:
        started = time.monotonic()
        size = write(Path(temporary), megabytes)
        print(f"  {size / 1e6:.0f} MB of JSON written in {time.monotonic() - started:.0f} s", flush=True)
        ended = subprocess.run(
            [sys.executable, "-c", DECODE, temporary], stdout=subprocess.PIPE, text=True, check=True,
            env=os.environ | {"SHOAL_CACHE": temporary},
        )  # fmt: skip
    taken, again, peak, before, arrays, samples = map(float, ended.stdout.split())
    note = f"{samples:,.0f} images; peak {peak / 2**20:.0f} MiB, {before / 2**20:.0f} MiB before decoding"
    show(
        f"LEAF JSON of {size / 1e6:.0f} MB, {arrays / 1e6:.0f} MB decoded",
        [
            Figure("peak memory over decoded arrays", peak / arrays, "×", at_most=3, note=note),
            Figure("decoding", taken, "s", note=f"{size / 1e6 / taken:.0f} MB of JSON per second"),
            Figure("loading from the cache", again, "s"),
        ],
    )


if __name__ == "__main__":
    main()
