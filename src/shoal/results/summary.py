"""The summary of a run."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.results.frames import RunRecords, last_of_each, read_records
from shoal.results.progress import Outcome
from shoal.results.records import DIVERGED, End, RunFolder, replacing
from shoal.results.statistics import fairness, statistics
from shoal.results.timing import curve_of, split_of, target_and_best, target_of
from shoal.types import NodeId

KEYS = ("status", "engine", "nodes", "seed", "rounds", "metrics", "bytes_sent", "time", "memory", "digest")
"""Keys that every summary has. A file without them was written by another program."""


def summarize(
    folder: RunFolder,
    engine: str,
    nodes: int,
    seed: int,
    outcome: Outcome,
    round_nodes: range | None = None,
    records: RunRecords | None = None,
) -> dict[str, Any]:
    """Write and return the summary of a run. A number that is not finite becomes None.

    `round_nodes` are the nodes whose rounds count as rounds of the run; default: all `nodes`. `records` are those of
    the run, if they have been read before.
    """
    records = read_records(folder) if records is None else records
    summary = _summary(folder, records, engine, nodes, seed, outcome, round_nodes)
    with replacing(folder.summary) as unfinished:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return folder.read_summary()


def read_or_summarize(folder: RunFolder, records: RunRecords | None = None) -> dict[str, Any]:
    """Return the summary of a run. If there is none, return one of its records, with the status "unfinished".

    A run has no summary while it is in progress, or if its coordinator was killed. `records` are those of the run, if
    they have been read before. Raises `DataError` if a summary is damaged, or the folder holds no run.
    """
    if folder.summary.exists():
        summary = folder.read_summary()
        if missing := [key for key in KEYS if key not in summary]:
            raise DataError(f"{folder.summary} was not written by a run: it has no key {missing[0]!r}")
        return summary
    experiment = folder.read_experiment()
    if not experiment:
        raise DataError(f"{folder.path} holds no run: it has neither summary.json nor experiment.toml")
    try:
        engine, nodes, seed = (experiment[key] for key in ("engine", "nodes", "seed"))
    except KeyError as error:
        raise DataError(f"{folder.experiment} was not written by a run: it has no key {error}") from error
    if not isinstance(nodes, int) or nodes < 1:
        raise DataError(f"{folder.experiment} was not written by a run: nodes = {nodes!r}; expected a positive integer")
    records = read_records(folder) if records is None else records
    last = records.duration
    servers = [node for node in records.last_rounds() if node >= nodes]
    is_simulation = engine == "simulation"
    # The rounds of a server are the rounds of the run.
    round_nodes = range(min(servers), min(servers) + 1) if servers else None
    outcome = Outcome(
        "unfinished",
        wall_s=None if is_simulation else last,
        startup_s=None,
        virtual_s=last if is_simulation else None,
    )
    summary = _summary(folder, records, engine, nodes, seed, outcome, round_nodes)
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(summary))  # as it would be read from the file
    return found


def _summary(
    folder: RunFolder,
    records: RunRecords,
    engine: str,
    nodes: int,
    seed: int,
    outcome: Outcome,
    round_nodes: range | None = None,
) -> dict[str, Any]:
    metric, target = target_of(folder)
    # Averages are evaluated in parallel: the last line need not be the last evaluation.
    averages = sorted(records.averages, key=lambda average: average.moment)
    average = averages[-1] if averages else None
    latest = _LatestEvaluations(records)
    end_of_node = {node: end for _, node, end in records.ends}
    ends = end_of_node.values()
    summary: dict[str, Any] = {
        "status": outcome.status,
        "engine": engine,
        "nodes": nodes,
        "seed": seed,
        "rounds": _finished_rounds(records, round_nodes or range(nodes)),
        "split": split_of(folder),
        **_scores(latest.final_scores(outcome.lost)),
        **target_and_best(curve_of(records, metric), metric, target),
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
        "digest": _digest(end_of_node),
        "events": _events(records),
        "lost": {str(node): why for node, why in outcome.lost.items()},
        "diverged": _diverged_nodes(records, latest),
    }
    for key, value in outcome.facts.items():
        table = next((summary[name] for name in ("time", "memory") if key in summary[name]), summary)
        table[key] = value
    return summary


class _LatestEvaluations:
    """The latest evaluation of each node."""

    def __init__(self, records: RunRecords) -> None:
        evaluations = records.evaluations
        self._nodes, last = last_of_each(evaluations.node)
        self._rounds, self._ticks = evaluations.round[last], evaluations.tick[last]
        self._scores: dict[str, tuple[NDArray[np.bool_], NDArray[np.float64]]] = {}
        """Of each metric, whether the latest evaluation of a node measured it, and the score."""
        for metric, (at, scores) in evaluations.values.items():
            found = np.full(len(evaluations.node), -1)
            found[at] = np.arange(len(at))
            self._scores[metric] = found[last] >= 0, scores[found[last]]

    def diverged_nodes(self) -> set[NodeId]:
        """Return the nodes with a score that is not finite."""
        wrong = [measured & ~np.isfinite(scores) for measured, scores in self._scores.values()]
        return set(self._nodes[np.logical_or.reduce(wrong)].tolist()) if wrong else set()

    def final_scores(self, lost: Collection[NodeId]) -> dict[str, list[float]]:
        """Return the scores of the last evaluation of each node, by metric, without failed nodes if others remain.

        If nodes are evaluated by rounds (`evaluation.every`), only evaluations of the last evaluated round are
        returned. If all nodes are evaluated at fixed times (`evaluation.seconds`; a tick is the number of such an
        evaluation), the latest evaluation of every node is returned: at the end nodes are in different rounds, and the
        latest evaluation of an offline node has an earlier tick.
        """
        surviving = ~np.isin(self._nodes, list(lost))
        if not surviving.any():
            surviving[:] = True
        last_round = self._rounds[surviving].max(initial=-1)
        final = surviving & ((self._rounds == last_round) | (self._ticks >= 0))
        found = {name: scores[measured & final].tolist() for name, (measured, scores) in self._scores.items()}
        return {name: found[name] for name in sorted(found) if found[name]}


def _diverged_nodes(records: RunRecords, latest: _LatestEvaluations) -> list[NodeId]:
    """Return the nodes whose training loss, or whose latest evaluation, was not finite."""
    trained = {node for _, node, event in records.events if event.what == DIVERGED}
    return sorted(trained | latest.diverged_nodes())


def _finished_rounds(records: RunRecords, nodes: range) -> int:
    """Return the minimum number of finished rounds over `nodes`.

    If at least one of them reached its end, nodes that did not are left out.
    """
    rounds = records.last_rounds()
    ended = [node for _, node, _ in records.ends if node in nodes]
    return min((rounds.get(node, -1) + 1 for node in ended or rounds.keys() & nodes), default=0)


def _events(records: RunRecords) -> dict[str, int]:
    found: Counter[str] = Counter()
    for _, _, event in records.events:
        found[event.what] += event.count
    return dict(found)


def _scores(values: Mapping[str, list[float]]) -> dict[str, Any]:
    return {
        "accuracy": statistics(values.get("accuracy", ())),
        "loss": statistics(values.get("loss", ())),
        "metrics": {name: statistics(found) for name, found in values.items()},
        "fairness": {name: fairness(found) for name, found in values.items()},
    }


def _traffic(records: RunRecords, nodes: int) -> dict[str, Any]:
    sent, ends = records.sent().by_node.values(), [end for _, _, end in records.ends]
    total = sum(count for count, _ in sent)
    return {
        "bytes_sent": {"total": total, "per_node_mean": total / nodes},
        "messages_sent": sum(messages for _, messages in sent),
        "messages_rejected": sum(e.bad_messages for e in ends),
        "messages_unsent": sum(e.unsent_messages for e in ends),
        "messages_late": sum(e.late_messages for e in ends),
        "messages_repeated": sum(e.repeated_messages for e in ends),
    }


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
