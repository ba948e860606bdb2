"""Compression ratios and times of the codecs.

    python benchmarks/codec_costs.py

The values are those of GN-LeNet (89,834 parameters) after 30 steps of SGD on random images: weights and changes with
the scales of their layers. The positions are a random tenth of them, and the tenth that changed most. Times are the
best of many runs, on one core, also as a multiple of one copy of the model's memory.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from measuring import Figure, show
from shoal.compression.floats import BFloat16, Float16, Float32, FloatCodec
from shoal.compression.indices import Bitmap, EliasDelta, EliasGamma, GolombRice, IndexCodec, Positions, Raw
from shoal.compression.libraries import Blosc2, Zfp, Zstd
from shoal.compression.quantizers import QSGD, Int8
from shoal.compression.sparse import kept_count, top_positions
from shoal.models.basic import GnLenet
from shoal.types import Params

INDEX_CODECS: list[IndexCodec] = [GolombRice(), EliasGamma(), EliasDelta(), Bitmap(), Raw()]

FLOAT_CODECS: list[Callable[[], FloatCodec]] = [
    Float32,
    Float16,
    BFloat16,
    Int8,
    lambda: Int8(unbiased=False),
    QSGD,
    lambda: QSGD(levels=7),
    lambda: QSGD(levels=1),
    Zstd,
    lambda: Zstd(level=9),
    Blosc2,
    lambda: Blosc2(codec="zstd", shuffle="bytes"),
    lambda: Blosc2(bits=7),
    lambda: Blosc2(codec="zstd", shuffle="bytes", bits=7),
    Zfp,
    lambda: Zfp(tolerance=0.0),
]


def trained(steps: int) -> tuple[Params, Params]:
    """Return the flat weights of GN-LeNet after this many steps, and their changes."""
    torch.manual_seed(1)
    model = GnLenet().build((3, 32, 32), 10)
    first = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    last = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return last.numpy(), (last - first).numpy()


def best(work: Callable[[], Any], repeats: int) -> float:
    """Return the milliseconds of the fastest run, because other processes only add time."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def indices(sets: dict[str, Positions], size: int, copy: float, repeats: int) -> list[Figure]:
    table = Table(title=f"Positions, {kept_count(size, 0.1):,} of {size:,}", title_justify="left", title_style="bold")
    columns = [f"bits, {name}" for name in sets]
    for column in ("codec", *columns, "encode", "decode", "together"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    random = sets["random"]
    share = random.size / size
    entropy = -math.log2(share) - (1 - share) / share * math.log2(1 - share)
    table.add_row("entropy", f"{entropy:.2f}", *[""] * (len(sets) + 2))
    figures = []
    for codec in INDEX_CODECS:
        bits = {name: 8 * codec.encode(positions, size).size / positions.size for name, positions in sets.items()}
        code = codec.encode(random, size)
        encode = best(lambda codec=codec: codec.encode(random, size), repeats)  # type: ignore[misc]
        decode = best(lambda codec=codec, code=code: codec.decode(code, random.size, size), repeats)  # type: ignore[misc]
        together = f"{(encode + decode) / copy:.0f} copies"
        table.add_row(
            str(codec), *(f"{b:.2f}" for b in bits.values()), f"{encode:.3f} ms", f"{decode:.3f} ms", together
        )
        if isinstance(codec, GolombRice):
            figures = [
                Figure("Golomb-Rice, a random tenth", bits["random"], "bits per index", at_most=5.3),
                Figure("Golomb-Rice, encode and decode", encode + decode, "ms", at_most=3),
            ]
    print_wide(table)
    return figures


def floats(values: dict[str, Params], copy: float, repeats: int) -> None:
    size = next(iter(values.values())).size
    table = Table(title=f"Values, {size:,} float32", title_justify="left", title_style="bold")
    ratios = [f"ratio, {name}" for name in values]
    for column in ("codec", *ratios, "error", "encode", "decode", "together"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    rng = np.random.default_rng(1)
    weights = values["weights"]
    for make in FLOAT_CODECS:
        try:
            codec = make()
        except ValueError as missing:
            print(f"  skipped: {missing}")
            continue
        shrunk = [f"{v.nbytes / sum(a.nbytes for a in codec.encode(v, rng).values()):.2f}" for v in values.values()]
        arrays = codec.encode(weights, rng)
        error = relative_error(weights, codec.decode(arrays, size))
        encode = best(lambda codec=codec: codec.encode(weights, rng), repeats)  # type: ignore[misc]
        decode = best(lambda codec=codec, arrays=arrays: codec.decode(arrays, size), repeats)  # type: ignore[misc]
        together = f"{(encode + decode) / copy:.0f} copies"
        table.add_row(str(codec), *shrunk, f"{error:.1e}", f"{encode:.3f} ms", f"{decode:.3f} ms", together)
    print_wide(table)
    print("error: the norm of the error, relative to the norm of the weights")


def relative_error(values: Params, back: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(back - values) / np.linalg.norm(values))


def print_wide(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main(short: bool) -> None:
    torch.set_num_threads(1)
    repeats = 20 if short else 100
    weights, changes = trained(30)
    copy = best(weights.copy, 200)
    count = kept_count(weights.size, 0.1)
    sets = {
        "random": np.sort(np.random.default_rng(1).choice(weights.size, count, replace=False)),
        "changed most": top_positions(np.abs(changes), count),
    }
    print(f"one copy of {weights.nbytes:,} bytes: {copy:.3f} ms")
    figures = indices(sets, weights.size, copy, repeats)
    selecting = best(lambda: top_positions(np.abs(changes), count), repeats)
    figures.append(Figure("choosing the tenth that changed most", selecting, "ms"))
    floats({"weights": weights, "changes": changes}, copy, repeats)
    show("Codecs, GN-LeNet", figures)


if __name__ == "__main__":
    main("--short" in sys.argv)
