"""A reader of the offline files of Weights & Biases: Protocol Buffers in the log format of LevelDB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER = 7
BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class WandbFile:
    """What a file of one run has."""

    project: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def read_wandb_file(path: Path) -> WandbFile:
    found = WandbFile()
    for record in _records(path.read_bytes()):
        if record.HasField("run"):
            found.project, found.name = record.run.project, record.run.display_name
            found.config.update(_items(record.run.config.update))
        elif record.HasField("history"):
            found.history.append(_items(record.history.item))
        elif record.HasField("summary"):
            found.summary.update(_items(record.summary.update))
    return found


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(content: bytes) -> Iterator[Any]:
    """Yield the records; one that does not fit into a block continues in the next one."""
    position, parts = HEADER, b""
    while position + HEADER <= len(content):
        if BLOCK - position % BLOCK < HEADER:  # the end of a block is empty
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        parts += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
