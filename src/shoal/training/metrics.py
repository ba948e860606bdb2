"""Metrics: the scores of a model on its test samples.

Each batch gives sums (`batch_sums`). Sums are added over batches and turned into scores at the end (`scores`).

    accuracy     the share of targets that have the largest output
    top5         the share of targets among the five largest outputs
    per-class    the accuracy of each class, as "class 0", "class 1", …
    loss         the mean of the training loss
    perplexity   exp of the mean cross-entropy of a target
    rmse         the root of the mean squared error

Without test samples there are no scores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.dataset import Data, Task
from shoal.errors import ExperimentError
from shoal.schema import nearest

if TYPE_CHECKING:
    import torch

BY_TASK: dict[Task, tuple[str, ...]] = {
    "classification": ("accuracy", "top5", "per-class", "perplexity", "loss"),
    "sequence": ("accuracy", "top5", "perplexity", "loss"),
    "regression": ("rmse", "loss"),
}
"""The metrics that are defined for each task."""
DEFAULT: dict[Task, tuple[str, ...]] = {
    "classification": ("accuracy", "loss"),
    "sequence": ("accuracy", "perplexity", "loss"),
    "regression": ("rmse", "loss"),
}
"""The metrics of an experiment that does not set `evaluation.metrics`."""
TOP = 5


class Metrics:
    """The metrics of an experiment on one data set."""

    def __init__(self, data: Data, names: Sequence[str] | None = None) -> None:
        self.names = DEFAULT[data.task] if names is None else tuple(dict.fromkeys([*names, "loss"]))
        defined = BY_TASK[data.task]
        if problems := unknown_metrics(self.names) or [
            f"evaluation.metrics: {name!r} is not defined for a {data.task} task; use {', '.join(defined)}"
            for name in self.names
            if name not in defined
        ]:
            raise ExperimentError(problems)
        self._task: Task = data.task
        self._classes = data.classes
        self._padding = data.padding

    def check(self, score: str) -> None:
        """Raise ExperimentError unless `score` will be reported. It is a metric's name, or "class 3"."""
        number = re.fullmatch(r"class (\d+)", score)
        name = score if number is None else "per-class"
        if name not in BY_TASK[self._task]:
            use = ", ".join(known for known in self.names if known != "per-class")
            raise ExperimentError([f"evaluation.metric = {score!r}: not defined for a {self._task} task; use {use}"])
        if name not in self.names:
            raise ExperimentError(
                [f"evaluation.metric = {score!r}: it would not be measured; add {name!r} to evaluation.metrics"]
            )
        if number is not None and int(number[1]) >= self._classes:
            raise ExperimentError([f"evaluation.metric = {score!r}: classes are numbered 0 to {self._classes - 1}"])

    def batch_sums(self, outputs: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the sums of one batch. `outputs` are the model's outputs, `loss` is the mean over the batch."""
        import torch

        if self._task == "regression":
            errors = outputs.reshape(targets.shape) - targets
            count = torch.tensor(targets.numel(), device=outputs.device)
            return {"count": count, "loss": loss * count, "squares": (errors * errors).sum()}
        outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        counts = torch.ones_like(targets, dtype=torch.bool) if self._padding is None else targets != self._padding
        hits = (outputs.argmax(1) == targets) & counts
        sums = {"count": counts.sum(), "hits": hits.sum()}
        # The mean over no targets is NaN. A batch of padding must not make the total NaN.
        sums["loss"] = torch.where(sums["count"] > 0, loss * sums["count"], torch.zeros_like(loss))
        if "top5" in self.names:
            best = outputs.topk(min(TOP, outputs.shape[-1]), dim=1).indices
            sums["top5"] = ((best == targets[:, None]).any(1) & counts).sum()
        if "perplexity" in self.names:
            known = torch.where(counts, targets, torch.zeros_like(targets))  # padding may be no valid class
            entropies = torch.nn.functional.cross_entropy(outputs, known, reduction="none")
            sums["cross_entropy"] = torch.where(counts, entropies, torch.zeros_like(entropies)).sum()
        if "per-class" in self.names:
            members = torch.nn.functional.one_hot(targets, self._classes).to(torch.float32)
            sums["class_hits"], sums["class_counts"] = hits.to(torch.float32) @ members, members.sum(0)
        return sums

    def scores(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Return the scores from the sums of all batches; empty if there were no samples."""
        count = float(totals.get("count", 0))
        if not count:
            return {}
        found: dict[str, float] = {}
        for name in self.names:
            if name == "accuracy":
                found[name] = float(totals["hits"]) / count
            elif name == "top5":
                found[name] = float(totals["top5"]) / count
            elif name == "perplexity":
                entropy = float(totals["cross_entropy"]) / count
                found[name] = math.exp(entropy) if entropy < 700 else math.inf
            elif name == "rmse":
                squares = float(totals["squares"]) / count
                found[name] = math.sqrt(squares) if squares >= 0 else math.nan
            elif name == "loss":
                found[name] = float(totals["loss"]) / count
            else:
                pairs = zip(totals["class_hits"].tolist(), totals["class_counts"].tolist(), strict=True)
                found.update({f"class {i}": hits / count for i, (hits, count) in enumerate(pairs) if count})
        return found


def unknown_metrics(names: Sequence[str]) -> list[str]:
    """List the problems of names in `evaluation.metrics` that are not defined for any task."""
    known = set().union(*BY_TASK.values())
    return [f"evaluation.metrics: {name!r} is unknown{nearest(name, known)}" for name in names if name not in known]


def add_sums(totals: dict[str, Any], sums: Mapping[str, Any]) -> None:
    """Add the sums of a batch to `totals`, in place."""
    for name, value in sums.items():
        totals[name] = totals[name] + value if name in totals else value
