"""A run in a few numbers, and all its records as one table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from shoal.results.progress import Outcome
from shoal.results.records import Average, End, Evaluation, Event, Record, Round, RunFolder
from shoal.results.statistics import fairness, statistics
from shoal.results.timing import Evaluations, SentTraffic, target_and_best, target_of


def summarize(
    folder: RunFolder,
    engine: str,
    nodes: int,
    seed: int,
    outcome: Outcome,
    size: int | None = None,
    pace: range | None = None,
) -> dict[str, Any]:
    """Read the records of a run, and write and return its summary. A number that is not finite is None in it.

    `size` counts the nodes with those that serve; `pace` are those whose rounds are the run's. Both are `nodes` when
    not given.
    """
    latest: dict[int, Evaluation] = {}
    rounds: dict[int, int] = {}
    sent: dict[int, SentTraffic] = {}
    ends: dict[int, End] = {}
    events: dict[str, int] = {}
    metric, target = target_of(folder)
    evaluations = Evaluations(metric)
    for node, record in _records(folder, size or nodes):
        evaluations.add(node, record)
        sent.setdefault(node, SentTraffic()).add(record)
        if isinstance(record, Evaluation):
            latest[node] = record
        elif isinstance(record, Round):
            rounds[node] = record.round + 1
        elif isinstance(record, End):
            ends[node] = record
        elif isinstance(record, Event):
            events[record.what] = events.get(record.what, 0) + 1
    latest = {node: e for node, e in latest.items() if node not in outcome.lost} or latest  # models that there are
    last_round = max((e.round for e in latest.values()), default=-1)
    # Looked at by time, nodes are in different rounds at the end, and an offline one was last seen at an earlier tick.
    final = [e for _, e in sorted(latest.items()) if e.round == last_round or e.tick is not None]
    # Averages are evaluated beside each other: the last to be written need not be the last moment's.
    averages = sorted((r for r in folder.read_averages() if isinstance(r, Average)), key=_moment)
    paced = pace or range(nodes)
    survivors = [n for n in paced if n in ends] or [n for n in rounds if n in paced]
    total_bytes = sum(each.bytes for each in sent.values())
    summary: dict[str, Any] = {
        "status": outcome.status,
        "engine": engine,
        "nodes": nodes,
        "seed": seed,
        "rounds": min((rounds.get(n, 0) for n in survivors), default=0),
        "accuracy": statistics(e.scores["accuracy"] for e in final if "accuracy" in e.scores),
        "loss": statistics(e.scores["loss"] for e in final if "loss" in e.scores),
        "metrics": {name: statistics(e.scores[name] for e in final if name in e.scores) for name in _names(final)},
        "fairness": {name: fairness(e.scores[name] for e in final if name in e.scores) for name in _names(final)},
        **target_and_best(evaluations.curve(), metric, target),
        "averaged_model": {**averages[-1].scores, "round": averages[-1].round} if averages else None,
        "consensus_distance": averages[-1].consensus_distance if averages else None,
        "bytes_sent": {"total": total_bytes, "per_node_mean": total_bytes / nodes},
        "messages_sent": sum(each.messages for each in sent.values()),
        "messages_rejected": sum(e.bad_messages for e in ends.values()),
        "messages_unsent": sum(e.unsent_messages for e in ends.values()),
        "messages_late": sum(e.late_messages for e in ends.values()),
        "messages_repeated": sum(e.repeated_messages for e in ends.values()),
        "unauthenticated_connections": sum(e.unauthenticated_connections for e in ends.values())
        + outcome.unauthenticated_connections,
        "time": {
            "wall_s": outcome.wall_s,
            "virtual_s": outcome.virtual_s,
            "startup_s": outcome.startup_s,
            "train_cpu_s": _total(e.train_cpu_s for e in ends.values()),
            "total_cpu_s": _total(e.total_cpu_s for e in ends.values()),
            "padded_s": _total(e.padded_s for e in ends.values()),
        },
        "memory": {
            "uss_mean_mib": _mean(e.uss_mib for e in ends.values()),
            "pss_mean_mib": _mean(e.pss_mib for e in ends.values()),
            "pss_total_mib": _total(e.pss_mib for e in ends.values()),
        },
        "digest": _digest(ends),
        "events": events,
        "lost": {str(node): why for node, why in outcome.lost.items()},
    }
    for key, value in outcome.facts.items():
        place = (
            summary["time"] if key in summary["time"] else summary["memory"] if key in summary["memory"] else summary
        )
        place[key] = value
    folder.summary.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return folder.read_summary()


def _moment(average: Average) -> int:
    return average.round if average.tick is None else average.tick


def _names(evaluations: list[Evaluation]) -> list[str]:
    return sorted({name for evaluation in evaluations for name in evaluation.scores})


def write_metrics(folder: RunFolder, nodes: int) -> None:
    """All records as columns; a record's fields that are not its own kind's are null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"node": node, **_row(record)} for node, record in _records(folder, nodes)]
    rows += [{"node": None, **_row(record)} for record in folder.read_averages()]
    names = dict.fromkeys(["node", "kind", "round", "time", *(name for row in rows for name in row)])
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table(columns), folder.metrics)


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(record)
    return {**{k: v for k, v in row.items() if k != "scores"}, **row.get("scores", {})}


def _records(folder: RunFolder, nodes: int) -> Iterator[tuple[int, Record]]:
    for node in range(nodes):
        for record in folder.read(node):
            yield node, record


def _digest(ends: dict[int, End]) -> str | None:
    """A hash of all final models, in order of node."""
    if not ends:
        return None
    combined = hashlib.sha256()
    for node, end in sorted(ends.items()):
        combined.update(f"{node}:{end.digest}\n".encode())
    return combined.hexdigest()


def _total(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return math.fsum(found) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return math.fsum(found) / len(found) if found else None
