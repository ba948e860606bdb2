"""Cuts the records of a run back to a checkpoint, so that a resumed run appends to them as if it had not stopped."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shoal.results.checkpoints import Manifest, SavedNode
from shoal.results.records import (
    NOT_JOINED,
    Average,
    Evaluation,
    Event,
    Record,
    Round,
    RunFolder,
    decode,
    encode,
    replacing,
)
from shoal.types import NodeId


@dataclass(frozen=True)
class Discarded:
    """What a node did after the checkpoint, and does again."""

    rounds: int
    messages: int


def cut_records(folder: RunFolder, manifest: Manifest) -> dict[NodeId, Discarded]:
    """Cut the records of all nodes and averages. Returns what was discarded, by node."""
    discarded = {saved.node: _cut_node(folder, manifest, saved) for saved in manifest.nodes}
    absent = {int(node): reason for node, reason in manifest.failed.items()}
    for node in [*manifest.without_state, *(node for node, reason in absent.items() if reason == NOT_JOINED)]:
        folder.node(node).unlink(missing_ok=True)
    for node in absent:
        _cut_failed(folder, manifest, node)
    _cut_averages(folder, manifest)
    return discarded


def _cut_node(folder: RunFolder, manifest: Manifest, saved: SavedNode) -> Discarded:
    path = folder.node(saved.node)
    content = path.read_bytes() if path.exists() else b""
    before, after = content[: saved.records], content[saved.records :]
    later = [decode(line) for line in after.split(b"\n")[:-1]]
    kept = [encode(record) + b"\n" for record in later if _is_before(record, manifest)]
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"".join([before, *kept]))
    rounds = [record for record in later if isinstance(record, Round)]
    earlier = next((r for line in reversed(before.split(b"\n")) if line and isinstance(r := decode(line), Round)), None)
    messages = rounds[-1].messages_sent - (earlier.messages_sent if earlier else 0) if rounds else 0
    # Of a long run, not every round has a record.
    count = max(len(rounds), rounds[-1].round - saved.round) if rounds else 0
    return Discarded(count, messages)


def _cut_failed(folder: RunFolder, manifest: Manifest, node: NodeId) -> None:
    """Cut the records of a node that had failed: discard what it did if it was restarted after the checkpoint."""
    path = folder.node(node)
    if not path.exists():
        return
    records = list(folder.read(node))
    kept = list(itertools.takewhile(lambda record: not _is_restart(record, manifest), records))
    if len(kept) < len(records):
        with replacing(path) as unfinished:
            unfinished.write_bytes(b"".join(encode(record) + b"\n" for record in kept))


def _is_restart(record: Record, manifest: Manifest) -> bool:
    """Whether a fault restarted the node after the checkpoint."""
    if not isinstance(record, Event) or record.what != "fault" or record.time <= manifest.time:
        return False
    return record.detail.endswith((" restart", " restarts"))


def _is_before(record: Record, manifest: Manifest) -> bool:
    """Whether a record that a node wrote after it saved its state is older than the checkpoint.

    If all nodes start at the same time, nodes that saved their state before that have such records.
    """
    if not manifest.same_start:
        return False
    if isinstance(record, Evaluation):
        return record.tick is not None and record.tick <= manifest.ticks
    return isinstance(record, Event) and record.what == "fault" and record.time <= manifest.time


def _cut_averages(folder: RunFolder, manifest: Manifest) -> None:
    averages = [record for record in folder.read_averages() if isinstance(record, Average)]
    kept = [r for r in averages if (r.round <= manifest.round if r.tick is None else r.tick <= manifest.ticks)]
    if len(kept) < len(averages):
        with replacing(folder.averages) as unfinished:
            unfinished.write_bytes(b"".join(encode(record) + b"\n" for record in kept))
