"""The checkpoints of a run.

    checkpoints/
      <id>.npy                     the final models
      round-<r>/<id>.safetensors   the state of each node after round r
      round-<r>/checkpoint.json    the manifest: written last, when every node has saved its state
      kept/                        models that are evaluated after the run
      latest/<id>-<r>.safetensors  the latest states, of algorithms whose nodes do not wait for each other

A checkpoint is valid if it has a manifest and every file in it has the size and the hash of the manifest.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.errors import CheckpointError
from shoal.results.records import RunFolder, replacing, writing_to
from shoal.results.state_files import StateFile, matches
from shoal.types import NodeId

FORMAT = 1
"""The version of the files. A checkpoint of another version cannot be read."""
MANIFEST = "checkpoint.json"


class SavedNode(msgspec.Struct, frozen=True):
    """What a checkpoint needs to know of the saved state of one node."""

    node: NodeId
    round: int
    """The round after which the state was saved."""
    file: StateFile
    time: float
    """When, in seconds of the run's clock."""
    records: int
    """The size of the node's records at that time, in bytes."""
    ticks: int = 0
    """The number of evaluations by the clock at that time."""
    events: int = 0
    """The number of timed events of the environment at that time, in the simulation."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a checkpoint."""

    format: int = FORMAT
    round: int
    """The round after which nodes saved their states; of nodes that do not wait for each other, the earliest round."""
    experiment: str
    """A hash of the experiment."""
    base: str
    """The folder that relative paths in the experiment refer to."""
    versions: dict[str, str]
    time: float
    """When the last node saved its state, in seconds of the run's clock."""
    wall_s: float
    """The wall time of the run until then."""
    created: float
    """When the manifest was written, in seconds since 1970."""
    cut_by_time: bool
    """Whether nodes do not wait for each other: their states are of different rounds, and messages may be lost."""
    same_start: bool
    """Whether all nodes start at `time` when the run is resumed; otherwise each at the time of its state."""
    nodes: list[SavedNode]
    """In the order in which they saved their states. A resumed simulation starts them in this order."""
    failed: dict[str, str]
    """Nodes that had failed, with the reason."""
    incarnations: dict[str, int] = {}
    """How often nodes had been restarted, if they had."""
    hung: list[NodeId] = []
    without_state: list[NodeId] = []
    """Service nodes that begin again: they have no state."""
    ticks: int = 0
    """The number of evaluations by the clock when the last node saved its state."""
    events: int = 0
    """The number of timed events when the last node saved its state, in the simulation."""


class Checkpoints:
    """The folder of a run's checkpoints.

    Node processes use file names as strings. `Path` enters each part of a path in Python's table of strings, and a node
    shares the memory of this table with the zygote until it writes to it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.path / "checkpoints"

    def folder(self, round: int) -> Path:
        return self.path / f"round-{round}"

    def state(self, round: int, node: NodeId) -> Path:
        return Path(self.state_name(round, node))

    def state_name(self, round: int, node: NodeId) -> str:
        return f"{self.path}/round-{round}/{node}.safetensors"

    def latest_state(self, round: int, node: NodeId) -> Path:
        """The file of a node's state before it is part of a checkpoint, where nodes do not wait for each other."""
        return Path(self.latest_state_name(round, node))

    def latest_state_name(self, round: int, node: NodeId) -> str:
        return f"{self.path}/latest/{node}-{round}.safetensors"

    def kept_models(self, node: NodeId) -> Path:
        """The file of models that a node evaluates after the run."""
        return self.path / "kept" / f"{node}.models"

    def kept_averages(self) -> Path:
        """The folder of averaged models that are not evaluated yet."""
        return self.path / "kept" / "averages"

    def rounds(self) -> list[int]:
        """The rounds of all checkpoints, complete or not, in ascending order."""
        names = (re.fullmatch(r"round-(\d+)", folder.name) for folder in self.path.glob("round-*"))
        return sorted(int(name[1]) for name in names if name is not None)

    def write(self, manifest: Manifest) -> None:
        """Write a manifest atomically. Raises `StorageError`."""
        with replacing(self.folder(manifest.round) / MANIFEST) as unfinished:
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")

    def is_complete(self, round: int) -> bool:
        return os.path.exists(f"{self.path}/round-{round}/{MANIFEST}")

    def adopt(self, saved: SavedNode, round: int) -> bool:
        """Make a latest state part of the checkpoint of `round`. Returns False if the file does not exist any more."""
        source, target = self.latest_state(saved.round, saved.node), self.state(round, saved.node)
        with writing_to(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except FileNotFoundError:
                return False
            except OSError:  # a file system without hard links
                shutil.copyfile(source, target)
        return True

    def manifest(self, round: int) -> Manifest:
        """Read the manifest of a checkpoint, whose states may be damaged. Raises `CheckpointError`."""
        path = self.folder(round) / MANIFEST
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise CheckpointError("it has no manifest: some nodes had not saved their state") from None
        except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if manifest.format != FORMAT:
            raise CheckpointError(f"{path} has format {manifest.format}; this version of Shoal reads format {FORMAT}")
        return manifest

    def read(self, round: int) -> Manifest:
        """Read the manifest of a checkpoint. Raises `CheckpointError` with the reason if the checkpoint is invalid."""
        manifest = self.manifest(round)
        for saved in manifest.nodes:
            if not matches(self.state(round, saved.node), saved.file):
                raise CheckpointError(f"{self.state(round, saved.node)} is missing or damaged")
        return manifest

    def latest(self, notice: Callable[[str], None]) -> Manifest | None:
        """Return the latest valid checkpoint; None if there is none. `notice` is called for every invalid one."""
        for round in reversed(self.rounds()):
            try:
                return self.read(round)
            except CheckpointError as error:
                notice(f"the checkpoint of round {round} is not used: {error}")
        return None

    def latest_of(self, node: NodeId) -> Path | None:
        """Return the state of one node in the latest complete checkpoint that has it."""
        for round in reversed(self.rounds()):
            with contextlib.suppress(CheckpointError):
                if any(saved.node == node for saved in self.read(round).nodes):
                    return self.state(round, node)
        return None

    def remove(self, round: int) -> None:
        """Delete a checkpoint: its manifest first, so that it is never valid with a part of its files."""
        with contextlib.suppress(OSError):
            (self.folder(round) / MANIFEST).unlink()
        shutil.rmtree(self.folder(round), ignore_errors=True)

    def remove_older(self, round: int, keep: int) -> None:
        """Delete all checkpoints before `round` except the `keep` − 1 latest complete ones."""
        older = [r for r in self.rounds() if r < round]
        complete = [r for r in older if self.is_complete(r)]
        kept = set(complete[max(0, len(complete) - (keep - 1)) :]) if keep > 1 else set()
        for r in older:
            if r not in kept:
                self.remove(r)

    def remove_after(self, round: int) -> None:
        """Delete everything after the checkpoint of `round`: a resumed run writes it again."""
        for r in self.rounds():
            if r > round:
                self.remove(r)
        shutil.rmtree(self.path / "latest", ignore_errors=True)
