"""`shoal export-model`: the final model of a node in a file that other programs read."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.display import console, print_line, show_warnings
from shoal.errors import ExperimentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a final model of a run as a safetensors file, with the names of the module's state dict."
    )
    parser.add_argument("run", type=Path, help="the folder of a run, a folder above it, or the name of an experiment")
    parser.add_argument("out", type=_safetensors_path, help="the file to write, FILE.safetensors")
    parser.add_argument(
        "--node", type=_node, default="average",
        help="the number of a node, or 'average': the average of all nodes (default)",
    )  # fmt: skip
    parser.set_defaults(command=export_model)


def export_model(parsed: argparse.Namespace) -> int:
    from shoal.experiment.final_models import averaged_nodes
    from shoal.experiment.run_results import open_run

    with show_warnings(console()):
        run = open_run(parsed.run)
        try:
            run.save_model(parsed.out, parsed.node)
        except ExperimentError as error:
            error.add_note(f"The model is built from {run.folder.experiment}: its files and classes must still exist.")
            raise
    whose = f"node {parsed.node}"
    if parsed.node == "average":
        whose = f"{len(averaged_nodes(run.folder, run.summary))} of {run.summary['nodes']} nodes, averaged,"
    print_line(f"the final model of {whose} in {run.folder.path}: {parsed.out}")
    return 0


def _node(text: str) -> int | str:
    if text == "average":
        return text
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected the number of a node, or 'average'")
    return int(text)


def _safetensors_path(text: str) -> Path:
    if Path(text).suffix != ".safetensors":
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that ends in .safetensors")
    return Path(text)
