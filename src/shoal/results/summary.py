"""The summary of a run, and all its records as one table."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from shoal.errors import DataError
from shoal.results.progress import Outcome
from shoal.results.records import DIVERGED, Average, End, Evaluation, Event, Record, Round, RunFolder, replacing
from shoal.results.statistics import fairness, statistics
from shoal.results.timing import Evaluations, SentTraffic, split_of, target_and_best, target_of
from shoal.types import NodeId

ROWS_AT_ONCE = 100_000
"""Records that are converted to columns at once. As columns they need a tenth of the memory."""


def summarize(
    folder: RunFolder,
    engine: str,
    nodes: int,
    seed: int,
    outcome: Outcome,
    round_nodes: range | None = None,
) -> dict[str, Any]:
    """Read the records of a run; write and return its summary. A number that is not finite becomes None.

    `round_nodes` are the nodes whose rounds count as rounds of the run; default: all `nodes`.
    """
    summary = _summary(folder, engine, nodes, seed, outcome, round_nodes)
    with replacing(folder.summary) as unfinished:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return folder.read_summary()


def read_or_summarize(folder: RunFolder) -> dict[str, Any]:
    """Return the summary of a run. If there is none, return one of its records, with the status "unfinished".

    A run has no summary while it is in progress, or if its coordinator was killed. Raises `DataError` if a summary is
    damaged, or the folder holds no run.
    """
    if folder.summary.exists():
        return folder.read_summary()
    experiment = folder.read_experiment()
    if not experiment:
        raise DataError(f"{folder.path} holds no run: it has neither summary.json nor experiment.toml")
    try:
        engine, nodes, seed = (experiment[key] for key in ("engine", "nodes", "seed"))
    except KeyError as error:
        raise DataError(f"{folder.experiment} was not written by a run: it has no key {error}") from error
    last, servers = 0.0, set()
    for node, record in folder.read_all():
        last = max(last, record.time)
        if node >= nodes and isinstance(record, Round):
            servers.add(node)
    is_simulation = engine == "simulation"
    # The rounds of a server are the rounds of the run.
    round_nodes = range(min(servers), min(servers) + 1) if servers else None
    outcome = Outcome(
        "unfinished",
        wall_s=None if is_simulation else last,
        startup_s=None,
        virtual_s=last if is_simulation else None,
    )
    summary = _summary(folder, engine, nodes, seed, outcome, round_nodes)
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(summary))  # as it would be read from the file
    return found


def _summary(
    folder: RunFolder, engine: str, nodes: int, seed: int, outcome: Outcome, round_nodes: range | None = None
) -> dict[str, Any]:
    metric, target = target_of(folder)
    records = _Records(metric)
    for node, record in folder.read_all():
        records.add(node, record)
    # Averages are evaluated in parallel: the last line need not be the last evaluation.
    averages = sorted((r for r in folder.read_averages() if isinstance(r, Average)), key=_moment)
    average = averages[-1] if averages else None
    ends = records.ends.values()
    summary: dict[str, Any] = {
        "status": outcome.status,
        "engine": engine,
        "nodes": nodes,
        "seed": seed,
        "rounds": records.finished_rounds(round_nodes or range(nodes)),
        "split": split_of(folder),
        **_scores(records.final_evaluations(outcome.lost)),
        **target_and_best(records.curve.curve(), metric, target),
        "averaged_model": {**average.scores, "round": average.round} if average else None,
        "consensus_distance": average.consensus_distance if average else None,
        **_traffic(records, nodes),
        "unauthenticated_connections": sum(e.unauthenticated_connections for e in ends)
        + outcome.unauthenticated_connections,
        "time": {
            "wall_s": outcome.wall_s,
            "virtual_s": outcome.virtual_s,
            "startup_s": outcome.startup_s,
            "train_cpu_s": _total(e.train_cpu_s for e in ends),
            "total_cpu_s": _total(e.total_cpu_s for e in ends),
            "padded_s": _total(e.padded_s for e in ends),
        },
        "memory": {
            "uss_mean_mib": _mean(e.uss_mib for e in ends),
            "pss_mean_mib": _mean(e.pss_mib for e in ends),
            "pss_total_mib": _total(e.pss_mib for e in ends),
        },
        "digest": _digest(records.ends),
        "events": dict(records.events),
        "lost": {str(node): why for node, why in outcome.lost.items()},
        "diverged": records.diverged_nodes(),
    }
    for key, value in outcome.facts.items():
        table = next((summary[name] for name in ("time", "memory") if key in summary[name]), summary)
        table[key] = value
    return summary


class _Records:
    """What a summary needs of the records of all nodes."""

    def __init__(self, metric: str | None) -> None:
        self.curve = Evaluations(metric)
        self.latest: dict[NodeId, Evaluation] = {}
        self.rounds: dict[NodeId, int] = {}
        self.sent: dict[NodeId, SentTraffic] = {}
        self.ends: dict[NodeId, End] = {}
        self.events: Counter[str] = Counter()
        self._diverged: set[NodeId] = set()

    def add(self, node: NodeId, record: Record) -> None:
        self.curve.add(node, record)
        self.sent.setdefault(node, SentTraffic()).add(record)
        if isinstance(record, Evaluation):
            self.latest[node] = record
        elif isinstance(record, Round):
            self.rounds[node] = record.round + 1
        elif isinstance(record, End):
            self.ends[node] = record
        elif isinstance(record, Event):
            self.events[record.what] += record.count
            if record.what == DIVERGED:
                self._diverged.add(node)

    def diverged_nodes(self) -> list[NodeId]:
        """Return the nodes whose training loss, or whose latest evaluation, was not finite."""
        evaluated = {n for n, e in self.latest.items() if not all(math.isfinite(s) for s in e.scores.values())}
        return sorted(self._diverged | evaluated)

    def finished_rounds(self, nodes: range) -> int:
        """Return the minimum number of finished rounds over `nodes`.

        If at least one of them reached its end, nodes that did not are left out.
        """
        surviving = [node for node in nodes if node in self.ends] or [node for node in self.rounds if node in nodes]
        return min((self.rounds.get(node, 0) for node in surviving), default=0)

    def final_evaluations(self, lost: Collection[NodeId]) -> list[Evaluation]:
        """Return the last evaluation of each node, without failed nodes if others remain.

        If nodes are evaluated by rounds (`evaluation.every`), only evaluations of the last evaluated round are
        returned. If all nodes are evaluated at fixed times (`evaluation.seconds`; a tick is the number of such an
        evaluation), the latest evaluation of every node is returned: at the end nodes are in different rounds, and the
        latest evaluation of an offline node has an earlier tick.
        """
        latest = {node: e for node, e in self.latest.items() if node not in lost} or self.latest
        last_round = max((e.round for e in latest.values()), default=-1)
        return [e for _, e in sorted(latest.items()) if e.round == last_round or e.tick is not None]


def _moment(average: Average) -> int:
    return average.round if average.tick is None else average.tick


def _scores(evaluations: list[Evaluation]) -> dict[str, Any]:
    names = sorted({name for evaluation in evaluations for name in evaluation.scores})
    values = {name: [e.scores[name] for e in evaluations if name in e.scores] for name in names}
    return {
        "accuracy": statistics(values.get("accuracy", ())),
        "loss": statistics(values.get("loss", ())),
        "metrics": {name: statistics(found) for name, found in values.items()},
        "fairness": {name: fairness(found) for name, found in values.items()},
    }


def _traffic(records: _Records, nodes: int) -> dict[str, Any]:
    total, ends = sum(sent.bytes for sent in records.sent.values()), records.ends.values()
    return {
        "bytes_sent": {"total": total, "per_node_mean": total / nodes},
        "messages_sent": sum(sent.messages for sent in records.sent.values()),
        "messages_rejected": sum(e.bad_messages for e in ends),
        "messages_unsent": sum(e.unsent_messages for e in ends),
        "messages_late": sum(e.late_messages for e in ends),
        "messages_repeated": sum(e.repeated_messages for e in ends),
    }


def write_metrics(folder: RunFolder) -> None:
    """Write all records as columns; fields that a kind of record does not have are null.

    `sent_to` and `spans` are lists, not columns: `activity.py` reads them from the records.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    averages = ((None, record) for record in folder.read_averages())
    records = itertools.chain(folder.read_all(), averages)
    tables = []
    while rows := [_row(node, record) for node, record in itertools.islice(records, ROWS_AT_ONCE)]:
        names = dict.fromkeys(["node", "kind", "round", "time", *(name for row in rows for name in row)])
        tables.append(pa.table({name: [row.get(name) for row in rows] for name in names}))
    empty = pa.table({name: [] for name in ("node", "kind", "round", "time")})
    with replacing(folder.metrics) as unfinished:
        pq.write_table(pa.concat_tables(tables or [empty], promote_options="permissive"), unfinished)


def _row(node: NodeId | None, record: Record) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(record)
    scores = row.pop("scores", {})
    for name in ("sent_to", "spans"):
        row.pop(name, None)
    return {"node": node, **row, **scores}


def _digest(ends: dict[NodeId, End]) -> str | None:
    """Return a hash of all final models, in the order of nodes."""
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
