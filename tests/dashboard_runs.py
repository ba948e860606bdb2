"""Runs for tests of the page: records with curves, edges, spans and failed nodes, written without an engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import tomli_w

from shoal.results.records import Average, End, Evaluation, Event, Record, Round, RunFolder, encode

ROUND_S = 1.0
"""Seconds of a round."""


class WrittenRun:
    """A run that grows by one round at a time. Node `failing` crashes after a third of the rounds."""

    def __init__(
        self,
        root: Path,
        name: str = "written",
        nodes: int = 8,
        rounds: int = 12,
        *,
        seed: int = 1,
        degree: int = 2,
        evaluate_every: int = 2,
        activity: bool = True,
        dynamic: bool = False,
        failing: int | None = None,
    ) -> None:
        self.folder = RunFolder(root / f"2026010{seed}-120000-abcdef")
        for part in ("nodes", "checkpoints"):
            (self.folder.path / part).mkdir(parents=True)
        self.nodes, self.rounds, self.round = nodes, rounds, 0
        self._random = np.random.default_rng([seed])
        self._speed: list[float] = (0.4 + 0.4 * self._random.random(nodes)).tolist()
        self._degree, self._every, self._activity, self._dynamic = degree, evaluate_every, activity, dynamic
        self._failing = failing
        experiment = {
            "name": name,
            "nodes": nodes,
            "seed": seed,
            "engine": "simulation",
            "algorithm": {"name": "dpsgd", "rounds": rounds},
            "topology": {"name": "regular", "degree": degree},
            "sharing": {"name": "full"},
        }
        self.folder.experiment.write_text(tomli_w.dumps(experiment))

    def advance(self, rounds: int = 1) -> None:
        """Write the next rounds of all nodes, with the evaluations."""
        for _ in range(rounds):
            r, end = self.round, (self.round + 1) * ROUND_S
            scores = {}
            for node in range(self.nodes):
                records: list[Record] = [self._record(node, r, end)]
                if self._failing == node and r >= self.rounds // 3:
                    records = [Event("fault", end, f"node {node} crashes")] if r == self.rounds // 3 else []
                elif (r + 1) % self._every == 0:
                    accuracy = 1 - 0.9 * float(np.exp(-(r + 1) / (0.4 * self.rounds))) - 0.15 * self._speed[node]
                    scores[node] = {"accuracy": float(accuracy), "loss": 2.5 * (1 - float(accuracy))}
                    records.append(Evaluation(r, end + 0.01 * self._speed[node], scores[node]))
                self._append(self.folder.node(node), records)
            if scores:
                mean = {m: float(np.mean([own[m] for own in scores.values()])) for m in ("accuracy", "loss")}
                averaged = {"accuracy": mean["accuracy"] + 0.04, "loss": mean["loss"] - 0.1}
                self._append(self.folder.averages, [Average(r, end, len(scores), 1 / (r + 1), averaged)])
            self.round += 1

    def _record(self, node: int, r: int, end: float) -> Round:
        count = (r + 1) * self._degree
        record = Round(r, end - 0.05 + 0.05 * self._speed[node], 2.3 / (r + 1), 1000 * count, count)
        if not self._activity:
            return record
        start, trained = r * ROUND_S, r * ROUND_S + self._speed[node]
        spans = [("train", start, trained), ("send", trained, trained + 0.1), ("wait", trained + 0.1, end - 0.02)]
        peers = None
        if self._dynamic:
            others = [n for n in range(self.nodes) if n != node]
            peers = sorted(map(int, self._random.choice(others, self._degree, replace=False)))
        elif r == 0:
            steps = [s * k for k in range(1, self._degree // 2 + 1) for s in (-1, 1)]
            peers = sorted({(node + step) % self.nodes for step in steps})
        return msgspec.structs.replace(record, sent_to=peers, spans=spans)

    def finish(self, status: str = "completed") -> None:
        """Write the remaining rounds, the end of all nodes, and the summary."""
        self.advance(self.rounds - self.round)
        count = self.rounds * self._degree
        lost = {} if self._failing is None else {str(self._failing): "crashed"}
        for node in range(self.nodes):
            if str(node) not in lost:
                end = End(self.rounds * ROUND_S + 0.1, "ab", 1000 * count, count, 0, 0)
                self._append(self.folder.node(node), [end])
        metrics = {"accuracy": {"mean": 0.8, "std": 0.0, "min": 0.8, "max": 0.8}}
        facts = {"engine": "simulation", "nodes": self.nodes, "seed": 1, "rounds": self.rounds}
        summary = {"status": status, **facts, "metrics": metrics, "lost": lost}
        self.folder.summary.write_bytes(msgspec.json.encode(summary))

    @staticmethod
    def _append(path: Path, records: list[Record]) -> None:
        with path.open("ab") as file:
            file.write(b"".join(encode(record) + b"\n" for record in records))
