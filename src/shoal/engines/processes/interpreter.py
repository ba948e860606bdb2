"""New Python interpreters that run a module of Shoal."""

from __future__ import annotations

import json
import os
import sys

START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv.pop()); importlib.import_module(sys.argv[1]).main()"
)
"""Run a module in a process that looks for modules where this one does, and not in the working folder."""
MALLOC = {
    # One heap for all threads of a node. It grows and shrinks only when a node calls `release_memory`: the private
    # memory of a node is small between trainings, and a training does not pay for every allocation again.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `main` of a module. There, `sys.argv[1]` is the module, and the arguments follow."""
    return [sys.executable, "-P", "-c", START, module, *arguments, json.dumps([str(path) for path in sys.path])]


def zygote_environment() -> dict[str, str]:
    """The environment of a zygote that this process starts now."""
    return {**os.environ, **MALLOC, **ONE_THREAD}
