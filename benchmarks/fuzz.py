"""Malformed messages: for everything that reads messages, and for the nodes of a run in progress.

    python benchmarks/fuzz.py                          # 1,000,000 for the readers, 10,000 for nodes: some minutes
    python benchmarks/fuzz.py --codec 30000 --node 0   # fewer
    python benchmarks/fuzz.py --seed 7 --case 4644     # repeat one message that failed

A reader must accept a message or reject it with `MessageError`. Any other exception, a hang and growing memory are
failures; each is shown with its seed and case. Nodes under attack must end with the same models as without it. The exit
code is 1 if there was a failure.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from measuring import ROOT, Figure, median, show
from shoal.engines.operating_system import process_memory, release_memory
from shoal.testing import Fuzzer

sys.path.append(str(ROOT / "tests"))  # the tests run a part of this
from attacked_run import AttackedRun
from readers import readers

WARM = 20_000
"""Cases before memory is first measured: by then all libraries are loaded and caches are full."""
AT_A_TIME = 50_000
HOARD = 5_000
"""Models of far rounds for one node: 96 MB. Its mailbox keeps only as many as its budget allows."""


def codecs(cases: int, seed: int) -> tuple[list[Figure], bool]:
    fuzzer = Fuzzer(readers, seed)
    began = time.monotonic()
    warm = min(WARM, cases // 2)
    fuzzer.run(range(warm))
    before, peak = _private_memory(), _peak()
    for start in range(warm, cases, AT_A_TIME):
        fuzzer.run(range(start, min(cases, start + AT_A_TIME)))
        done, seconds = fuzzer.cases, time.monotonic() - began
        print(f"  {done:,} messages, {done / seconds:,.0f} a second, {_private_memory():.1f} MiB", flush=True)
        if fuzzer.failures:
            break
    seconds, grown = time.monotonic() - began, _private_memory() - before
    _show_outcomes(fuzzer)
    for failure in fuzzer.failures:
        print(failure, end="\n\n")
    figures = [
        Figure("messages to readers", fuzzer.cases, "", at_least=cases, note=f"seed {seed}, {seconds:.0f} s"),
        Figure("… accepted", fuzzer.accepted.total(), "", note="and merged, where they are payloads"),
        Figure("… rejected", fuzzer.rejected.total(), ""),
        Figure("… anything else", len(fuzzer.failures), "", at_most=0),
        Figure("… a second", fuzzer.cases / seconds, "", note="one core, mutating and reading"),
        Figure("private memory, growth", grown, "MiB", at_most=16, note=f"from {before:.0f} MiB"),
        Figure("peak memory, growth", _peak() - peak, "MiB", at_most=64),
    ]
    return figures, all(figure.met is not False for figure in figures)


def nodes(messages: int, seed: int, sharing: str, far_models: int) -> tuple[list[Figure], bool]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"sharing": {"name": sharing}}
        attacked = AttackedRun(
            Path(folder), messages, seed, settings, far_models, lambda line: print(f"  {line}", flush=True)
        )
        attacked.run()
    for problem in attacked.problems:
        print(f"  {problem}")
    print("  " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(attacked.sent.items())))
    if not attacked.summary:
        return [], False
    grown = [after - before for before, after in zip(attacked.uss_before, attacked.uss_after, strict=True)]
    figures = [
        Figure(
            f"messages to nodes, {sharing}", attacked.sent.total(), "", note=f"within {attacked.seconds:.1f} s of a run"
        ),
        Figure("… rejected and counted", attacked.summary["messages_rejected"], "", at_least=attacked.must_reject),
        Figure("… late or evicted", attacked.summary["messages_late"], ""),
        Figure("… private memory of a node, growth", median(grown), "MiB", at_most=attacked.grown_mib),
        Figure("… of the node that grew most", max(grown), "MiB", note=f"sent {far_models:,} models of far rounds"),
        Figure(
            "… problems", len(attacked.problems), "", at_most=0, note="failed nodes, other models, memory, tracebacks"
        ),
    ]
    return figures, not attacked.problems


def replay(seed: int, case: int) -> bool:
    """Repeat one message."""
    fuzzer = Fuzzer(readers, seed)
    fuzzer.run([case])
    print(*fuzzer.failures or [f"seed {seed}, case {case}: {'rejected' if fuzzer.rejected else 'accepted'}"])
    return not fuzzer.failures


def _show_outcomes(fuzzer: Fuzzer) -> None:
    table = Table(title="Outcomes", title_justify="left", title_style="bold")
    for column in ("reader", "accepted", "rejected", "mutation", "accepted", "rejected"):
        table.add_column(column, justify="right" if column in ("accepted", "rejected") else "left")
    by_reader = [
        (name, fuzzer.accepted[name], fuzzer.rejected[name]) for name in sorted(fuzzer.accepted | fuzzer.rejected)
    ]
    mutations = sorted({how for how, _ in fuzzer.by_mutation})
    by_mutation = [(how, fuzzer.by_mutation[how, False], fuzzer.by_mutation[how, True]) for how in mutations]
    for row in range(max(len(by_reader), len(by_mutation))):
        cells = [column[row] if row < len(column) else ("", "", "") for column in (by_reader, by_mutation)]
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else cell for half in cells for cell in half))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _private_memory() -> float:
    """Private memory of this process in MiB."""
    gc.collect()
    release_memory()
    used = process_memory()
    return 0.0 if used is None else used.uss


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> bool:
    parser = argparse.ArgumentParser(description="malformed messages, for readers and for nodes")
    parser.add_argument("--codec", type=int, default=1_000_000, help="messages to readers")
    parser.add_argument(
        "--node", type=int, default=10_000, help="messages to the nodes of runs, half of them with secure aggregation"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="repeat only this message")
    given = parser.parse_args()
    if given.case is not None:
        return replay(given.seed, given.case)
    figures: list[Figure] = []
    fine = True
    parts = [
        *([lambda: codecs(given.codec, given.seed)] if given.codec else []),
        *([lambda: nodes(-(-given.node // 2), given.seed, "full", HOARD)] if given.node else []),
        *([lambda: nodes(-(-given.node // 2), given.seed, "secure", 0)] if given.node else []),
    ]
    for part in parts:
        found, passed = part()
        figures += found
        fine = fine and passed
    show(f"Malformed messages, seed {given.seed}", figures)
    return fine


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
