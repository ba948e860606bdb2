"""What a coordinator leaves in the folder of its run, so that another one can continue the run if it is killed.

The file exists while nodes run on agents. It has no secrets: agents accept a coordinator by its key.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shoal.errors import CheckpointError
from shoal.results.records import RunFolder, replacing
from shoal.types import NodeId

NAME = "coordinator.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class AgentShare(msgspec.Struct, frozen=True):
    """One agent of the run. The first agent has the network process."""

    name: str
    session: str
    nodes: list[NodeId]
    records: dict[str, int] = {}
    """The bytes of each node's records that are not on the agent's machine, if the run was resumed."""


class CoordinatorFile(msgspec.Struct, frozen=True):
    """The run of a coordinator."""

    agents: list[AgentShare]
    base: str
    """The folder that relative paths in the experiment refer to."""
    experiment: str
    """A hash of the experiment."""
    boot: str
    """Identifies the start of the coordinator's machine: its monotonic clock continues until the next one."""
    epoch: float
    """When the run began, on the coordinator's monotonic clock."""
    training_began: float
    """When training began, in seconds since 1970, less the wall time before the checkpoint of a resumed run."""
    startup_s: float | None
    first_round_s: float | None
    clock_error: float
    incarnations: dict[str, int] = {}
    """How often each node was restarted."""
    lost: dict[str, str] = {}
    """The nodes that have failed, or have not joined, with the reason."""


def boot_id() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


def write_coordinator_file(folder: RunFolder, content: CoordinatorFile) -> None:
    """Write the file atomically. Raises `StorageError`."""
    with replacing(folder.path / NAME) as unfinished:
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(msgspec.json.encode(content))


def read_coordinator_file(folder: RunFolder) -> CoordinatorFile | None:
    """Read the file that a killed coordinator has left; None if there is none. Raises `CheckpointError`."""
    path = folder.path / NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=CoordinatorFile)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; remove it to resume from a checkpoint") from error


def remove_coordinator_file(folder: RunFolder) -> None:
    """Remove the file, if there is one: the run has ended, and its agents have ended its nodes."""
    try:
        os.unlink(folder.path / NAME)
    except FileNotFoundError:
        return
