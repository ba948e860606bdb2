"""`shoal doctor`: what this machine can run."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform

from rich.table import Table

from shoal.cli.display import console

MODELS = {"mlp on digits": 4_810, "gn-lenet on CIFAR-10": 89_834, "resnet-18": 11_200_000}
"""Models for which the number of nodes is estimated, and their parameters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=show_machine)


def show_machine(parsed: argparse.Namespace) -> int:
    console().print(_report())
    return 0


def _report() -> Table:
    """Return software, cores, memory, limits, and the number of nodes that fit."""
    from shoal.engines.operating_system import MIB, available_memory, process_limit, raise_file_limit
    from shoal.engines.processes.capacity import capacity

    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("shoal", "torch", "numpy", "pyzmq"))
    table.add_row("software", f"Python {platform.python_version()}, {versions}")
    table.add_row("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    table.add_row("cores", str(os.cpu_count()))
    table.add_row("accelerators", _accelerators())
    table.add_row("free memory", f"{available_memory() / MIB / 1024:.1f} GiB")
    table.add_row("open files", f"{raise_file_limit():,} per process")
    table.add_row("processes and threads", f"{process_limit():,}")
    for name, parameters in MODELS.items():
        fits = capacity(parameters)
        table.add_row(
            "nodes that fit",
            f"{fits.nodes:,} processes with {name} ({parameters:,} parameters), limited by {fits.reason}",
        )
    return table


def _accelerators() -> str:
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return "none; training.device = 'cpu'"
