"""data.json: the training samples that each node holds. Both engines write it when the nodes start."""

from __future__ import annotations

import msgspec

from shoal.errors import DataError
from shoal.results.records import RunFolder, replacing

MAX_COUNTS = 5_000_000
"""Class counts of all nodes up to which the file has them: 10,000 nodes with 500 classes."""


class NodeData(msgspec.Struct, frozen=True):
    """The training samples of all training nodes, by node id."""

    samples: list[int]
    """The number of samples of each node."""
    class_counts: list[list[int]] | None = None
    """The number of samples of each class, for each node. None if samples have no classes, as in a regression task, or
    if there are more than `MAX_COUNTS` counts."""


def write_node_data(folder: RunFolder, data: NodeData) -> None:
    with replacing(folder.data) as unfinished:
        unfinished.write_bytes(msgspec.json.encode(data) + b"\n")


def read_node_data(folder: RunFolder) -> NodeData:
    """Read data.json. Raises `DataError` if it is missing, as in a run of an earlier version, or damaged."""
    try:
        data = msgspec.json.decode(folder.data.read_bytes(), type=NodeData)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder.path} has no data.json with the data of each node: the run has not started, or an earlier "
            "version of Shoal wrote it; run the experiment again"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise DataError(f"{folder.data} cannot be read: {error}") from error
    counts = data.class_counts
    if counts is not None and (len(counts) != len(data.samples) or len({len(row) for row in counts}) > 1):
        raise DataError(f"{folder.data} is damaged: class_counts needs one row of equal length for each node")
    return data
