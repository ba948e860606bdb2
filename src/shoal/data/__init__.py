"""Data sets and partitions. Each is named here, and imported only when an experiment asks for it."""

from __future__ import annotations

from shoal.data.dataset import (
    ByOwner,
    Data,
    Dataset,
    Indices,
    LocalData,
    Partition,
    Samples,
    Scaling,
    Shift,
    Shifts,
    Task,
)

DATASETS: dict[str, str] = {
    "digits": "shoal.data.digits:Digits",
    "synthetic": "shoal.data.synthetic:Synthetic",
}

PARTITIONS: dict[str, str] = {
    "iid": "shoal.data.partitions:Iid",
    "shards": "shoal.data.partitions:Shards",
    "dirichlet": "shoal.data.partitions:Dirichlet",
    "classes": "shoal.data.partitions:Classes",
}

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "ByOwner",
    "Data",
    "Dataset",
    "Indices",
    "LocalData",
    "Partition",
    "Samples",
    "Scaling",
    "Shift",
    "Shifts",
    "Task",
]
