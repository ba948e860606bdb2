"""The exceptions of Shoal, as one tree.

    ShoalError
    ├── ExperimentError        the experiment is invalid; found before the run starts
    ├── DataError              a data set or a partition cannot be created
    ├── TopologyError          a graph cannot be created, or nodes cannot use it
    ├── CheckpointError        a checkpoint is missing or damaged, or does not belong to the run
    ├── MessageError           bytes that are not a valid message of this run
    └── RunError               the run started and cannot continue
        ├── DeadlockError      all simulated nodes wait, and no event can wake one
        ├── NodeError          the code of a node raised an exception
        │   └── PrivacyError   the node stopped because it would have revealed hidden data
        ├── StorageError       the files of the run cannot be written
        │   └── DiskFullError  the disk or the quota is full; it may have space again later
        ├── NotContinuedError  the nodes of a run whose coordinator was killed have ended too
        ├── SetupError         the code of a component raised an exception before nodes started
        └── LaunchError        nodes or workers could not be started

Every error text has the key or field, its value, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class ShoalError(Exception):
    """Base class of all errors that Shoal raises. The command line prints them without a traceback."""


class ExperimentError(ShoalError):
    """The experiment is invalid. `problems` lists all problems, each with its location; `source` names the file."""

    def __init__(self, problems: Sequence[str], source: str = "experiment") -> None:
        self.problems, self.source = tuple(problems), source
        count = len(self.problems)
        head = f"{source}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  - {p}" for p in self.problems)]))


class DataError(ShoalError):
    """A data set or a partition cannot be created."""


class TopologyError(ShoalError):
    """A graph cannot be created, or nodes cannot use it."""


class CheckpointError(ShoalError):
    """A checkpoint is missing or damaged, or does not belong to the run: the run cannot be resumed from it."""


class MessageError(ShoalError):
    """Bytes that are not a valid message of this run. They are dropped and counted."""


class RunError(ShoalError):
    """The run started and cannot continue."""


class DeadlockError(RunError):
    """All simulated nodes wait, and no event is left that could wake one."""


class NodeError(RunError):
    """The code of a node raised an exception; the error text contains its traceback."""


class PrivacyError(NodeError):
    """To continue would reveal hidden data or corrupt a masked sum. Nothing was sent."""


class StorageError(RunError):
    """The files of the run cannot be written: the disk is full, or the run's folder was removed."""


class NotContinuedError(RunError):
    """The nodes of a run whose coordinator was killed have ended too."""


class DiskFullError(StorageError):
    """The disk or the quota is full. It may have space again later."""


class SetupError(RunError):
    """The code of a component raised an exception before nodes started; the error text contains its traceback."""


class LaunchError(RunError):
    """Nodes or workers could not be started."""


class NoFreePortError(LaunchError):
    """The system has no free port left."""
