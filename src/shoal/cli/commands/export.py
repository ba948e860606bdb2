"""`shoal export`: the curves, the experiment and the summary of runs for TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.arguments import existing_run, writing
from shoal.cli.display import Display, console, print_line, show_warnings
from shoal.errors import DataError, ExperimentError
from shoal.results.exports.target import TARGETS
from shoal.results.progress_text import ProgressRow
from shoal.results.records import RunFolder
from shoal.results.run_lock import is_locked
from shoal.schema import nearest
from shoal.types import NodeId, parse_node_ids

OUT = Path("exports")
"""The folder of all exports, unless the user names another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Export runs to TensorBoard, MLflow or Weights & Biases (offline): curves, the experiment and the summary."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="run",
                        help="the folder of a run, a folder above it, or the name of an experiment")  # fmt: skip
    parser.add_argument("--to", required=True, metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to write to (default: exports/TARGET)")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--nodes", metavar="IDS", help="export also the curves of these nodes, such as 0-3,8")
    parser.set_defaults(command=export)


def export(parsed: argparse.Namespace) -> int:
    if parsed.to not in TARGETS:
        hint = nearest(parsed.to, TARGETS)
        if parsed.to == "safetensors":
            hint = "; 'shoal export-model RUN FILE.safetensors' writes final models"
        raise ExperimentError([f"unknown target {parsed.to!r}{hint}"], "--to")
    if parsed.follow and len(parsed.runs) > 1:
        raise ExperimentError([f"it takes one run, and {len(parsed.runs)} are given"], "--follow")
    out = parsed.out or OUT / parsed.to
    screen = console()
    problems: list[str] = []
    for folder in [existing_run(path, "export") for path in parsed.runs]:
        try:
            with show_warnings(screen) as display:
                place = _export(folder, parsed.to, out, _nodes(parsed.nodes, folder), parsed.follow, display)
        except DataError as error:  # such as a run that was exported before: the others can be exported
            problems.append(str(error))
        else:
            print_line(f"{folder.path}: {place}", screen)
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    return 0


def _export(folder: RunFolder, to: str, out: Path, nodes: list[NodeId], follow: bool, display: Display) -> str:
    from shoal.results.exports.follow import export_run

    display.begin(f"reading {folder.path}")
    if is_locked(folder) and not follow:
        display.notice(
            f"{folder.path} is in progress: only the records so far are exported; with --follow, the export goes on"
        )

    def show(points: int, in_progress: bool) -> None:
        what = "following the run" if in_progress else "exporting"
        count = f"{points:,} {'point' if points == 1 else 'points'}"
        display.rows([ProgressRow([what, count], stage=what)])

    with writing(out):
        return export_run(folder, to, out, nodes, follow, show)


def _nodes(text: str | None, folder: RunFolder) -> list[NodeId]:
    if text is None:
        return []
    nodes = folder.read_experiment().get("nodes", 0)
    known = max([nodes - 1, *folder.recorded_nodes()]) + 1  # service nodes have records too
    try:
        return parse_node_ids(text, known)
    except ValueError as error:
        raise ExperimentError([str(error)], "--nodes") from error
