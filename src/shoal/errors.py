"""What can go wrong, as one tree.

    ShoalError
    ├── ExperimentError        the description is wrong; found before anything starts
    ├── DataError              a data set or a partition cannot be made as asked
    ├── TopologyError          a graph cannot be made, or is not a graph we can use
    ├── MessageError           bytes that are not a message of this run
    └── RunError               the run started and cannot go on
        ├── DeadlockError      every simulated node waits, and nothing can wake one
        ├── NodeError          a node's own code raised
        │   └── PrivacyError   it stopped rather than show what it must not
        └── LaunchError        nodes could not be started here

Every message names the thing, its value, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class ShoalError(Exception):
    """Anything that Shoal raises on purpose. The command line prints it without a traceback."""


class ExperimentError(ShoalError):
    """The experiment is wrong. `problems` holds every one found, each with its place."""

    def __init__(self, problems: Sequence[str], source: str = "experiment") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{source}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  - {p}" for p in self.problems)]))


class DataError(ShoalError):
    """A data set or a partition cannot be made as asked."""


class TopologyError(ShoalError):
    """A graph cannot be made, or is not one that nodes can use."""


class MessageError(ShoalError):
    """Bytes that are not a message of this run: dropped and counted, never trusted."""


class RunError(ShoalError):
    """The run started and cannot go on."""


class DeadlockError(RunError):
    """Every simulated node waits and no event is left that could wake one."""


class NodeError(RunError):
    """A node's own code raised; the message carries its traceback."""


class PrivacyError(NodeError):
    """Going on would show what must not be shown, or garble what is hidden; nothing was sent."""


class LaunchError(RunError):
    """Nodes could not be started on this machine."""
